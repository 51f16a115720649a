"""The convolution module of a Conformer layer, and its batch norm over speech frames."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.parallel.batch_norm.synchronized import JoinedBatchNorm
from paceline.recipes.speech.network.conformer.settings import ConformerSettings
from paceline.recipes.speech.network.frames import Frames


class ConvolutionModule(nn.Module):
    """A gated product over channels, a convolution over time in each of them, norm, Swish, a product over channels."""

    def __init__(self, settings: ConformerSettings) -> None:
        super().__init__()
        width = settings.d_model
        self.context = settings.conv_context
        self.is_layer_norm = settings.conv_norm_type == "layer_norm"
        self.pointwise_conv1 = nn.Conv1d(width, 2 * width, 1, bias=settings.use_bias)
        self.depthwise_conv = nn.Conv1d(width, width, settings.conv_kernel_size, groups=width, bias=settings.use_bias)
        # NeMo's name, whatever the norm.
        self.batch_norm = nn.LayerNorm(width) if self.is_layer_norm else SpeechBatchNorm(width)
        self.pointwise_conv2 = nn.Conv1d(width, width, 1, bias=settings.use_bias)

    def forward(self, x: Tensor, frames: Frames) -> Tensor:
        """(batch, time, width) -> the same."""
        y = F.glu(self.pointwise_conv1(x.transpose(1, 2)), dim=1)
        y = self.depthwise_conv(F.pad(frames.masked(y), self.context))
        y = self.batch_norm(y.transpose(1, 2)).transpose(1, 2) if self.is_layer_norm else self.batch_norm(y, frames)
        out: Tensor = self.pointwise_conv2(F.silu(y))
        return out.transpose(1, 2)


class SpeechBatchNorm(nn.BatchNorm1d):
    """Batch norm whose statistics in training are those of speech frames: padding does not change them.

    NeMo's counts the frames behind the ends of utterances, too; in evaluation there is no difference.
    """

    def forward(self, x: Tensor, frames: Frames) -> Tensor:  # type: ignore[override]
        """(batch, channels, time) -> the same."""
        if not self.training:
            return super().forward(x)
        if isinstance(self, JoinedBatchNorm):  # over several ranks, whose numbers of frames differ
            rows = x.transpose(1, 2)
            speech = ~frames.beyond.squeeze(1)
            y = torch.zeros_like(rows)
            y[speech] = super().forward(rows[speech])
            return y.transpose(1, 2)
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        count = frames.lengths.sum().clamp(min=1).to(wide.dtype)
        mean = frames.masked(wide).sum((0, 2)) / count
        centred = wide - mean[:, None]
        variance = frames.masked(centred).square().sum((0, 2)) / count
        self._follow(mean.detach(), variance.detach() * (count / (count - 1).clamp(min=1)))
        scale = self.weight * (variance + self.eps).rsqrt()
        return (centred * scale[:, None] + self.bias[:, None]).to(x.dtype)

    @torch.no_grad()
    def _follow(self, mean: Tensor, variance: Tensor) -> None:
        assert self.momentum is not None
        self.get_buffer("num_batches_tracked").add_(1)
        for name, value in (("running_mean", mean), ("running_var", variance)):
            running = self.get_buffer(name)
            running.mul_(1 - self.momentum).add_(value.to(running.dtype), alpha=self.momentum)
