"""A convolution over time of (batch, time, channels), the layout of the library's fast kernels, as one operator.

PyTorch's own wants a picture with its channels last, a view of these. Its compiler cannot keep a view for the backward
pass whose length is not known beforehand (pytorch/pytorch#172204), so what is a picture meanwhile stays in here.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


@torch.library.custom_op("paceline::time_conv", mutates_args=())
def time_conv(x: Tensor, weight: Tensor, stride: int, padding: int, dilation: int, groups: int) -> Tensor:
    """(batch, time, channels), (filters, channels of a group, kernel) -> (batch, time after the stride, filters)."""
    y = F.conv2d(_picture(x), _weight(weight), None, (1, stride), (0, padding), (1, dilation), groups)
    return _rows(y)


@time_conv.register_fake
def _(x: Tensor, weight: Tensor, stride: int, padding: int, dilation: int, groups: int) -> Tensor:
    batch, time, _ = x.shape
    filters, _, kernel = weight.shape
    return x.new_empty(batch, (time + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1, filters)


@torch.library.custom_op("paceline::time_conv_backward", mutates_args=())
def time_conv_backward(
    g: Tensor, x: Tensor, weight: Tensor, stride: int, padding: int, dilation: int, groups: int, needs_data: bool
) -> tuple[Tensor, Tensor]:
    """Gradients of the input, which is empty unless it is needed, and of the weight."""
    data, filters, _ = torch.ops.aten.convolution_backward(
        _picture(g.contiguous()),
        _picture(x),
        _weight(weight),
        None,
        (1, stride),
        (0, padding),
        (1, dilation),
        False,
        (0, 0),
        groups,
        (needs_data, True, False),
    )
    return _rows(data) if needs_data else x.new_empty(0), filters.squeeze(2).contiguous()


@time_conv_backward.register_fake
def _(
    g: Tensor, x: Tensor, weight: Tensor, stride: int, padding: int, dilation: int, groups: int, needs_data: bool
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape if needs_data else 0), weight.new_empty(weight.shape)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, *ctx.figures = inputs
    ctx.save_for_backward(x, weight)


def _gradients(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
    needs_data = ctx.needs_input_grad[0]
    data, weight = time_conv_backward(g, *ctx.saved_tensors, *ctx.figures, needs_data)
    return data if needs_data else None, weight, None, None, None, None


time_conv.register_autograd(_gradients, setup_context=_setup)


def _picture(x: Tensor) -> Tensor:
    """(batch, time, channels) as a picture of one row whose channels lie side by side."""
    return x.contiguous().transpose(1, 2).unsqueeze(2)


def _weight(weight: Tensor) -> Tensor:
    return weight.unsqueeze(2).contiguous(memory_format=torch.channels_last)


def _rows(y: Tensor) -> Tensor:
    """On a GPU it lies so already."""
    return y.squeeze(2).transpose(1, 2).contiguous()
