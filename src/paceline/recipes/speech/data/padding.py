"""Utterances padded into a grain."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.recipes.speech.manifest.bad_line import BadLine


class Utterance(NamedTuple):
    """One sample, before it is padded."""

    audio: NDArray[Any]
    """(samples) int16, or (frames, features) float32 where features were packed."""
    text: NDArray[Any]
    key: int
    """Decides its masks, on any rank and in any batch."""
    bad: BadLine | None = None
    """Why its audio cannot be read: silence stands in its place, and it must not count as heard."""
    begin: float = 0.0
    """Seconds of silence that were cut off before it."""


@dataclass(frozen=True)
class Collate:
    """Pads audio and texts of a grain. Lengths are kept on the device and on the host, so that reading them needs no
    synchronisation."""

    audio_multiple: int = 1
    """Audio is padded to a multiple of this."""
    text_width: int = 1
    """Texts are padded to this, at least."""

    def __call__(self, samples: list[Utterance]) -> dict[str, Any]:
        lengths = np.array([len(sample.audio) for sample in samples])
        first = samples[0].audio
        audio = np.empty((len(samples), self.width(lengths), *first.shape[1:]), first.dtype)
        for row, sample in enumerate(samples):
            audio[row, : lengths[row]] = sample.audio
            audio[row, lengths[row] :] = 0
        keys = np.array([sample.key for sample in samples])
        texts, bad = [sample.text for sample in samples], [sample.bad for sample in samples]
        return {**self.grain(audio, lengths, texts, keys, bad), "begins": [sample.begin for sample in samples]}

    def width(self, lengths: NDArray[np.int64]) -> int:
        """Return the length to which audio of these lengths is padded."""
        return -(-int(lengths.max()) // self.audio_multiple) * self.audio_multiple

    def room_for(self, lengths: NDArray[np.int64], played: NDArray[np.int64]) -> int:
        """Return the length to which audio is padded that was of these lengths and is `played` at other speeds."""
        return self.width(played)

    def grain(
        self,
        audio: NDArray[Any],
        lengths: NDArray[np.int64],
        texts: Sequence[NDArray[Any]],
        keys: NDArray[np.int64],
        bad: list[BadLine | None],
    ) -> dict[str, Any]:
        """Return a grain of audio that is padded already."""
        num_labels = [len(text) for text in texts]
        text = np.zeros((len(texts), max(self.text_width, *num_labels)), np.int64)
        for row, labels in enumerate(texts):
            text[row, : num_labels[row]] = labels
        return {
            "audio": torch.from_numpy(audio),
            "lengths": torch.from_numpy(lengths),
            "text": torch.from_numpy(text),
            "keys": torch.from_numpy(keys),
            "num_samples": lengths.tolist(),
            "num_labels": num_labels,
            "bad": bad,
            "begins": [0.0] * len(texts),
        }


collate = Collate()
"""No wider than the longest."""
