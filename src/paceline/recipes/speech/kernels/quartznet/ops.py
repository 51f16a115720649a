"""The separable sub-block as operators that PyTorch knows: autograd, autocast, torch.compile, DDP and CUDA graphs.

A sub-block hands on the raw outputs `y` of its product over channels, and beside them `affine`, the scale and shift of
its batch norm, for the next one to apply when it reads `y`. Backward, the pair stands for what they mean together: the
"gradient" of `y` is that of the batch-normed values, that of `affine` are the two sums per channel that the batch
norm's own gradient is made of (`depthwise.backward`). So a `y` may only be used together with its `affine`, once, by an
operator of this file or of `joining`. On a CPU the reference computes the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Optional

import torch
from torch import Tensor

from paceline.recipes.speech.kernels.quartznet import reference
from paceline.recipes.speech.kernels.tiles import num_listed, padded_frames
from paceline.speed.layers.kernels import ways
from paceline.speed.operators import operator

# ruff: noqa: UP045 (the schema of an operator is read off these signatures, in which torch wants Optional)


@operator("listed_tiles")
def listed_tiles(lengths: Tensor, row: int) -> Tensor:
    """As `product.list_tiles`."""
    from paceline.recipes.speech.kernels.quartznet import product

    return product.list_tiles(lengths, row)


@listed_tiles.register_fake
def _(lengths: Tensor, row: int) -> Tensor:
    return lengths.new_empty(num_listed(len(lengths), row))


def listed(x: Tensor, lengths: Tensor, frames: int) -> Tensor | None:
    """Return the tiles of products over channels, for activations like `x`; None where these go another way."""
    if not (ways.in_use().listed and x.is_cuda and x.dtype is torch.bfloat16):
        return None
    properties = torch.cuda.get_device_properties(x.device)  # which the compiler takes for a constant
    if (properties.major, properties.minor) != (9, 0):
        return None
    tiles: Tensor = listed_tiles(lengths, padded_frames(frames))
    return tiles


@operator("separable")
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
    shortcut: Optional[Tensor],
    shortcut_weight: Optional[Tensor],
    shortcut_bias: Optional[Tensor],
    matrix: Tensor,
    shortcut_matrix: Optional[Tensor],
    tiles: Optional[Tensor],
    frames: int,
    stride: int,
    dilation: int,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(channel, batch, row) -> `y` (filter, batch, row after the stride), `affine`, `moments`, and what lies between.

    `frames` are those of the output; its row is padded. `lengths` of inputs and outputs are int32. `matrix` is what
    `pointwise` is in a product: (filter, channel), in the dtype of `x`; its gradient is that of `pointwise`. With a
    `shortcut`, the residual that starts at `x` (then without `affine`): its `y`, `affine` and `moments` as well, else
    three empty tensors. `tiles`, if given, are those of `product.list_tiles` for the outputs' lengths.
    """
    row = padded_frames(frames)
    if x.is_cuda:
        from paceline.recipes.speech.kernels.quartznet import depthwise as kernels

        between = kernels.forward(x, affine, lengths, lengths_out, depthwise, row, stride, dilation)
    else:
        between = reference.depthwise_forward(x, affine, lengths, lengths_out, depthwise, row, stride, dilation)
    y, affine_out, moments_out = _normed(matrix, between, tiles, lengths_out, frames, weight, bias, eps)
    if shortcut_matrix is None:
        return y, affine_out, moments_out, between, x.new_empty(0), weight.new_empty(0), weight.new_empty(0)
    assert shortcut_weight is not None
    assert shortcut_bias is not None
    other, other_affine, other_moments = _normed(
        shortcut_matrix, x, tiles, lengths_out, frames, shortcut_weight, shortcut_bias, eps
    )
    return y, affine_out, moments_out, between, other, other_affine, other_moments


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
    shortcut: Optional[Tensor],
    shortcut_weight: Optional[Tensor],
    shortcut_bias: Optional[Tensor],
    matrix: Tensor,
    shortcut_matrix: Optional[Tensor],
    tiles: Optional[Tensor],
    frames: int,
    stride: int,
    dilation: int,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    channels, batch, _ = x.shape
    filters, row = pointwise.shape[0], padded_frames(frames)
    y, between = x.new_empty(filters, batch, row), x.new_empty(channels, batch, row)
    affine_out, moments_out = weight.new_empty(2, filters), weight.new_empty(3, filters)
    if shortcut is None:
        return y, affine_out, moments_out, between, x.new_empty(0), weight.new_empty(0), weight.new_empty(0)
    other_affine, other_moments = weight.new_empty(2, filters), weight.new_empty(3, filters)
    return y, affine_out, moments_out, between, torch.empty_like(y), other_affine, other_moments


@operator("separable_backward")
def separable_backward(
    h: Tensor,
    sums: Tensor,
    other_h: Optional[Tensor],
    other_sums: Optional[Tensor],
    y: Tensor,
    affine_out: Tensor,
    moments_out: Tensor,
    between: Tensor,
    other: Tensor,
    other_affine: Tensor,
    other_moments: Tensor,
    x: Tensor,
    affine: Optional[Tensor],
    moments: Optional[Tensor],
    lengths: Tensor,
    lengths_out: Tensor,
    depthwise: Tensor,
    matrix: Tensor,
    shortcut_matrix: Optional[Tensor],
    tiles: Optional[Tensor],
    frames: int,
    stride: int,
    dilation: int,
    needs_data: bool,
) -> list[Tensor]:
    """Gradients of x, affine, depthwise, pointwise, weight, bias, and of the shortcut's three if there is one.

    Those of x and affine are empty if not `needs_data`.
    """
    of_shortcut: list[Tensor] = []
    added = None
    if shortcut_matrix is not None:
        assert other_h is not None
        g, *of_norm = _norm_backward(other_h, other_sums, other, other_affine, other_moments, lengths_out, frames)
        of_shortcut = [_weight_gradient(g, x, tiles).unsqueeze(2), *of_norm]
        added = _data_gradient(shortcut_matrix, g, tiles)
    g, weight_gradient, bias_gradient = _norm_backward(h, sums, y, affine_out, moments_out, lengths_out, frames)
    pointwise_gradient = _weight_gradient(g, between, tiles).unsqueeze(2)
    g = _data_gradient(matrix, g, tiles)
    data, depthwise_parts, sum_parts = _depthwise_backward(x)(
        g, x, affine, moments, added, lengths, lengths_out, depthwise, stride, dilation, needs_data=needs_data
    )
    depthwise_gradient = _total(depthwise_parts).view_as(depthwise)
    sums_in = _total(sum_parts) if needs_data and affine is not None else sums.new_empty(0)
    return [data, sums_in, depthwise_gradient, pointwise_gradient, weight_gradient, bias_gradient, *of_shortcut]


@separable_backward.register_fake
def _(
    h: Tensor,
    sums: Tensor,
    other_h: Optional[Tensor],
    other_sums: Optional[Tensor],
    y: Tensor,
    affine_out: Tensor,
    moments_out: Tensor,
    between: Tensor,
    other: Tensor,
    other_affine: Tensor,
    other_moments: Tensor,
    x: Tensor,
    affine: Optional[Tensor],
    moments: Optional[Tensor],
    lengths: Tensor,
    lengths_out: Tensor,
    depthwise: Tensor,
    matrix: Tensor,
    shortcut_matrix: Optional[Tensor],
    tiles: Optional[Tensor],
    frames: int,
    stride: int,
    dilation: int,
    needs_data: bool,
) -> list[Tensor]:
    data = torch.empty_like(x) if needs_data else x.new_empty(0)
    sums_in = torch.empty_like(affine) if needs_data and affine is not None else sums.new_empty(0)
    of_norm = [sums.new_empty(matrix.shape[0]) for _ in range(4)]
    of_products = [sums.new_empty(*each.shape, 1) for each in (matrix, shortcut_matrix) if each is not None]
    gradients = [data, sums_in, torch.empty_like(depthwise), of_products[0], *of_norm[:2]]
    return gradients if shortcut_matrix is None else [*gradients, of_products[1], *of_norm[2:]]


def _save_separable(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*output, *inputs[:6], *inputs[12:15])
    ctx.frames, ctx.stride, ctx.dilation = inputs[15:18]
    ctx.set_materialize_grads(False)  # the gradients of what is only kept for backward would be filled with zeros


def _separable_gradients(
    ctx: Any, h: Tensor, sums: Tensor, _0: None, _1: None, other_h: Tensor | None, other_sums: Tensor | None, _2: None
) -> tuple[Tensor | None, ...]:
    needs_data = ctx.needs_input_grad[0]
    affine = ctx.saved_tensors[8]
    other_h = None if other_h is None else other_h.contiguous()
    data, sums_in, *weight_gradients = separable_backward(
        h.contiguous(), sums, other_h, other_sums, *ctx.saved_tensors, ctx.frames, ctx.stride, ctx.dilation, needs_data
    )
    return (
        data if needs_data else None,
        sums_in if needs_data and affine is not None else None,
        *(None, None, None),
        *weight_gradients,
        *(None for _ in range(14 - len(weight_gradients))),
    )


separable.register_autograd(_separable_gradients, setup_context=_save_separable)


@operator("pointwise")
def pointwise(
    x: Tensor,
    lengths: Tensor,
    filters: Tensor,
    weight: Tensor,
    bias: Tensor,
    matrix: Tensor,
    tiles: Optional[Tensor],
    frames: int,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """A sub-block without a convolution over time, and a residual: activations -> `y`, `affine`, `moments`."""
    return _normed(matrix, x, tiles, lengths, frames, weight, bias, eps)


@pointwise.register_fake
def _(
    x: Tensor,
    lengths: Tensor,
    filters: Tensor,
    weight: Tensor,
    bias: Tensor,
    matrix: Tensor,
    tiles: Optional[Tensor],
    frames: int,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    width = matrix.shape[0]
    return x.new_empty(width, *x.shape[1:]), weight.new_empty(2, width), weight.new_empty(3, width)


@operator("pointwise_backward")
def pointwise_backward(
    h: Tensor,
    sums: Tensor,
    y: Tensor,
    affine: Tensor,
    moments: Tensor,
    x: Tensor,
    lengths: Tensor,
    matrix: Tensor,
    tiles: Optional[Tensor],
    frames: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, filters, weight, bias."""
    g, weight_gradient, bias_gradient = _norm_backward(h, sums, y, affine, moments, lengths, frames)
    data = _data_gradient(matrix, g, tiles)
    return data, _weight_gradient(g, x, tiles).unsqueeze(2), weight_gradient, bias_gradient


@pointwise_backward.register_fake
def _(
    h: Tensor,
    sums: Tensor,
    y: Tensor,
    affine: Tensor,
    moments: Tensor,
    x: Tensor,
    lengths: Tensor,
    matrix: Tensor,
    tiles: Optional[Tensor],
    frames: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    width = matrix.shape[0]
    return torch.empty_like(x), sums.new_empty(*matrix.shape, 1), sums.new_empty(width), sums.new_empty(width)


def _save_pointwise(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*output, *inputs[:2], *inputs[5:7])
    ctx.frames = inputs[7]
    ctx.set_materialize_grads(False)


def _pointwise_gradients(ctx: Any, h: Tensor, sums: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    data, filters, weight, bias = pointwise_backward(h.contiguous(), sums, *ctx.saved_tensors, ctx.frames)
    return (data, None, filters, weight, bias, None, None, None, None)


pointwise.register_autograd(_pointwise_gradients, setup_context=_save_pointwise)


def _depthwise_backward(x: Tensor) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    if x.is_cuda:
        from paceline.recipes.speech.kernels.quartznet import depthwise

        return depthwise.backward
    return reference.depthwise_backward


def _statistics(y: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    if y.is_cuda:
        from paceline.recipes.speech.kernels.quartznet import norm

        return norm.statistics(y, *rest)
    return reference.statistics(y, *rest)


def _norm_backward(h: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    if h.is_cuda:
        from paceline.recipes.speech.kernels.quartznet import norm

        return norm.apply_backward(h, *rest)
    return reference.apply_backward(h, *rest)


def _normed(
    matrix: Tensor,
    x: Tensor,
    tiles: Tensor | None,
    lengths: Tensor,
    frames: int,
    weight: Tensor,
    bias: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """A product over channels and its statistics."""
    if tiles is not None:
        from paceline.recipes.speech.kernels.quartznet import product

        if product.fits(*matrix.shape):
            y, statistics = product.forward(matrix, x, tiles, frames, weight, bias, eps)
            return y, statistics.affine, statistics.moments
    y = _product(matrix, x)
    return (y, *_statistics(y, lengths, frames, weight, bias, eps))


def _data_gradient(matrix: Tensor, g: Tensor, tiles: Tensor | None) -> Tensor:
    if tiles is not None:
        from paceline.recipes.speech.kernels.quartznet import product

        if product.gains_backward(*matrix.shape, *g.shape[1:]):
            return product.data_gradient(matrix, g, tiles)
    return _product(matrix.t(), g)


def _total(parts: Tensor) -> Tensor:
    """The sum of all parts; of a single one, which most batches have, without a kernel that copies it."""
    return parts[0] if parts.shape[0] == 1 else parts.sum(0)


def _product(matrix: Tensor, x: Tensor) -> Tensor:
    """(out, in) times (in, batch, row): one product, since channels come first."""
    with torch.autocast(x.device.type, enabled=False):
        return torch.mm(matrix, x.flatten(1)).view(matrix.shape[0], *x.shape[1:])


def _weight_gradient(g: Tensor, x: Tensor, tiles: Tensor | None) -> Tensor:
    """(out, in), summed and kept in float32 or wider."""
    if tiles is not None and ways.in_use().listed_weights:
        from paceline.recipes.speech.kernels.quartznet import product

        if product.gains_weights(g.shape[0], *x.shape):
            return product.weight_gradient(g, x, tiles)
    with torch.autocast(x.device.type, enabled=False):
        if x.is_cuda:
            wide: Tensor = torch.mm(g.flatten(1), x.flatten(1).t(), out_dtype=torch.float32)
            return wide
        dtype = torch.promote_types(x.dtype, torch.float32)
        return torch.mm(g.flatten(1).to(dtype), x.flatten(1).to(dtype).t())
