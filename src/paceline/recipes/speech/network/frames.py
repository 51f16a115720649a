"""Mask of the frames of a padded batch that belong to an utterance: computed once per time resolution, used by every
layer."""

from __future__ import annotations

from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

Count = TypeVar("Count", int, Tensor)


class Frames(NamedTuple):
    """The lengths of a batch and the mask that follows from them."""

    lengths: Tensor
    """(batch,) int64, or int32 where kernels take it: valid frames of each utterance."""
    beyond: Tensor
    """(batch, 1, time) bool: true for frames behind the end of their utterance."""

    def masked(self, x: Tensor) -> Tensor:
        """(batch, channels, time) with zeros behind the end of each utterance, in memory as `x` lies.

        One pass; `masked_fill` would copy into the usual order first.
        """
        return torch.where(self.beyond, 0.0, x)

    def strided(self, stride: int) -> Frames:
        """The same utterances after a convolution with this stride and "same" padding."""
        if stride == 1:
            return self
        return frames_of(strided_length(self.lengths, stride), strided_length(self.beyond.shape[-1], stride))


def frames_of(lengths: Tensor, num_frames: int) -> Frames:
    """Lengths (batch,) in a batch padded to `num_frames`."""
    index = torch.arange(num_frames, device=lengths.device)
    return Frames(lengths, (index >= lengths.unsqueeze(1)).unsqueeze(1))


def strided_length(length: Count, stride: int) -> Count:
    """Return the length after a stride with "same" padding: ceil(length / stride), in whole numbers; 0 stays 0."""
    return (length + stride - 1) // stride
