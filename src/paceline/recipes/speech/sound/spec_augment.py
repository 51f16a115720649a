"""Masks over the features in training: SpecAugment (Park et al., 2019) and cut-out (DeVries and Taylor, 2017).

A sample's masks are a function of its key alone, computed for the whole batch at once on the features' device.
"""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field, field_validator
from torch import Tensor, nn

from paceline.config.settings import Section
from paceline.core.keys_torch import below, keyed
from paceline.recipes.speech.sound.key_streams import KeyStream

Count = Annotated[int, Field(ge=0)]


class SpecAugmentSettings(Section):
    """How much of the features is hidden in training."""

    freq_masks: Count = 0
    """Bands of filters hidden in each utterance."""
    time_masks: Count = 0
    """Stretches of frames hidden in each utterance."""
    freq_width: Count = 10
    """Filters in a band, at most."""
    time_width: Annotated[float, Field(ge=0)] = 10.0
    """Frames in a stretch, at most; below 1 it is a share of the utterance."""
    rect_masks: Count = 0
    """Rectangles hidden in each utterance."""
    rect_time: Count = 5
    """Frames in a rectangle, at most."""
    rect_freq: Count = 20
    """Filters in a rectangle, at most."""

    @field_validator("time_width")
    @classmethod
    def _whole_frames(cls, value: float) -> float:
        if value >= 1 and value != int(value):
            raise ValueError("whole frames, or below 1 a share of the utterance")
        return value


class SpecAugment(nn.Module):
    """Hides parts of the features in training, behind the 0 that is their mean.

    A mask's width is uniform in 0, ..., the most allowed, then its start is uniform where it fits into the utterance.
    """

    def __init__(self, settings: SpecAugmentSettings) -> None:
        super().__init__()
        self.settings = settings

    def forward(self, features: Tensor, lengths: Tensor, keys: Tensor) -> Tensor:
        """(batch, mel, frame), int64 lengths in frames and int64 keys -> features with masks."""
        settings = self.settings
        if not self.training or not settings.freq_masks + settings.time_masks + settings.rect_masks:
            return features
        mels, frames = features.shape[1], features.shape[2]
        keys, lengths = keys[:, None], lengths[:, None]

        def bands(stream: KeyStream, number: int, width: int) -> Tensor:
            return _covered(*_spans(keys, stream, number, min(width, mels), mels), mels)

        def stretches(stream: KeyStream, number: int, width: float) -> Tensor:
            return _covered(*_spans(keys, stream, number, _widest(width, lengths), lengths), frames)

        in_bands = bands(KeyStream.FREQ_MASKS, settings.freq_masks, settings.freq_width).any(1)
        in_stretches = stretches(KeyStream.TIME_MASKS, settings.time_masks, settings.time_width).any(1)
        hidden = in_bands[:, :, None] | in_stretches[:, None, :]
        tall = bands(KeyStream.RECT_FREQ, settings.rect_masks, settings.rect_freq)
        long = stretches(KeyStream.RECT_TIME, settings.rect_masks, settings.rect_time)
        for mask in range(settings.rect_masks):
            hidden = hidden | (tall[:, mask, :, None] & long[:, mask, None, :])
        return features.masked_fill(hidden, 0.0)


def _widest(width: float, lengths: Tensor) -> Tensor:
    """Frames that a mask may take of each utterance; a share is rounded down, to one frame at least."""
    widest = (
        (lengths.double() * width).floor().long().clamp(min=1)
        if 0 < width < 1
        else torch.full_like(lengths, int(width))
    )
    return torch.minimum(widest, lengths)


def _spans(
    keys: Tensor, stream: KeyStream, num_masks: int, widest: int | Tensor, extent: int | Tensor
) -> tuple[Tensor, Tensor]:
    """Return start and width of masks along an axis: (batch, num_masks) each."""
    masks = torch.arange(num_masks, device=keys.device)
    width = below(keyed(keys, stream, masks, 0), widest + 1)
    start = below(keyed(keys, stream, masks, 1), extent - width + 1)
    return start, width


def _covered(start: Tensor, width: Tensor, size: int) -> Tensor:
    """Mark the places of an axis that each mask covers: (batch, num_masks, size)."""
    places = torch.arange(size, device=start.device) - start[:, :, None]
    return (places >= 0) & (places < width[:, :, None])
