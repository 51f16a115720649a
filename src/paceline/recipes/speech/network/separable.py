"""The sub-blocks of the encoder: convolution, batch norm, (excitation, residual,) activation, dropout, each one module.

`SeparableConv` is where nearly all time of a QuartzNet goes, so a faster kernel can stand in for it at run time: give
an instance another `forward` of the same signature. All that such a kernel needs comes in by arguments or lies in the
module: the input, the frames before and after its stride (lengths and masks), the residual to add, and the parameters
and buffers, which keep their names. In training it updates the batch norm's `running_mean`, `running_var` and
`num_batches_tracked` as the plain module does.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from paceline.recipes.speech.network.config import BlockSettings
from paceline.recipes.speech.network.frames import Frames

BATCH_NORM_EPS = 1e-3
BATCH_NORM_MOMENTUM = 0.1

Activation = Literal["relu", "hardtanh", "selu", "swish"]


class SubBlock(nn.Module):
    """Norm, activation and dropout after a convolution, which a subclass has in `convolve`."""

    def __init__(self, settings: BlockSettings, activation: Activation, *, is_masked: bool, is_last: bool) -> None:
        super().__init__()
        self.groups = settings.groups
        self.is_masked = is_masked
        self.norm = batch_norm(settings.filters)
        # Squeeze and excite stands once per block, as in later NeMo, before the residual is added.
        self.excite = (
            SqueezeExcite(settings.filters, settings.se_reduction_ratio, activation)
            if settings.se and is_last
            else None
        )
        self.activation = make_activation(activation)
        # Dropout of 0 would still draw a number for every activation.
        self.dropout = nn.Dropout(settings.dropout) if settings.dropout > 0 else nn.Identity()

    def convolve(self, x: Tensor, before: Frames, after: Frames) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor, before: Frames, after: Frames, residual: Tensor | None = None) -> Tensor:
        """(batch, channels in, time) -> (batch, filters, time after the stride).

        `before` and `after` are the frames of input and output; `residual` is added before the activation.
        """
        y: Tensor = self.norm(self.convolve(x, before, after))
        if self.groups > 1:
            y = shuffled(y, self.groups)
        if self.excite is not None:
            y = self.excite(y, after)
        if residual is not None:
            y = y + residual
        out: Tensor = self.dropout(self.activation(y))
        return out

    def masked(self, x: Tensor, frames: Frames) -> Tensor:
        """Zero the frames behind the end of each utterance, if the network's convolutions are masked."""
        return frames.masked(x) if self.is_masked else x


class SeparableConv(SubBlock):
    """A convolution over time in each channel, then one over channels at each frame."""

    def __init__(
        self, channels: int, settings: BlockSettings, activation: Activation, *, is_masked: bool, is_last: bool
    ) -> None:
        super().__init__(settings, activation, is_masked=is_masked, is_last=is_last)
        self.depthwise = time_conv(channels, channels, settings, groups=channels)
        self.pointwise = nn.Conv1d(channels, settings.filters, 1, groups=settings.groups, bias=False)

    def convolve(self, x: Tensor, before: Frames, after: Frames) -> Tensor:
        # The second mask keeps what the kernel smears over an utterance's end out of the batch statistics. Without a
        # bias it could as well come after the pointwise product.
        y = self.masked(self.depthwise(self.masked(x, before)), after)
        product: Tensor = self.pointwise(y)
        return product


class PlainConv(SubBlock):
    """A convolution over time and channels at once."""

    def __init__(
        self, channels: int, settings: BlockSettings, activation: Activation, *, is_masked: bool, is_last: bool
    ) -> None:
        super().__init__(settings, activation, is_masked=is_masked, is_last=is_last)
        self.conv = time_conv(channels, settings.filters, settings, groups=settings.groups)

    def convolve(self, x: Tensor, before: Frames, after: Frames) -> Tensor:
        y: Tensor = self.conv(self.masked(x, before))
        return y


class SqueezeExcite(nn.Module):
    """Weighs channels by what they are on average over the valid frames of the utterance (arXiv 1709.01507)."""

    def __init__(self, channels: int, reduction_ratio: int, activation: Activation) -> None:
        super().__init__()
        self.squeeze = nn.Linear(channels, channels // reduction_ratio, bias=False)
        self.activation = make_activation(activation)
        self.expand = nn.Linear(channels // reduction_ratio, channels, bias=False)

    def forward(self, x: Tensor, frames: Frames) -> Tensor:
        """(batch, channels, time) -> the same."""
        # Sums over a thousand frames need at least float32.
        dtype = torch.promote_types(x.dtype, torch.float32)
        total = frames.masked(x).sum(-1, dtype=dtype)
        mean = total / frames.lengths.clamp(min=1).unsqueeze(1)
        weights = torch.sigmoid(self.expand(self.activation(self.squeeze(mean.to(self.squeeze.weight.dtype)))))
        return x * weights.to(x.dtype).unsqueeze(-1)


def time_conv(channels: int, filters: int, settings: BlockSettings, groups: int) -> nn.Conv1d:
    """A convolution over time whose output is as long as its input, before the stride, also for any dilation."""
    return nn.Conv1d(
        channels,
        filters,
        settings.kernel,
        stride=settings.stride,
        dilation=settings.dilation,
        padding=settings.dilation * (settings.kernel - 1) // 2,
        groups=groups,
        bias=False,
    )


def batch_norm(channels: int) -> nn.BatchNorm1d:
    return nn.BatchNorm1d(channels, eps=BATCH_NORM_EPS, momentum=BATCH_NORM_MOMENTUM)


def shuffled(x: Tensor, groups: int) -> Tensor:
    """Channels dealt out anew, so that the next grouped convolution sees all groups of this one."""
    batch, channels, time = x.shape
    return x.view(batch, groups, channels // groups, time).transpose(1, 2).reshape(batch, channels, time)


def make_activation(name: Activation) -> nn.Module:
    made: dict[str, nn.Module] = {
        "relu": nn.ReLU(inplace=True),
        "hardtanh": nn.Hardtanh(),
        "selu": nn.SELU(),
        "swish": nn.SiLU(),
    }
    return made[name]
