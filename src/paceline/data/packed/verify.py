"""Whether packed data is still what was written: digests of its blocks, some of them for a quick look, or all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from paceline.core.paths import near
from paceline.data.manifest.columns import Manifest
from paceline.data.packed.errors import is_packed
from paceline.data.packed.reader import Packed, Stream, open_packed
from paceline.data.packed.writer import block_digests

LOOK_BYTES = 256 << 20
"""How much of a stream a quick look reads: all of a small one, and blocks from all over a large one."""


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
        """Without the name of the file."""
        rows = f"row {self.rows[0] + 1}" if len(self.rows) == 1 else f"rows {self.rows[0] + 1} to {self.rows[-1] + 1}"
        return f"{rows} of stream {self.stream!r}: the bytes are not those that were written"


def verify(
    packed: Packed, *, most_bytes: int | None = None, progress: Callable[[int], None] | None = None
) -> tuple[list[Damage], int]:
    """(blocks that are damaged, bytes that were read); all blocks, or of each stream up to so many bytes."""
    found, num_bytes = [], 0
    for name in packed.names:
        for damage, done in _of_stream(packed.stream(name), most_bytes):
            num_bytes += done
            found += [] if damage is None else [damage]
            if progress is not None:
                progress(num_bytes)
    return found, num_bytes


def is_verifiable(packed: Packed) -> bool:
    """Files that others wrote have no digests."""
    return all(place.digests is not None for name in packed.names for _, place, _ in packed.stream(name).parts())


def num_bytes(packed: Packed) -> int:
    return sum(place.nbytes for name in packed.names for _, place, _ in packed.stream(name).parts())


def packed_rows(manifest: Manifest, rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Those of these rows that come from packed files."""
    numbers = [number for number, path in enumerate(manifest.sources) if is_packed(path)]
    return rows[np.isin(manifest.source_numbers[rows], numbers)] if numbers else rows[:0]


def damaged_rows(manifest: Manifest, rows: NDArray[np.int64], *, whole: bool) -> dict[int, str]:
    """What is wrong with packed rows of a manifest, by row; the others are sound as far as was looked."""
    found: dict[int, str] = {}
    for number in np.unique(manifest.source_numbers[rows]).tolist():
        mine = rows[manifest.source_numbers[rows] == number]
        damages, _ = verify(open_packed(manifest.sources[number]), most_bytes=None if whole else LOOK_BYTES)
        for damage in damages:
            lines = manifest.lines[mine] - 1
            hit = mine[(lines >= damage.rows[0]) & (lines <= damage.rows[-1])]
            found |= dict.fromkeys(hit.tolist(), f"{damage.stream}: the bytes are not those that were written")
    return found


def _of_stream(stream: Stream, most_bytes: int | None) -> Iterator[tuple[Damage | None, int]]:
    """(what is wrong with it, its bytes) of each block that is looked at."""
    before = 0
    for path, place, values in stream.parts():
        if place.digests is not None and place.blocks is not None:
            blocks, starts = place.blocks, place.starts
            for block in _spread(len(blocks) - 1, place.nbytes, most_bytes):
                is_sound = block_digests(values, starts, blocks, [block])[0] == place.digests[block]
                rows = range(before + int(blocks[block]), before + int(blocks[block + 1]))
                size = int(starts[blocks[block + 1]] - starts[blocks[block]]) * place.step_bytes
                yield None if is_sound else Damage(path, stream.name, rows), size
        before += len(place.starts) - 1


def _spread(number: int, nbytes: int, most_bytes: int | None) -> list[int]:
    """Which blocks to look at: all, or as many as have this size, the first and the last among them."""
    if most_bytes is None or nbytes <= most_bytes or number < 2:
        return list(range(number))
    wanted = max(2, number * most_bytes // nbytes)
    chosen: list[int] = np.unique(np.linspace(0, number - 1, wanted).astype(np.int64)).tolist()
    return chosen
