"""Utterances of manifests, held in columns.

There is no Python object per line: a million of them are eight arrays, which pickle as fast as memory is copied and are
shared by forked workers as they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
from numpy.typing import ArrayLike, NDArray

from paceline.core.errors import PacelineError
from paceline.core.json_text import json_text
from paceline.core.paths import near
from paceline.data.manifest.line import resolve
from paceline.data.packed.errors import is_packed
from paceline.data.strings import Strings


class Segment(TypedDict):
    """Which part of an audio file an utterance is, in the words of `read_audio`."""

    offset_s: float
    duration_s: float


class ManifestChanged(PacelineError):
    """A manifest that no longer holds the lines that were read from it."""

    hint = "start again, and leave the file alone meanwhile"

    def __init__(self, path: Path, line: int) -> None:
        super().__init__(f"{near(path)} has been changed since it was read: line {line} is gone")
        self.path, self.line = path, line


class Manifest:
    """Utterances in the order of their lines."""

    def __init__(
        self,
        sources: Sequence[Path],
        *,
        audio: Strings,
        texts: Strings,
        durations: NDArray[np.float64],
        offsets: NDArray[np.float64],
        source_of: NDArray[np.int32],
        line_of: NDArray[np.int32],
    ) -> None:
        self.sources = tuple(sources)
        """The manifest files, as they were named."""
        self.durations = durations
        """Seconds."""
        self.texts = texts
        self._audio, self._offsets = audio, offsets
        self._source_of, self._line_of = source_of, line_of
        self._folders = [path.parent for path in self.sources]

    def __len__(self) -> int:
        return len(self.durations)

    def named(self, sources: Sequence[Path]) -> Manifest:
        """The same columns, with the files that their numbers mean."""
        return Manifest(
            sources,
            audio=self._audio,
            texts=self.texts,
            durations=self.durations,
            offsets=self._offsets,
            source_of=self._source_of,
            line_of=self._line_of,
        )

    def audio(self, row: int) -> Path:
        """The audio file; a path in a manifest is relative to the manifest's folder."""
        return resolve(self._folders[self._source_of[row]], self._audio[row])

    def written_audio(self, row: int) -> str:
        """The audio file as the line names it."""
        return self._audio[row]

    def text(self, row: int) -> str:
        return self.texts[row]

    def offset(self, row: int) -> float:
        """Seconds into the file at which the utterance begins."""
        return float(self._offsets[row]) if self.is_part(row) else 0.0

    def is_part(self, row: int) -> bool:
        """Whether the line is about a part of a file: it gives an offset, which may be 0."""
        return not np.isnan(self._offsets[row])

    def segment(self, row: int) -> Segment:
        return {"offset_s": self.offset(row), "duration_s": float(self.durations[row])}

    def source(self, row: int) -> Path:
        """The manifest file that the line stands in."""
        number: int = self._source_of[row]
        return self.sources[number]

    @property
    def source_numbers(self) -> NDArray[np.int32]:
        """Which of `sources` each row is from."""
        return self._source_of

    @property
    def lines(self) -> NDArray[np.int32]:
        """The number of each row's line, counted from 1."""
        return self._line_of

    def line(self, row: int) -> int:
        """The number of the line, counted from 1."""
        return int(self._line_of[row])

    def where(self, row: int) -> str:
        """`train.json:418`"""
        return f"{near(self.source(row))}:{self.line(row)}"

    def take(self, rows: ArrayLike) -> Manifest:
        """The utterances of these rows, in their order; rows may be numbers or a mask."""
        chosen = row_numbers(rows)
        return Manifest(
            self.sources,
            audio=self._audio.take(chosen),
            texts=self.texts.take(chosen),
            durations=self.durations[chosen],
            offsets=self._offsets[chosen],
            source_of=self._source_of[chosen],
            line_of=self._line_of[chosen],
        )

    @classmethod
    def concat(cls, manifests: Sequence[Manifest]) -> Manifest:
        """One after the other."""
        if len(manifests) == 1:
            return manifests[0]
        shifts = accumulate((len(manifest.sources) for manifest in manifests), initial=0)
        sources = [manifest._source_of + np.int32(shift) for manifest, shift in zip(manifests, shifts, strict=False)]
        return cls(
            [path for manifest in manifests for path in manifest.sources],
            audio=Strings.concat([manifest._audio for manifest in manifests]),
            texts=Strings.concat([manifest.texts for manifest in manifests]),
            durations=np.concatenate([manifest.durations for manifest in manifests]),
            offsets=np.concatenate([manifest._offsets for manifest in manifests]),
            source_of=np.concatenate(sources),
            line_of=np.concatenate([manifest._line_of for manifest in manifests]),
        )

    def content(self) -> list[NDArray[Any]]:
        """What the lines say, whatever files they stand in: names as written, offsets, durations, texts."""
        return [self._audio.packed, self._audio.lengths, self._offsets, self.durations, self.texts.packed]

    @property
    def nbytes(self) -> int:
        """Memory of all columns."""
        columns = (self._audio, self.texts, self.durations, self._offsets, self._source_of, self._line_of)
        return sum(column.nbytes for column in columns)

    def raw_lines(self) -> Iterator[tuple[int, bytes]]:
        """(row, its line read again), file by file in the order of lines: for what is not held in columns."""
        for number, path in enumerate(self.sources):
            rows = np.flatnonzero(self._source_of == number)
            rows = rows[np.argsort(self._line_of[rows], kind="stable")]
            if is_packed(path):
                from paceline.data.packed.reader import open_packed

                packed = open_packed(path)
                yield from ((row, self._as_line(row, packed.extra(self.line(row) - 1))) for row in rows.tolist())
                continue
            with path.open("rb") as file:
                at, raw = 0, b""
                for row in rows.tolist():
                    while at < self._line_of[row]:
                        raw = file.readline()
                        at += 1
                        if not raw:
                            raise ManifestChanged(path, self.line(row))
                    yield row, raw.removeprefix(b"\xef\xbb\xbf") if at == 1 else raw

    def _as_line(self, row: int, extra: dict[str, Any]) -> bytes:
        """Of packed data, which has no lines: what one would say of it."""
        line = {"audio_filepath": self.written_audio(row), "duration": float(self.durations[row])}
        return json_text({**line, "text": self.text(row), **extra}).encode()


def row_numbers(rows: ArrayLike) -> NDArray[np.int64]:
    """From numbers, or from a mask over all rows."""
    chosen = np.asarray(rows)
    return np.flatnonzero(chosen) if chosen.dtype == bool else chosen.astype(np.int64)
