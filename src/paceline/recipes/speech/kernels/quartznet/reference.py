"""The computation of the kernels in plain PyTorch: their contract, their reference in tests, their stand-in on a CPU.

Same arguments and results as the functions of `depthwise` and `norm`. What those round to bfloat16 (activations and
filters before a product, every large result) is rounded here too if the input is bfloat16; in float64 nothing is.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.recipes.speech.kernels.tiles import padding


def depthwise_forward(
    x: Tensor,
    affine: Tensor | None,
    lengths_in: Tensor,
    lengths_out: Tensor,
    weight: Tensor,
    row_out: int,
    stride: int,
    dilation: int,
) -> Tensor:
    active = activated(x, affine, lengths_in)
    out = _convolved(active, _rounded(weight, x.dtype), stride, dilation)
    out = F.pad(out, (0, max(0, row_out - out.shape[-1])))[..., :row_out]
    return (out * held(lengths_out, row_out)).to(x.dtype).contiguous()


def depthwise_backward(
    g: Tensor,
    x: Tensor,
    affine: Tensor | None,
    moments: Tensor | None,
    added: Tensor | None,
    lengths_in: Tensor,
    lengths_out: Tensor,
    weight: Tensor,
    stride: int,
    dilation: int,
    *,
    needs_data: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    active, filters = activated(x, affine, lengths_in), _rounded(weight, x.dtype)
    pad = padding(weight.shape[-1], dilation)
    # As long as the convolution of a padded row would have been; what is cut off or added is zero.
    frames_out = -(-x.shape[-1] // stride)
    g = F.pad(_wide(g), (0, max(0, frames_out - g.shape[-1])))[..., :frames_out]
    data, gradient, _ = torch.ops.aten.convolution_backward(
        *(g.transpose(0, 1), active.transpose(0, 1), filters),
        *(None, [stride], [pad], [dilation], False, [0], x.shape[0], [True, True, False]),
    )
    data = data.transpose(0, 1)
    if added is not None:
        data = data + added
    alive = held(lengths_in, x.shape[-1]).expand_as(data)
    if affine is not None:
        alive = alive & (_scaled(x, affine) > 0)
    h = data * alive
    sums = h.new_zeros(1, 2, x.shape[0])
    if moments is not None:
        sums = torch.stack([(h * (_wide(x) - _per_channel(moments[0]))).sum((1, 2)), h.sum((1, 2))]).unsqueeze(0)
    data = h.to(x.dtype).contiguous() if needs_data else x.new_empty(0)
    return data, gradient.reshape(1, x.shape[0], -1), sums


def statistics(
    y: Tensor,
    lengths: Tensor,
    frames: int,
    weight: Tensor,
    bias: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    values = _wide(y)[..., :frames]
    variance, mean = torch.var_mean(values, (1, 2), correction=0)
    count = values.shape[1] * frames
    inverse, unbiased = torch.rsqrt(variance + eps), variance * (count / (count - 1))
    return torch.stack([weight * inverse, bias - mean * weight * inverse]), torch.stack([mean, inverse, unbiased])


def apply_backward(
    h: Tensor, sums: Tensor, y: Tensor, affine: Tensor, moments: Tensor, lengths: Tensor, frames: int
) -> tuple[Tensor, Tensor, Tensor]:
    count = y.shape[1] * frames
    inverse = moments[1]
    away = _wide(y) - _per_channel(moments[0])
    g = _wide(h) - _per_channel(sums[1] / count) - away * _per_channel(sums[0] * inverse * inverse / count)
    g = g * _per_channel(affine[0]) * held(lengths, y.shape[-1])
    return g.to(y.dtype), sums[0] * inverse, sums[1].clone()


def join(
    y: Tensor,
    affine: Tensor,
    other: Tensor | None,
    other_affine: Tensor | None,
    lengths: Tensor,
    frames: int | None = None,
    order: Tensor | None = None,
) -> Tensor:
    total = _scaled(y, affine)
    if other is not None and other_affine is not None:
        total = total + _scaled(other, other_affine)
    out = (total.relu() * held(lengths, y.shape[-1])).to(y.dtype)
    if frames is None:
        return out
    out = out[..., :frames].transpose(0, 1)
    return out.contiguous() if order is None else torch.empty_like(out).index_copy_(0, order.long(), out).contiguous()


def join_backward(
    g: Tensor,
    y: Tensor,
    affine: Tensor,
    moments: Tensor,
    other: Tensor | None,
    other_affine: Tensor | None,
    other_moments: Tensor | None,
    lengths: Tensor,
    order: Tensor | None = None,
    *,
    is_packed: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    if order is not None:
        g = g[order.long()]
    if not is_packed:
        g = F.pad(g.transpose(0, 1), (0, y.shape[-1] - g.shape[-1]))
    total = _scaled(y, affine)
    if other is not None and other_affine is not None:
        total = total + _scaled(other, other_affine)
    h = _wide(g) * (total > 0) * held(lengths, y.shape[-1])
    level = h.sum((1, 2))
    sums = []
    for values, mean in ((y, moments), (other, other_moments)):
        if values is None or mean is None:
            sums.append(torch.stack([torch.zeros_like(level), level]))
        else:
            sums.append(torch.stack([(h * (_wide(values) - _per_channel(mean[0]))).sum((1, 2)), level]))
    return h.to(y.dtype), sums[0], sums[1]


def activated(x: Tensor, affine: Tensor | None, lengths: Tensor) -> Tensor:
    """Return the input of a convolution for raw values: batch-normed, behind ReLU and mask."""
    active = _wide(x) if affine is None else _scaled(x, affine).relu()
    return _rounded(active * held(lengths, x.shape[-1]), x.dtype)


def held(lengths: Tensor, row: int) -> Tensor:
    """(batch, row) bool: frames that belong to their utterance."""
    return torch.arange(row, device=lengths.device) < lengths.unsqueeze(1)


def _convolved(x: Tensor, weight: Tensor, stride: int, dilation: int) -> Tensor:
    """(channel, batch, row) -> the same after the stride."""
    pad = padding(weight.shape[-1], dilation)
    out = F.conv1d(x.transpose(0, 1), weight, None, stride, pad, dilation, groups=x.shape[0])
    return out.transpose(0, 1)


def _scaled(x: Tensor, affine: Tensor) -> Tensor:
    return _wide(x) * _per_channel(affine[0]) + _per_channel(affine[1])


def _per_channel(values: Tensor) -> Tensor:
    return values[:, None, None]


def _wide(x: Tensor) -> Tensor:
    """In the dtype that sums are made in."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """As it stands in a product of this dtype, but in the dtype of sums."""
    return _wide(x.to(dtype))
