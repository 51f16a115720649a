"""Batches of few shapes, for a GPU and `-O4`: audio padded to the next of at most 32 lengths, texts to one width.

A CUDA graph is for one shape, a kernel is tuned for one, and cuDNN plans for one, which takes seconds in fp16.
What padding means stays what it was: no output of an utterance depends on it, and batch statistics in training count
padded frames as zeros, as NeMo does; there are more of them, so that losses differ a little from those of batches that
are padded to their longest, as they do when a batch is cut otherwise.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.recipes.speech.data.padding import Collate
from paceline.recipes.speech.data.utterances import Utterances
from paceline.recipes.speech.network.config import NetworkSettings
from paceline.recipes.speech.sound.features import FrameRule, LogMel
from paceline.train.autotune.shapes import RUNGS

LABELS_MULTIPLE = 16


@dataclass(frozen=True, kw_only=True)
class Ladder(Collate):
    """Collates a grain to a shape of the ladder, with all lengths as tensors, too."""

    network: NetworkSettings
    frames: FrameRule
    """Frames of so many rows of the audio that is padded: samples, or frames that were packed."""
    row_samples: int = 1
    """Samples per row of the audio that is padded: a hop, where rows are frames that were packed."""

    stretch: float = 1.0
    """Factor by which audio may become longer on the device."""

    def room_for(self, lengths: NDArray[np.int64], played: NDArray[np.int64]) -> int:
        """Room for any speed that might have been drawn: the shape of a grain is then known from its samples alone, and
        each epoch has the same few, all recorded before the first step."""
        return self.width(np.maximum(played, np.rint(lengths * self.stretch).astype(np.int64)))

    def width(self, lengths: NDArray[np.int64]) -> int:
        """Where the number of frames is rounded up beyond that of whole hops, a sample less than these makes a whole
        number of padded frames."""
        if self.frames.front_end != "nemo-1.0":
            return super().width(lengths)
        return -(-(int(lengths.max()) + 1) // self.audio_multiple) * self.audio_multiple - 1

    def padded(self, seconds: float) -> int:
        """See `shapes.Padding`: of an utterance of this length, by the rule that grains are padded by."""
        return self.width(np.array([-(-round(seconds * self.network.sample_rate) // self.row_samples)]))

    def grain(self, *padded: Any) -> dict[str, Any]:
        data = super().grain(*padded)
        frames = [
            0 if bad is not None else self.network.output_length(self.frames(length))
            for length, bad in zip(data["num_samples"], data["bad"], strict=True)
        ]
        data["out_frames"], data["text_lengths"] = (
            torch.tensor(frames, device="cpu"),
            torch.tensor(data["num_labels"], device="cpu"),
        )
        return data


def ladder(data: Utterances, network: NetworkSettings) -> Ladder:
    """Rungs of equal distance up to the longest utterance, each a whole number of padded frames."""
    front = LogMel(network.features, network.sample_rate)
    longest = math.ceil(float(data.lengths.max()) * network.sample_rate / front.hop_samples)
    multiple = max(1, network.features.pad_to)
    rung_frames = math.ceil(longest / RUNGS / multiple) * multiple
    num_labels = math.ceil(max(1, data.most_labels) / LABELS_MULTIPLE) * LABELS_MULTIPLE
    # Where features were packed, their frames are counted, not samples.
    row = front.hop_samples if data.holds_features else 1
    frames = FrameRule(1) if data.holds_features else front.frame_rule
    return Ladder(
        audio_multiple=rung_frames * frames.hop_samples,
        text_width=num_labels,
        network=network,
        frames=frames,
        row_samples=row,
        stretch=data.stretch,
    )
