"""A convolution over time of (batch, time, channels), the layout of the library's fast kernels, as one operator.

PyTorch's own wants a picture with its channels last, a view of these. Its compiler cannot keep a view for the backward
pass whose length is not known beforehand (pytorch/pytorch#172204), so what is a picture meanwhile stays in here.

The library has no fast kernel for a dilated one. But every `dilation`-th frame meets every `dilation`-th one only: the
same memory seen as a picture of `dilation` columns has a plain convolution along its rows, with the same products.

Weights are cast and brought into the library's order in one pass, which backward uses again.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.speed.operators import operator
from paceline.world.installed import has_triton


def time_conv(x: Tensor, weight: Tensor, stride: int, padding: int, dilation: int, groups: int) -> Tensor:
    """(batch, time, channels), (filters, channels of a group, kernel) -> (batch, time after the stride, filters).

    Computed and returned in the dtype of `x`; the gradient of the weight is in the weight's.
    """
    y: Tensor = time_conv_forward(x, weight, stride, padding, dilation, groups)[0]
    return y


@operator("time_conv")
def time_conv_forward(
    x: Tensor, weight: Tensor, stride: int, padding: int, dilation: int, groups: int
) -> tuple[Tensor, Tensor]:
    """As `time_conv`, and the weights as the library wants them: (filters, kernel, channels of a group)."""
    filters = _turned(weight, x.dtype)
    columns = _columns(stride, padding, dilation, groups)
    y = F.conv2d(
        _picture(x, columns), _weight(filters, columns), None, *_geometry(stride, padding, dilation, columns), groups
    )
    return _rows(y, _length(x.shape[1], filters.shape[1], stride, padding, dilation)), filters


@time_conv_forward.register_fake
def _(x: Tensor, weight: Tensor, stride: int, padding: int, dilation: int, groups: int) -> tuple[Tensor, Tensor]:
    batch, time, _ = x.shape
    filters, channels, kernel = weight.shape
    y = x.new_empty(batch, _length(time, kernel, stride, padding, dilation), filters)
    return y, x.new_empty(filters, kernel, channels)


@operator("time_conv_backward")
def time_conv_backward(
    g: Tensor,
    x: Tensor,
    filters: Tensor,
    stride: int,
    padding: int,
    dilation: int,
    groups: int,
    needs_data: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Gradients of the input, which is empty unless it is needed, and of the weight, in `dtype`."""
    columns = _columns(stride, padding, dilation, groups)
    strides, paddings, dilations = _geometry(stride, padding, dilation, columns)
    data, gradient, _ = torch.ops.aten.convolution_backward(
        _picture(g, columns),
        _picture(x, columns),
        _weight(filters, columns),
        None,
        strides,
        paddings,
        dilations,
        False,
        (0, 0),
        groups,
        (needs_data, True, False),
    )
    # (filters, channels of a group, kernel), which on a GPU lies as (filters, kernel, channels).
    of_weight = _turned(gradient.squeeze(2 if columns == 1 else 3).transpose(1, 2), dtype)
    return _rows(data, x.shape[1]) if needs_data else x.new_empty(0), of_weight


@time_conv_backward.register_fake
def _(
    g: Tensor,
    x: Tensor,
    filters: Tensor,
    stride: int,
    padding: int,
    dilation: int,
    groups: int,
    needs_data: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    of_weight = filters.new_empty(filters.shape[0], filters.shape[2], filters.shape[1], dtype=dtype)
    return x.new_empty(x.shape if needs_data else 0), of_weight


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weight, *ctx.figures = inputs
    ctx.dtype = weight.dtype
    ctx.save_for_backward(x, output[1])
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, g: Tensor, _: None) -> tuple[Tensor | None, ...]:
    needs_data = ctx.needs_input_grad[0]
    data, weight = time_conv_backward(g, *ctx.saved_tensors, *ctx.figures, needs_data, ctx.dtype)
    return data if needs_data else None, weight, None, None, None, None


time_conv_forward.register_autograd(_gradients, setup_context=_setup)


def _turned(matrices: Tensor, dtype: torch.dtype) -> Tensor:
    """(number, rows, columns) -> (number, columns, rows) in memory, in another dtype."""
    if matrices.is_cuda and has_triton():
        from paceline.recipes.speech.kernels import turn  # Triton may be missing where this is not reached

        if turn.can_turn(matrices):
            return turn.turn(matrices, dtype)
    number, rows, columns = matrices.shape
    return matrices.new_empty(number, columns, rows, dtype=dtype).copy_(matrices.transpose(1, 2))


def _columns(stride: int, padding: int, dilation: int, groups: int) -> int:
    """Return the number of columns of the picture in which nothing is dilated, or 1: a row of frames, as it is."""
    return dilation if stride == groups == 1 and padding % dilation == 0 else 1


def _geometry(
    stride: int, padding: int, dilation: int, columns: int
) -> tuple[tuple[int, int], tuple[int, int], tuple[int, int]]:
    """Return strides, paddings and dilations of the picture."""
    if columns == 1:
        return (1, stride), (0, padding), (1, dilation)
    return (1, 1), (padding // columns, 0), (1, 1)


def _length(time: int, kernel: int, stride: int, padding: int, dilation: int) -> int:
    return (time + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1


def _picture(x: Tensor, columns: int) -> Tensor:
    """(batch, time, channels) as a picture whose channels lie side by side: one row, or rows of so many frames."""
    x = x.contiguous()
    if columns == 1:
        return x.unsqueeze(1).permute(0, 3, 1, 2)
    missing = -x.shape[1] % columns
    if missing:
        x = F.pad(x, (0, 0, 0, missing))  # zeros, which a convolution finds behind the last frame anyway
    return x.view(x.shape[0], -1, columns, x.shape[2]).permute(0, 3, 1, 2)


def _weight(filters: Tensor, columns: int) -> Tensor:
    """(filters, kernel, channels) as a picture each, across or down."""
    return filters.unsqueeze(1 if columns == 1 else 2).permute(0, 3, 1, 2)


def _rows(y: Tensor, length: int) -> Tensor:
    """A picture as (batch, time, channels). On a GPU it lies so already, but for frames that filled up a row."""
    return y.permute(0, 2, 3, 1).flatten(1, 2)[:, :length].contiguous()
