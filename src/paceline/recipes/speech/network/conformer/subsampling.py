"""Fewer frames for the layers of a Conformer: convolutions of stride 2 over time and mels, then one product."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.recipes.speech.network.conformer.settings import KERNEL, ConformerSettings
from paceline.recipes.speech.network.frames import Frames, frames_of

STRIDE = 2


class Subsampling(nn.Module):
    """(batch, mel, time) -> (batch, time / factor, width), as NeMo's `striding` and `dw_striding`.

    Frames behind an utterance's end are 0 before each convolution, as in NeMo since 2.0; earlier ones are zeros in the
    features alone, so that the last frames of an utterance in a padded batch differ there from those of it alone.
    """

    def __init__(self, settings: ConformerSettings, num_mels: int) -> None:
        super().__init__()
        self.is_causal = settings.causal_downsampling
        channels = settings.conv_channels
        padding = 0 if self.is_causal else (KERNEL - 1) // 2
        layers: list[nn.Module] = [nn.Conv2d(1, channels, KERNEL, STRIDE, padding), nn.ReLU(inplace=True)]
        for _ in range(settings.num_strides - 1):
            if settings.subsampling == "dw_striding":
                layers.append(nn.Conv2d(channels, channels, KERNEL, STRIDE, padding, groups=channels))
                layers.append(nn.Conv2d(channels, channels, 1))
            else:
                layers.append(nn.Conv2d(channels, channels, KERNEL, STRIDE, padding))
            layers.append(nn.ReLU(inplace=True))
        self.conv = nn.Sequential(*layers)
        self.out = nn.Linear(channels * settings.output_length(num_mels), settings.d_model)

    def forward(self, features: Tensor, frames: Frames) -> tuple[Tensor, Frames]:
        x = features.transpose(1, 2).unsqueeze(1)  # (batch, channel, time, mel)
        for layer in self.conv:
            if isinstance(layer, nn.Conv2d) and layer.stride[0] > 1:
                x = torch.where(frames.beyond.unsqueeze(-1), 0.0, x)
                if self.is_causal:
                    x = F.pad(x, (KERNEL - 1, STRIDE - 1) * 2)
                frames = self._strided(frames)
            x = layer(x)
        y: Tensor = self.out(x.transpose(1, 2).flatten(2))
        return y, frames

    def _strided(self, frames: Frames) -> Frames:
        if not self.is_causal:
            return frames.strided(STRIDE)
        return frames_of(frames.lengths // STRIDE + 1, frames.beyond.shape[-1] // STRIDE + 1)
