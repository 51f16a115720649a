"""The separable sub-block as operators that PyTorch knows: autograd, autocast, torch.compile, DDP and CUDA graphs.

A sub-block hands on the raw outputs `y` of its product over channels, and beside them `affine`, the scale and shift of
its batch norm, for the next one to apply when it reads `y`. Backward, the pair stands for what they mean together: the
"gradient" of `y` is that of the batch-normed values, that of `affine` are the two sums per channel that the batch
norm's own gradient is made of (`depthwise.backward`). So a `y` may only be used together with its `affine`, once, by an
operator of this file. On a CPU the reference computes the same.
"""

from __future__ import annotations

from typing import Any, Optional

import torch
from torch import Tensor

from paceline.speed.kernels import reference
from paceline.speed.kernels.tiles import padded_frames

# Optional and not `| None`: the schema of an operator is read off these signatures, and by Python 3.10 too.


@torch.library.custom_op("paceline::separable", mutates_args=())
def separable(
    x: Tensor,
    affine: Optional[Tensor],
    moments: Optional[Tensor],
    lengths: Tensor,
    lengths_out: Tensor,
    depthwise: Tensor,
    pointwise: Tensor,
    weight: Tensor,
    bias: Tensor,
    frames: int,
    stride: int,
    dilation: int,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(channel, batch, row) -> `y` (filter, batch, row after the stride), `affine`, `moments`, and what lies between.

    `frames` are those of the output; its row is padded. `lengths` of inputs and outputs are int32.
    """
    row = padded_frames(frames)
    if x.is_cuda:
        from paceline.speed.kernels import depthwise as kernels

        between = kernels.forward(x, affine, lengths, lengths_out, depthwise, row, stride, dilation)
    else:
        between = reference.depthwise_forward(x, affine, lengths, lengths_out, depthwise, row, stride, dilation)
    y = _product(pointwise.to(x.dtype).squeeze(2), between)
    return (
        y,
        *_statistics(y, lengths_out, frames, weight, bias, eps),
        between,
    )


@separable.register_fake
def _(
    x: Tensor,
    affine: Optional[Tensor],
    moments: Optional[Tensor],
    lengths: Tensor,
    lengths_out: Tensor,
    depthwise: Tensor,
    pointwise: Tensor,
    weight: Tensor,
    bias: Tensor,
    frames: int,
    stride: int,
    dilation: int,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    channels, batch, _ = x.shape
    filters, row = pointwise.shape[0], padded_frames(frames)
    y, between = x.new_empty(filters, batch, row), x.new_empty(channels, batch, row)
    return y, weight.new_empty(2, filters), weight.new_empty(3, filters), between


@torch.library.custom_op("paceline::separable_backward", mutates_args=())
def separable_backward(
    h: Tensor,
    sums: Tensor,
    y: Tensor,
    affine_out: Tensor,
    moments_out: Tensor,
    between: Tensor,
    x: Tensor,
    affine: Optional[Tensor],
    moments: Optional[Tensor],
    lengths: Tensor,
    lengths_out: Tensor,
    depthwise: Tensor,
    pointwise: Tensor,
    frames: int,
    stride: int,
    dilation: int,
    needs_data: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, affine, depthwise, pointwise, weight, bias; the first two empty if not `needs_data`."""
    g, weight_gradient, bias_gradient = _norm_backward(h, sums, y, affine_out, moments_out, lengths_out, frames)
    pointwise_gradient = _weight_gradient(g, between).unsqueeze(2)
    g = _product(pointwise.to(x.dtype).squeeze(2).t(), g)
    if x.is_cuda:
        from paceline.speed.kernels import depthwise as kernels

        found = kernels.backward
    else:
        found = reference.depthwise_backward
    data, depthwise_parts, sum_parts = found(
        g, x, affine, moments, None, lengths, lengths_out, depthwise, stride, dilation, needs_data=needs_data
    )
    depthwise_gradient = depthwise_parts.sum(0).view_as(depthwise)
    sums_in = sum_parts.sum(0) if needs_data and affine is not None else sums.new_empty(0)
    return data, sums_in, depthwise_gradient, pointwise_gradient, weight_gradient, bias_gradient


@separable_backward.register_fake
def _(
    h: Tensor,
    sums: Tensor,
    y: Tensor,
    affine_out: Tensor,
    moments_out: Tensor,
    between: Tensor,
    x: Tensor,
    affine: Optional[Tensor],
    moments: Optional[Tensor],
    lengths: Tensor,
    lengths_out: Tensor,
    depthwise: Tensor,
    pointwise: Tensor,
    frames: int,
    stride: int,
    dilation: int,
    needs_data: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    data = torch.empty_like(x) if needs_data else x.new_empty(0)
    sums_in = torch.empty_like(affine) if needs_data and affine is not None else sums.new_empty(0)
    filters = pointwise.shape[0]
    return (
        data,
        sums_in,
        torch.empty_like(depthwise),
        torch.empty_like(pointwise),
        sums.new_empty(filters),
        sums.new_empty(filters),
    )


def _save_separable(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, affine, moments, lengths, lengths_out, depthwise, pointwise, *_ = inputs
    ctx.save_for_backward(*output, x, affine, moments, lengths, lengths_out, depthwise, pointwise)
    ctx.frames, ctx.stride, ctx.dilation = inputs[9:12]


def _separable_gradients(ctx: Any, h: Tensor, sums: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    needs_data = ctx.needs_input_grad[0]
    affine = ctx.saved_tensors[5]
    data, sums_in, depthwise, pointwise, weight, bias = separable_backward(
        h.contiguous(), sums, *ctx.saved_tensors, ctx.frames, ctx.stride, ctx.dilation, needs_data
    )
    return (
        data if needs_data else None,
        sums_in if needs_data and affine is not None else None,
        None,
        None,
        None,
        depthwise,
        pointwise,
        weight,
        bias,
        *(None for _ in range(4)),
    )


separable.register_autograd(_separable_gradients, setup_context=_save_separable)


@torch.library.custom_op("paceline::pointwise", mutates_args=())
def pointwise(
    x: Tensor,
    lengths: Tensor,
    filters: Tensor,
    weight: Tensor,
    bias: Tensor,
    frames: int,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """A sub-block without a convolution over time, and a residual: activations -> `y`, `affine`, `moments`."""
    y = _product(filters.to(x.dtype).squeeze(2), x)
    return (y, *_statistics(y, lengths, frames, weight, bias, eps))


@pointwise.register_fake
def _(
    x: Tensor,
    lengths: Tensor,
    filters: Tensor,
    weight: Tensor,
    bias: Tensor,
    frames: int,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    width = filters.shape[0]
    return x.new_empty(width, *x.shape[1:]), weight.new_empty(2, width), weight.new_empty(3, width)


@torch.library.custom_op("paceline::pointwise_backward", mutates_args=())
def pointwise_backward(
    h: Tensor,
    sums: Tensor,
    y: Tensor,
    affine: Tensor,
    moments: Tensor,
    x: Tensor,
    lengths: Tensor,
    filters: Tensor,
    frames: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, filters, weight, bias."""
    g, weight_gradient, bias_gradient = _norm_backward(h, sums, y, affine, moments, lengths, frames)
    data = _product(filters.to(x.dtype).squeeze(2).t(), g)
    return data, _weight_gradient(g, x).unsqueeze(2), weight_gradient, bias_gradient


@pointwise_backward.register_fake
def _(
    h: Tensor,
    sums: Tensor,
    y: Tensor,
    affine: Tensor,
    moments: Tensor,
    x: Tensor,
    lengths: Tensor,
    filters: Tensor,
    frames: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    width = filters.shape[0]
    return torch.empty_like(x), torch.empty_like(filters), sums.new_empty(width), sums.new_empty(width)


def _save_pointwise(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*output, *inputs[:3])
    ctx.frames = inputs[5]


def _pointwise_gradients(ctx: Any, h: Tensor, sums: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    data, filters, weight, bias = pointwise_backward(h.contiguous(), sums, *ctx.saved_tensors, ctx.frames)
    return (data, None, filters, weight, bias, None, None)


pointwise.register_autograd(_pointwise_gradients, setup_context=_save_pointwise)


@torch.library.custom_op("paceline::join", mutates_args=())
def join(
    y: Tensor,
    affine: Tensor,
    moments: Tensor,
    other: Optional[Tensor],
    other_affine: Optional[Tensor],
    other_moments: Optional[Tensor],
    lengths: Tensor,
) -> Tensor:
    """Activations in full, where they are needed more than once: ReLU of a batch norm's output, or of a sum of two."""
    if y.is_cuda:
        from paceline.speed.kernels import norm

        return norm.join(y, affine, other, other_affine, lengths)
    return reference.join(y, affine, other, other_affine, lengths)


@join.register_fake
def _(
    y: Tensor,
    affine: Tensor,
    moments: Tensor,
    other: Optional[Tensor],
    other_affine: Optional[Tensor],
    other_moments: Optional[Tensor],
    lengths: Tensor,
) -> Tensor:
    return torch.empty_like(y)


@torch.library.custom_op("paceline::join_backward", mutates_args=())
def join_backward(
    g: Tensor,
    out: Tensor,
    y: Tensor,
    moments: Tensor,
    other: Optional[Tensor],
    other_moments: Optional[Tensor],
    lengths: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of y (and of other: the same), of affine, of other_affine."""
    if y.is_cuda:
        from paceline.speed.kernels import norm

        h, sums, other_sums = norm.join_backward(g, out, y, moments, other, other_moments, lengths)
    else:
        h, sums, other_sums = reference.join_backward(g, out, y, moments, other, other_moments, lengths)
    return h, sums.contiguous(), other_sums.contiguous()


@join_backward.register_fake
def _(
    g: Tensor,
    out: Tensor,
    y: Tensor,
    moments: Tensor,
    other: Optional[Tensor],
    other_moments: Optional[Tensor],
    lengths: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    sums, other_sums = (moments.new_empty(2, y.shape[0]) for _ in range(2))
    return torch.empty_like(y), sums, other_sums


def _save_join(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    y, _, moments, other, _, other_moments, lengths = inputs
    ctx.save_for_backward(output, y, moments, other, other_moments, lengths)


def _join_gradients(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
    h, sums, other_sums = join_backward(g.contiguous(), *ctx.saved_tensors)
    has_other = ctx.saved_tensors[3] is not None
    return h, sums, None, h if has_other else None, other_sums if has_other else None, None, None


join.register_autograd(_join_gradients, setup_context=_save_join)


def _statistics(y: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    if y.is_cuda:
        from paceline.speed.kernels import norm

        return norm.statistics(y, *rest)
    return reference.statistics(y, *rest)


def _norm_backward(h: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    if h.is_cuda:
        from paceline.speed.kernels import norm

        return norm.apply_backward(h, *rest)
    return reference.apply_backward(h, *rest)


def _product(matrix: Tensor, x: Tensor) -> Tensor:
    """(out, in) times (in, batch, row): one product, since channels come first."""
    with torch.autocast(x.device.type, enabled=False):
        return torch.mm(matrix, x.flatten(1)).unflatten(1, x.shape[1:])


def _weight_gradient(g: Tensor, x: Tensor) -> Tensor:
    """(out, in), summed and kept in float32 or wider."""
    with torch.autocast(x.device.type, enabled=False):
        if x.is_cuda:
            return torch.mm(g.flatten(1), x.flatten(1).t(), out_dtype=torch.float32)
        dtype = torch.promote_types(x.dtype, torch.float32)
        return torch.mm(g.flatten(1).to(dtype), x.flatten(1).to(dtype).t())
