"""The strided convolutions before a Conformer as functions of tensors: our kernels on a GPU, PyTorch elsewhere.

Lengths are those of the mels, (batch,) int32; everything behind them counts as zero, and so does every activation
behind what a stride of 2 leaves of them.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def first(mels: Tensor, lengths: Tensor, weight: Tensor, depth_weight: Tensor, depth_bias: Tensor) -> Tensor:
    """(batch, mel, time) -> (batch, time / 4, mel / 4, channels): a convolution, ReLU, a depthwise convolution.

    Args:
        mels: Contiguous, in the dtype of the products.
        lengths: Of the mels.
        weight: (16, channels) of the first: nine taps (time, mel), the bias, zeros; in the dtype of the products.
        depth_weight: (9, channels), float32 at least.
        depth_bias: (channels,), float32 at least.
    """
    if mels.is_cuda:
        from paceline.recipes.speech.kernels.conformer import striding

        return striding.first(mels, lengths, weight, depth_weight, depth_bias)
    wide = torch.promote_types(mels.dtype, torch.float32)
    h = _opened(mels.to(wide), lengths, weight.to(wide))
    out = _depthwise(h.relu(), depth_weight.to(wide), depth_bias.to(wide))
    return (out * _held(halved(halved(lengths)), out)).permute(0, 2, 3, 1).contiguous().to(mels.dtype)


def first_backward(g: Tensor, mels: Tensor, lengths: Tensor, weight: Tensor, depth_weight: Tensor) -> Tensor:
    """(26, channels): gradients of the 16 rows of `weight`, of the 9 of `depth_weight`, of its bias."""
    if g.is_cuda:
        from paceline.recipes.speech.kernels.conformer import striding

        return striding.first_backward(g, mels, lengths, weight, depth_weight)
    wide = torch.promote_types(mels.dtype, torch.float32)
    with torch.enable_grad():
        leaves = [each.detach().to(wide).requires_grad_() for each in (weight, depth_weight)]
        bias = torch.zeros(weight.shape[1], dtype=wide, device=g.device, requires_grad=True)
        out = _depthwise(_opened(mels.to(wide), lengths, leaves[0]).relu(), leaves[1], bias)
        out = out * _held(halved(halved(lengths)), out)
        found = torch.autograd.grad(out, [*leaves, bias], g.to(wide).permute(0, 3, 1, 2))
    return torch.cat([found[0], found[1], found[2][None]])


def second(x: Tensor, lengths: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """(batch, time / 4, mel / 4, channels) -> (batch, time / 8, mel / 8, channels): ReLU, a depthwise convolution."""
    if x.is_cuda:
        from paceline.recipes.speech.kernels.conformer import striding

        return striding.second(x, lengths, weight, bias)
    wide = torch.promote_types(x.dtype, torch.float32)
    return _second(x.to(wide), lengths, weight.to(wide), bias.to(wide)).contiguous().to(x.dtype)


def second_backward(g: Tensor, x: Tensor, lengths: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Gradient of x; (11, channels) of the 9 rows of `weight`, of the bias, and sums of the gradient of x."""
    if g.is_cuda:
        from paceline.recipes.speech.kernels.conformer import striding

        return striding.second_backward(g, x, lengths, weight)
    wide = torch.promote_types(x.dtype, torch.float32)
    with torch.enable_grad():
        leaves = [each.detach().to(wide).requires_grad_() for each in (x, weight)]
        bias = torch.zeros(weight.shape[1], dtype=wide, device=g.device, requires_grad=True)
        of_x, of_weight, of_bias = torch.autograd.grad(
            _second(leaves[0], lengths, leaves[1], bias), [*leaves, bias], g.to(wide)
        )
    return of_x.to(x.dtype), torch.cat([of_weight, of_bias[None], of_x.sum((0, 1, 2))[None]])


def halved(lengths: Tensor) -> Tensor:
    """Return what a stride of 2 leaves."""
    return (lengths + 1) // 2


def _opened(mels: Tensor, lengths: Tensor, weight: Tensor) -> Tensor:
    """(batch, channels, time / 2, mel / 2): the first convolution."""
    x = (mels * (torch.arange(mels.shape[2], device=mels.device) < lengths[:, None])[:, None]).mT[:, None]
    out = F.conv2d(x, weight[:9].T.reshape(-1, 1, 3, 3), weight[9], 2, 1)
    return out * _held(halved(lengths), out)


def _second(x: Tensor, lengths: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    inner = x.relu().permute(0, 3, 1, 2)
    length_2 = halved(halved(lengths))
    out = _depthwise(inner * _held(length_2, inner), weight, bias)
    return (out * _held(halved(length_2), out)).permute(0, 2, 3, 1)


def _depthwise(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.conv2d(x, weight.T.reshape(-1, 1, 3, 3), bias, 2, 1, groups=x.shape[1])


def _held(lengths: Tensor, x: Tensor) -> Tensor:
    """(batch, 1, time, 1): frames that belong to their utterance."""
    return (torch.arange(x.shape[2], device=x.device) < lengths[:, None])[:, None, :, None]
