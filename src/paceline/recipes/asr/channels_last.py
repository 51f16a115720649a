"""Training an encoder whose convolutions our kernels do not know (Jasper) in the layout that the library's want.

Tensors are (batch, channels, time) for everybody, but a frame's channels lie side by side in memory. So the library
multiplies them as they lie, where it would else copy every input and output of a convolution into that order and back,
and batch norm sums rows. Evaluation, and whatever is not bfloat16 autocast, goes the plain way.
"""

from __future__ import annotations

from types import MethodType

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.recipes.asr.encoder import Encoder

Layer = nn.Conv1d | nn.BatchNorm1d | nn.Dropout


def accelerate(encoder: Encoder) -> None:
    """From now on train with channels last."""
    encoder.forward = MethodType(_forward, encoder)  # type: ignore[method-assign]
    for module in encoder.modules():
        if isinstance(module, Layer):
            module.forward = MethodType(_layer, module)  # type: ignore[method-assign]


def encode(encoder: Encoder, features: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """The encoder's training pass, of an encoder that `accelerate` has seen."""
    return Encoder.forward(encoder, features.transpose(1, 2).contiguous().transpose(1, 2), lengths)


def _forward(self: Encoder, features: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    if not self.trains_in_bfloat16(features.device):
        return Encoder.forward(self, features, lengths)
    return encode(self, features.to(torch.bfloat16), lengths)


def _layer(self: Layer, x: Tensor) -> Tensor:
    if not self.training or x.stride(1) != 1 or x.shape[1] == 1:  # not a training pass, or frozen
        plain: Tensor = type(self).forward(self, x)  # type: ignore[arg-type]
        return plain
    rows = x.transpose(1, 2)  # (batch, time, channels), as it lies
    if isinstance(self, nn.Conv1d):
        return _convolved(self, x, rows)
    if isinstance(self, nn.BatchNorm1d):
        return _normalized(self, x)
    return F.dropout(rows, self.p).transpose(1, 2)


def _convolved(conv: nn.Conv1d, x: Tensor, rows: Tensor) -> Tensor:
    weight = conv.weight.to(x.dtype)
    if conv.kernel_size == conv.stride == conv.groups * (1,):
        return F.linear(rows, weight.squeeze(2), conv.bias).transpose(1, 2)
    y = F.conv2d(
        x.unsqueeze(2),
        weight.unsqueeze(2).contiguous(memory_format=torch.channels_last),
        conv.bias,
        (1, conv.stride[0]),
        (0, int(conv.padding[0])),
        (1, conv.dilation[0]),
        conv.groups,
    )
    return y.contiguous(memory_format=torch.channels_last).squeeze(2)  # on a GPU it lies so already


def _normalized(norm: nn.BatchNorm1d, x: Tensor) -> Tensor:
    assert norm.num_batches_tracked is not None
    assert norm.momentum is not None
    norm.num_batches_tracked.add_(1)
    four = x.unsqueeze(2)  # the library knows this layout of pictures only
    return F.batch_norm(
        four, norm.running_mean, norm.running_var, norm.weight, norm.bias, True, norm.momentum, norm.eps
    ).squeeze(2)
