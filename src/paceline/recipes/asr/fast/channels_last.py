"""Training an encoder that our kernels do not know (Jasper) in the layout that the library's convolutions want.

Activations travel as (batch, time, channels), so that the library multiplies them as they lie, where it would else copy
every input and output of a convolution into that order and back, and batch norm sums rows. Parameters and state dict
are the plain modules'; evaluation, and whatever is not training in bfloat16 autocast, goes the plain way.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import MethodType

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.recipes.asr.network.encoder import Block, Encoder, Residual
from paceline.recipes.asr.network.frames import Frames, frames_of
from paceline.recipes.asr.network.separable import PlainConv, SeparableConv, SubBlock
from paceline.speed.time_conv import time_conv


def accelerate(encoder: Encoder) -> None:
    """Train with channels last from now on."""
    encoder.forward = MethodType(_forward, encoder)  # type: ignore[method-assign]


def _forward(self: Encoder, features: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    if not self.trains_in_bfloat16(features.device):
        return Encoder.forward(self, features, lengths)
    return encode(self, features.to(torch.bfloat16), lengths)


def encode(encoder: Encoder, features: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """The encoder's training pass, in the dtype of its features."""
    frames = frames_of(lengths, features.shape[-1])
    x = features.transpose(1, 2).contiguous()
    chain: list[Tensor] = []
    for block, settings in zip(encoder.blocks, encoder.settings.blocks, strict=True):
        assert isinstance(block, Block)
        chain = [*chain, x] if settings.residual_dense else []
        x, frames = _through(block, chain or [x], frames)
    return x.transpose(1, 2).contiguous(), frames.lengths


def _through(block: Block, inputs: Sequence[Tensor], frames: Frames) -> tuple[Tensor, Frames]:
    x, after = inputs[-1], frames.strided(block.stride)
    total: Tensor | None = None
    for residual, each in zip(block.residuals, inputs, strict=False):
        assert isinstance(residual, Residual)
        y = _normalized(residual.norm, _convolved(residual.conv, _masked(each, frames, residual.is_masked)))
        total = y if total is None else total + y
    last = len(block.layers) - 1
    for number, layer in enumerate(block.layers):
        assert isinstance(layer, SubBlock)
        x = _layer(layer, x, frames, after, total if number == last else None)
    return x, after


def _layer(layer: SubBlock, x: Tensor, before: Frames, after: Frames, residual: Tensor | None) -> Tensor:
    """`SubBlock.forward` on rows."""
    x = _masked(x, before, layer.is_masked)
    if isinstance(layer, SeparableConv):
        y = _convolved(layer.pointwise, _masked(_convolved(layer.depthwise, x), after, layer.is_masked))
    else:
        assert isinstance(layer, PlainConv)
        y = _convolved(layer.conv, x)
    y = _normalized(layer.norm, y)
    if layer.groups > 1:
        y = y.unflatten(2, (layer.groups, -1)).transpose(2, 3).flatten(2)
    if layer.excite is not None:
        y = layer.excite(y.transpose(1, 2), after).transpose(1, 2)
    if residual is not None:
        y = y + residual
    # Not in place: the batch norm's output is seen through a view, whose gradient would be made by copies.
    out: Tensor = layer.dropout(F.relu(y) if isinstance(layer.activation, nn.ReLU) else layer.activation(y))
    return out


def _masked(x: Tensor, frames: Frames, is_masked: bool) -> Tensor:
    return torch.where(frames.beyond.transpose(1, 2), 0.0, x) if is_masked else x


def _convolved(conv: nn.Conv1d, x: Tensor) -> Tensor:
    assert conv.bias is None
    stride, padding, dilation = conv.stride[0], int(conv.padding[0]), conv.dilation[0]
    is_product = conv.kernel_size[0] == stride == conv.groups == 1
    if is_product:
        return F.linear(x, conv.weight.to(x.dtype).squeeze(2))
    return time_conv(x, conv.weight, stride, padding, dilation, conv.groups)


def _normalized(norm: nn.BatchNorm1d, x: Tensor) -> Tensor:
    assert norm.num_batches_tracked is not None
    assert norm.momentum is not None
    norm.num_batches_tracked.add_(1)
    statistics = norm.running_mean, norm.running_var
    y = F.batch_norm(x.flatten(0, 1), *statistics, norm.weight, norm.bias, True, norm.momentum, norm.eps)
    return y.view_as(x)
