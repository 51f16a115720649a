"""Utterances of manifests, held in columns.

There is no Python object per line: a million of them are eight arrays, which pickle as fast as memory is copied and are
shared by forked workers as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
from numpy.typing import ArrayLike, NDArray

from paceline.core.paths import near
from paceline.data.strings import Strings
from paceline.recipes.speech.manifest.line import resolve


class Segment(TypedDict):
    """Part of an audio file that an utterance is, as arguments of `read_audio`."""

    offset_s: float
    duration_s: float


@dataclass(frozen=True, eq=False)
class Manifest:
    """Utterances in the order of their lines."""

    sources: Sequence[Path]
    """The manifest files, as they were named."""
    audio_names: Strings
    """Audio files as the lines name them."""
    texts: Strings
    durations: NDArray[np.float64]
    """Seconds."""
    offsets: NDArray[np.float64]
    """Seconds into the audio file; NaN where the line gives none, and is about the whole file."""
    source_numbers: NDArray[np.int32]
    """Which of `sources` each row is from."""
    lines: NDArray[np.int32]
    """Number of each row's line, counted from 1."""
    _folders: list[Path] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "sources", tuple(self.sources))
        object.__setattr__(self, "_folders", [path.parent for path in self.sources])

    def __len__(self) -> int:
        return len(self.durations)

    def audio(self, row: int) -> Path:
        """Return the audio file; a path in a manifest is relative to the manifest's folder."""
        return resolve(self._folders[self.source_numbers[row]], self.audio_names[row])

    def text(self, row: int) -> str:
        return self.texts[row]

    def offset(self, row: int) -> float:
        """Return the seconds into the file at which the utterance begins."""
        return float(self.offsets[row]) if self.is_part(row) else 0.0

    def is_part(self, row: int) -> bool:
        """Return True if the line gives an offset, which may be 0: it is about a part of a file."""
        return not np.isnan(self.offsets[row])

    def segment(self, row: int) -> Segment:
        return {"offset_s": self.offset(row), "duration_s": float(self.durations[row])}

    def source(self, row: int) -> Path:
        """Return the manifest file of a row."""
        number: int = self.source_numbers[row]
        return self.sources[number]

    def line(self, row: int) -> int:
        """Return the number of a row's line, counted from 1."""
        return int(self.lines[row])

    def where(self, row: int) -> str:
        """Return the place of a row's line: `train.json:418`."""
        return f"{near(self.source(row))}:{self.line(row)}"

    def take(self, rows: ArrayLike) -> Manifest:
        """Return the utterances of these rows, in their order; rows may be numbers or a mask."""
        chosen = row_numbers(rows)
        return Manifest(
            self.sources,
            audio_names=self.audio_names.take(chosen),
            texts=self.texts.take(chosen),
            durations=self.durations[chosen],
            offsets=self.offsets[chosen],
            source_numbers=self.source_numbers[chosen],
            lines=self.lines[chosen],
        )

    @classmethod
    def concat(cls, manifests: Sequence[Manifest]) -> Manifest:
        """Join manifests, one after the other."""
        if len(manifests) == 1:
            return manifests[0]
        shifts = accumulate((len(manifest.sources) for manifest in manifests), initial=0)
        numbers = [
            manifest.source_numbers + np.int32(shift) for manifest, shift in zip(manifests, shifts, strict=False)
        ]
        return cls(
            [path for manifest in manifests for path in manifest.sources],
            audio_names=Strings.concat([manifest.audio_names for manifest in manifests]),
            texts=Strings.concat([manifest.texts for manifest in manifests]),
            durations=np.concatenate([manifest.durations for manifest in manifests]),
            offsets=np.concatenate([manifest.offsets for manifest in manifests]),
            source_numbers=np.concatenate(numbers),
            lines=np.concatenate([manifest.lines for manifest in manifests]),
        )

    def content(self) -> list[NDArray[Any]]:
        """Return the content of the lines, whatever files they are in: names as written, offsets, durations, texts."""
        return [self.audio_names.packed, self.audio_names.lengths, self.offsets, self.durations, self.texts.packed]

    @property
    def nbytes(self) -> int:
        """Memory of all columns."""
        columns = (self.audio_names, self.texts, self.durations, self.offsets, self.source_numbers, self.lines)
        return sum(column.nbytes for column in columns)


def row_numbers(rows: ArrayLike) -> NDArray[np.int64]:
    """Return row numbers, given numbers or a mask over all rows."""
    chosen = np.asarray(rows)
    return np.flatnonzero(chosen) if chosen.dtype == bool else chosen.astype(np.int64)
