"""Audio of a manifest's rows, from audio files or from packed files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.data.packed.errors import is_packed
from paceline.data.packed.reader import Packed, Stream, open_packed
from paceline.recipes.speech.audio.read import converted, read_audio
from paceline.recipes.speech.audio.trim import bounds
from paceline.recipes.speech.manifest.columns import Manifest
from paceline.recipes.speech.manifest.packed import no_audio


class PackedRows(NamedTuple):
    """Rows that lie in one packed file."""

    stream: Stream
    rows: NDArray[np.int64]
    """In the stream."""
    places: NDArray[np.int64]
    """Of each, among the rows that were asked for."""


class Recordings:
    """Random access by row; no file stays open, and packed audio is mapped by each process for itself.

    A packed file may hold features instead of audio: then a row is (frames, features), as it was packed.
    """

    def __init__(self, manifest: Manifest, sample_rate: int, *, trim: bool = False) -> None:
        """`trim`: without the silence at both ends; packed files that were trimmed when they were made stay as they
        are."""
        self._manifest, self._sample_rate, self._trim = manifest, sample_rate, trim
        self._packed = {
            number: _sound_of(open_packed(path)) for number, path in enumerate(manifest.sources) if is_packed(path)
        }

    @property
    def holds_features(self) -> bool:
        """True if features were packed, so that lengths are frames."""
        return any(stream.kind == "features" for stream, _, _ in self._packed.values())

    @property
    def are_packed(self) -> bool:
        """True if no row is read from an audio file."""
        return len(self._packed) == len(self._manifest.sources)

    @property
    def are_mapped(self) -> bool:
        """True if all rows lie in packed files, in the wanted form and as plain memory."""
        is_plain = all(stream.is_mapped for stream, _, _ in self._packed.values())
        return self.are_packed and is_plain and self._are_alike(list(self._packed))

    def _is_ready(self, stream: Stream, rate: int) -> bool:
        return stream.kind == "features" or (rate == self._sample_rate and stream.dtype == np.int16)

    def read(self, row: int) -> NDArray[Any]:
        """Return 16-bit mono at the wanted rate. Packed audio of that rate is not copied: it is read-only."""
        return self.read_cut(row)[0]

    def read_cut(self, row: int) -> tuple[NDArray[Any], int]:
        """Return what `read` does, and how many samples of silence were cut off before it."""
        samples = self._read(row)
        if not self._trim or self._is_trimmed(row):
            return samples, 0
        first, end = bounds(samples)
        return samples[first:end], first

    def _is_trimmed(self, row: int) -> bool:
        packed = self._packed.get(int(self._manifest.source_numbers[row]))
        return packed is not None and (packed[0].kind == "features" or packed[2])

    def _read(self, row: int) -> NDArray[Any]:
        manifest = self._manifest
        packed = self._packed.get(int(manifest.source_numbers[row])) if self._packed else None
        if packed is None:
            return read_audio(manifest.audio(row), sample_rate=self._sample_rate, **manifest.segment(row))
        stream, rate, _ = packed
        samples = stream.view(manifest.line(row) - 1)
        if self._is_ready(stream, rate):
            return samples
        return converted(manifest.audio(row), samples, rate, self._sample_rate)

    def packed(self, rows: NDArray[np.int64]) -> list[PackedRows] | None:
        """Return where in packed files all of these rows lie in the wanted form, file by file; None if they do not."""
        if not self._packed:
            return None
        numbers = self._manifest.source_numbers[rows]
        lines = self._manifest.lines[rows].astype(np.int64) - 1
        first = int(numbers[0])
        if np.all(numbers == first):
            places = {first: np.arange(len(rows))}
        else:
            places = {int(number): np.flatnonzero(numbers == number) for number in np.unique(numbers)}
        if not self._are_alike(list(places)):
            return None
        return [PackedRows(self._packed[number][0], lines[each], each) for number, each in places.items()]

    def _are_alike(self, numbers: Sequence[int]) -> bool:
        """True if these sources are packed, in the wanted form, and can be padded together."""
        packed = [self._packed.get(number) for number in numbers]
        kinds = {None if each is None else (each[0].dtype, each[0].shape) for each in packed}
        return len(kinds) == 1 and all(each is not None and self._is_final(*each) for each in packed)

    def _is_final(self, stream: Stream, rate: int, is_trimmed: bool) -> bool:
        """True if audio of this stream is used as it lies there."""
        is_cut = stream.kind == "features" or not self._trim or is_trimmed
        return is_cut and self._is_ready(stream, rate)


def read_packed_audio(
    path: Path, row: int, sample_rate: int, *, offset_s: float, duration_s: float
) -> NDArray[np.int16]:
    """Return a part of a packed recording, as `read_audio` returns a part of a file."""
    packed = open_packed(path)
    audio, rate = packed.of_kind("audio"), packed.sample_rate
    if audio is None or rate is None:
        raise no_audio(path, packed)
    begin = round(offset_s * rate)
    samples = audio.view(row)[begin : begin + round(duration_s * rate)]
    return samples if rate == sample_rate else converted(path, samples, rate, sample_rate)


def _sound_of(packed: Packed) -> tuple[Stream, int, bool]:
    """Return the stream that is heard, its sample rate, and True if it was trimmed when it was packed."""
    stream, rate = packed.of_kind("features") or packed.of_kind("audio"), packed.sample_rate
    if stream is None or rate is None:
        raise no_audio(packed.path, packed)
    return stream, rate, packed.about.is_trimmed
