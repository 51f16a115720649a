"""Many strings in two arrays: one buffer of UTF-8, and the start of each string in it.

A list of a million strings is a million objects: each costs 50 bytes more than its text, and a forked worker that reads
one writes its reference count and so copies the page around it. These arrays are shared between processes as they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

_ROWS_AT_ONCE = 1 << 14
# Gathering bytes needs 8 bytes of index for each: done in blocks, it costs next to nothing beside the strings.


class Strings:
    """A column of strings that cannot be changed."""

    __slots__ = ("_bytes", "_starts")

    def __init__(self, packed: NDArray[np.uint8], starts: NDArray[np.int64]) -> None:
        self._bytes = packed
        self._starts = starts  # (number of strings + 1)

    @classmethod
    def pack(cls, values: Iterable[bytes]) -> Strings:
        """Pack strings in UTF-8. Names of files may be other bytes, which come out as Python has them."""
        parts = list(values)
        starts = np.zeros(len(parts) + 1, dtype=np.int64)
        np.cumsum(np.fromiter(map(len, parts), dtype=np.int64, count=len(parts)), out=starts[1:])
        return cls(np.frombuffer(b"".join(parts), dtype=np.uint8), starts)

    @classmethod
    def concat(cls, columns: Sequence[Strings]) -> Strings:
        if len(columns) == 1:
            return columns[0]
        lengths = [np.diff(column._starts) for column in columns]
        starts = np.zeros(sum(map(len, lengths)) + 1, dtype=np.int64)
        if columns:
            np.cumsum(np.concatenate(lengths), out=starts[1:])
        packed = np.concatenate([column.packed for column in columns]) if columns else np.empty(0, np.uint8)
        return cls(packed, starts)

    def __len__(self) -> int:
        return len(self._starts) - 1

    def __getitem__(self, row: int) -> str:
        return self.raw(row).decode("utf-8", "surrogateescape")

    def raw(self, row: int) -> bytes:
        """Return one string as it is packed."""
        if not -len(self) <= row < len(self):
            raise IndexError(row)
        row %= len(self)
        return self._bytes[self._starts[row] : self._starts[row + 1]].tobytes()

    def take(self, rows: NDArray[np.int64]) -> Strings:
        """Return the strings of these rows, in their order."""
        begins = self._starts[:-1][rows]
        lengths = self._starts[1:][rows] - begins
        starts = np.zeros(len(rows) + 1, dtype=np.int64)
        np.cumsum(lengths, out=starts[1:])
        packed = np.empty(starts[-1], dtype=np.uint8)
        for first in range(0, len(rows), _ROWS_AT_ONCE):
            block = slice(first, first + _ROWS_AT_ONCE)
            begin, end = starts[first], starts[min(first + _ROWS_AT_ONCE, len(rows))]
            # Byte k of the result is byte k of the source, moved by as much as its string is.
            sources = np.arange(begin, end, dtype=np.int64)
            sources += np.repeat(begins[block] - starts[:-1][block], lengths[block])
            np.take(self._bytes, sources, out=packed[begin:end])
        return Strings(packed, starts)

    @property
    def packed(self) -> NDArray[np.uint8]:
        """All strings one after the other."""
        return self._bytes[self._starts[0] : self._starts[-1]]

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Length of each string, in bytes."""
        return np.diff(self._starts)

    @property
    def nbytes(self) -> int:
        return self._bytes.nbytes + self._starts.nbytes
