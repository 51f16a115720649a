"""Packed data compared with its digests: a whole file, a sample of its blocks, or a row before it is copied."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from paceline.core.errors import PacelineError
from paceline.core.paths import near
from paceline.data.packed.layout import StreamPlace, block_digests
from paceline.data.packed.reader import Packed, Stream


@dataclass(frozen=True)
class Damage:
    """A block that has changed since it was written."""

    path: Path
    stream: str
    rows: range
    """In the whole data set, counted from 0."""

    def __str__(self) -> str:
        return f"{near(self.path)}: {self.what}"

    @property
    def what(self) -> str:
        """The message without the name of the file."""
        rows = f"row {self.rows[0] + 1}" if len(self.rows) == 1 else f"rows {self.rows[0] + 1} to {self.rows[-1] + 1}"
        return f"{rows} of stream {self.stream!r}: the bytes are not those that were written"


class RowDamaged(PacelineError):
    """A row whose bytes are not those that were packed; digests are of blocks, so any row of its block may be it."""

    damage: Damage
    sentence = "{damage}"
    hint = "pack it again from what it was made of; `--bad-data skip` leaves out all rows of damaged blocks"


def verify(
    packed: Packed, *, most_bytes: int | None = None, progress: Callable[[int], None] | None = None
) -> tuple[list[Damage], int]:
    """Return (damaged blocks, bytes read); reads all blocks, or of each stream up to `most_bytes`."""
    damages, num_read = [], 0
    for name in packed.names:
        for damage, size in _blocks(packed.stream(name), most_bytes):
            num_read += size
            damages += [] if damage is None else [damage]
            if progress is not None:
                progress(num_read)
    return damages, num_read


def is_verifiable(packed: Packed) -> bool:
    """Return False for files of other programs, which have no digests."""
    return all(place.digests is not None for name in packed.names for _, place, _ in packed.stream(name).parts())


def num_bytes(packed: Packed) -> int:
    """Return the bytes of all streams."""
    return sum(place.nbytes for name in packed.names for _, place, _ in packed.stream(name).parts())


class CheckedRows:
    """Checks rows of some streams before they are copied; each block is read once, when a row of it is first asked for.

    A copy gets new digests, which would declare any damage intact.
    """

    def __init__(self, packed: Packed, names: Iterable[str] | None = None) -> None:
        self._streams = [_CheckedStream(packed.stream(name)) for name in (packed.names if names is None else names)]

    def damage(self, row: int) -> Damage | None:
        """Return the damage to a row; None also where another program wrote the file, without digests."""
        return next((damage for stream in self._streams if (damage := stream.damage(row)) is not None), None)

    def require(self, row: int) -> None:
        """Raise `RowDamaged` if the row is damaged."""
        if (damage := self.damage(row)) is not None:
            raise RowDamaged(damage)


class _CheckedStream:
    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._parts: list[tuple[Path, StreamPlace, Any]] = []
        self._ends: list[int] = []
        """Number of rows up to the end of each file."""
        self._is_intact: dict[tuple[int, int], bool] = {}
        """By file and block."""

    def __getstate__(self) -> dict[str, Any]:
        return {"_stream": self._stream, "_parts": [], "_ends": [], "_is_intact": {}}

    def damage(self, row: int) -> Damage | None:
        if not self._parts:
            self._parts = list(self._stream.parts())
            self._ends = list(accumulate(len(place.starts) - 1 for _, place, _ in self._parts))
        file = bisect.bisect_right(self._ends, row)
        path, place, values = self._parts[file]
        if place.blocks is None or place.digests is None:
            return None
        before = self._ends[file] - (len(place.starts) - 1)
        block = int(np.searchsorted(place.blocks, row - before, side="right")) - 1
        if (file, block) not in self._is_intact:
            self._stream.view(row)  # raises where the file was cut short meanwhile
            digest = block_digests(values, place.starts, place.blocks, [block])[0]
            self._is_intact[file, block] = bool(digest == place.digests[block])
        if self._is_intact[file, block]:
            return None
        return Damage(
            path, self._stream.name, range(before + int(place.blocks[block]), before + int(place.blocks[block + 1]))
        )


def _blocks(stream: Stream, most_bytes: int | None) -> Iterator[tuple[Damage | None, int]]:
    """Yield (damage, size in bytes) of each block that is read."""
    before = 0
    for path, place, values in stream.parts():
        if place.digests is not None and place.blocks is not None:
            blocks, starts = place.blocks, place.starts
            for block in _spread(len(blocks) - 1, place.nbytes, most_bytes):
                is_intact = block_digests(values, starts, blocks, [block])[0] == place.digests[block]
                rows = range(before + int(blocks[block]), before + int(blocks[block + 1]))
                size = int(starts[blocks[block + 1]] - starts[blocks[block]]) * place.step_bytes
                yield None if is_intact else Damage(path, stream.name, rows), size
        before += len(place.starts) - 1


def _spread(number: int, nbytes: int, most_bytes: int | None) -> list[int]:
    """Return the blocks to read: all, or as many as have this size, the first and the last among them."""
    if most_bytes is None or nbytes <= most_bytes or number < 2:
        return list(range(number))
    wanted = max(2, number * most_bytes // nbytes)
    chosen: list[int] = np.unique(np.linspace(0, number - 1, wanted).astype(np.int64)).tolist()
    return chosen
