"""The convolution module of a Conformer between its two products, as functions of tensors: our kernels on a GPU.

Lengths are (batch,) int32. The same in PyTorch on a CPU, in any dtype.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def gate(y: Tensor, lengths: Tensor) -> Tensor:
    """(batch, time, 2 * channels) -> (batch, time, channels): values times sigmoid of gates, zero behind a length."""
    if y.is_cuda:
        from paceline.recipes.speech.kernels.conformer import gated_rows

        return gated_rows.gate(y, lengths)
    value, gates = y.to(torch.promote_types(y.dtype, torch.float32)).chunk(2, -1)
    return (value * gates.sigmoid() * _held(lengths, y)).to(y.dtype)


def depthwise(
    u: Tensor, lengths: Tensor, weight: Tensor, bias: Tensor, norm: tuple[Tensor, Tensor], eps: float, counts_all: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the convolution over time, and its batch norm as scale and shift, and as moments.

    Args:
        u: (batch, time, channels), zero behind each length.
        lengths: Frames of the utterances.
        weight: (kernel, channels), float32 at least.
        bias: (channels,).
        norm: Weight and bias of the batch norm.
        eps: Of the batch norm.
        counts_all: The statistics count frames behind the lengths as well, as NeMo's do.

    Returns:
        (batch, time, channels); (2, channels); (4, channels) mean, 1 / deviation, unbiased variance, frames.
    """
    if u.is_cuda:
        from paceline.recipes.speech.kernels.conformer import gated_rows

        return gated_rows.depthwise(u, lengths, weight, bias, norm, eps, counts_all)
    wide = torch.promote_types(u.dtype, torch.float32)
    out = _convolved(u.to(wide), weight.to(wide)) + bias.to(wide)
    out = out.to(u.dtype)
    counts = torch.ones_like(_held(lengths, u)) if counts_all else _held(lengths, u)
    size = counts.sum().clamp(min=1).to(wide)
    value = out.to(wide)
    mean = (value * counts).sum((0, 1)) / size
    inner = ((value - mean).square() * counts).sum((0, 1))
    inverse = torch.rsqrt(inner / size + eps)
    scale = norm[0].to(wide) * inverse
    affine = torch.stack([scale, norm[1].to(wide) - mean * scale])
    return out, affine, torch.stack([mean, inverse, inner / (size - 1).clamp(min=1), size.expand_as(mean)])


def swished(z: Tensor, affine: Tensor) -> Tensor:
    """Return swish of batch norm."""
    if z.is_cuda:
        from paceline.recipes.speech.kernels.conformer import gated_rows

        return gated_rows.swished(z, affine)
    normed = z.to(affine.dtype) * affine[0] + affine[1]
    return (normed * normed.sigmoid()).to(z.dtype)


def norm_backward(
    g: Tensor, z: Tensor, affine: Tensor, moments: Tensor, lengths: Tensor, counts_all: bool
) -> tuple[Tensor, Tensor]:
    """Return the gradient of z, and (2, channels) sums: of that behind batch norm, and of it times (z - mean).

    `g` is taken as zero behind the lengths, since nothing that counts is read there.
    """
    if g.is_cuda:
        from paceline.recipes.speech.kernels.conformer import gated_rows

        return gated_rows.norm_backward(g, z, affine, moments, lengths, counts_all)
    held = _held(lengths, z)
    value = z.to(affine.dtype)
    normed = value * affine[0] + affine[1]
    opened = normed.sigmoid()
    h = g.to(affine.dtype) * (opened + normed * opened * (1 - opened)) * held
    away = value - moments[0]
    sums = torch.stack([h.sum((0, 1)), (h * away).sum((0, 1))])
    size = moments[3]
    found = affine[0] * (h - sums[0] / size - away * (sums[1] * moments[1].square() / size))
    return (found if counts_all else found * held).to(z.dtype), sums


def depthwise_backward(g: Tensor, y: Tensor, lengths: Tensor, weight: Tensor, parts: Tensor) -> Tensor:
    """Return the gradient of y, from that of the convolution of gate(y).

    Columns of `parts` get sums: 3 * channels, of g, and of both halves of the gradient of y.
    """
    if g.is_cuda:
        from paceline.recipes.speech.kernels.conformer import gated_rows

        return gated_rows.depthwise_backward(g, y, lengths, weight, parts)
    wide = torch.promote_types(y.dtype, torch.float32)
    value, gates = y.to(wide).chunk(2, -1)
    opened = gates.sigmoid()
    upper = g.to(wide)
    of_u = _convolved(upper, weight.to(wide).flip(0)) * _held(lengths, y)
    of_y = torch.cat([of_u * opened, of_u * value * opened * (1 - opened)], -1)
    parts.zero_()[0] = torch.cat([upper.sum((0, 1)), of_y.sum((0, 1))])
    return of_y.to(y.dtype)


def taps_backward(g: Tensor, u: Tensor, lengths: Tensor, kernel: int, parts: Tensor) -> None:
    """Columns of `parts` get sums for the gradient of the weight: kernel * channels.

    `g` is the gradient of the convolution, `u` what was convolved.
    """
    if g.is_cuda:
        from paceline.recipes.speech.kernels.conformer import gated_rows

        gated_rows.taps_backward(g, u, lengths, kernel, parts)
        return
    wide = torch.promote_types(u.dtype, torch.float32)
    half, time = kernel // 2, u.shape[1]
    padded, upper = F.pad(u.to(wide), (0, 0, half, half)), g.to(wide)
    parts.zero_()[0] = torch.cat([(padded[:, tap : tap + time] * upper).sum((0, 1)) for tap in range(kernel)])


def _convolved(x: Tensor, weight: Tensor) -> Tensor:
    kernel, channels = weight.shape
    return F.conv1d(x.mT, weight.T[:, None], padding=kernel // 2, groups=channels).mT


def _held(lengths: Tensor, x: Tensor) -> Tensor:
    """(batch, time, 1): frames that belong to their utterance."""
    return (torch.arange(x.shape[1], device=x.device) < lengths[:, None])[..., None]
