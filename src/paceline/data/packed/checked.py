"""Rows of packed data compared with their digests before they are used: what is copied elsewhere gets new digests
there, which would say of any damage that it is sound."""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from paceline.core.errors import PacelineError
from paceline.data.packed.layout import StreamPlace
from paceline.data.packed.reader import Packed, Stream
from paceline.data.packed.verify import Damage
from paceline.data.packed.writer import block_digests


class RowDamaged(PacelineError):
    """A row whose bytes are not those that were packed; which row of a block it is cannot be told."""

    hint = "pack it again from what it was made of; `--bad-data skip` leaves out all rows of damaged blocks"

    def __init__(self, damage: Damage) -> None:
        super().__init__(str(damage))
        self.damage = damage


class CheckedRows:
    """Answers for rows of some streams; each block is read once, when the first of its rows is asked for."""

    def __init__(self, packed: Packed, names: Iterable[str] | None = None) -> None:
        self._streams = [_CheckedStream(packed.stream(name)) for name in (packed.names if names is None else names)]

    def damage(self, row: int) -> Damage | None:
        """What is wrong with the bytes of a row; None also where another program wrote the file, without digests."""
        return next((found for stream in self._streams if (found := stream.damage(row)) is not None), None)

    def require(self, row: int) -> None:
        """Raise `RowDamaged` if it is."""
        if (found := self.damage(row)) is not None:
            raise RowDamaged(found)


class _CheckedStream:
    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._parts: list[tuple[Path, StreamPlace, Any]] = []
        self._ends: list[int] = []
        """Of the rows of each file."""
        self._is_sound: dict[tuple[int, int], bool] = {}
        """By file and block."""

    def __getstate__(self) -> dict[str, Any]:
        return {"_stream": self._stream, "_parts": [], "_ends": [], "_is_sound": {}}

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
        if (file, block) not in self._is_sound:
            self._stream.view(row)  # says so where the file was cut short meanwhile
            found = block_digests(values, place.starts, place.blocks, [block])[0]
            self._is_sound[file, block] = bool(found == place.digests[block])
        if self._is_sound[file, block]:
            return None
        return Damage(
            path, self._stream.name, range(before + int(place.blocks[block]), before + int(place.blocks[block + 1]))
        )
