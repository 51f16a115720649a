"""Brings a mapped file into the page cache in its own order, while its rows are read in any order.

Page faults all over a file get a fraction of what a disk gives in order, and a first epoch reads the whole file anyway.
So whoever is about to read some rows first reads a multiple of their bytes in order, from where it read last, until it
has been through everything once; what is in memory already, because another process was there, is passed over. A look
at a few rows stays a look.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

CHUNK = 1 << 20
TIMES = 32
"""How many times what is asked for is read ahead,"""
MOST_BYTES = 64 << 20
"""and at most so much at once."""
NOW = getattr(os, "RWF_NOWAIT", None)


class Span(NamedTuple):
    """Bytes of a file."""

    path: Path
    begin: int
    end: int


class ReadAhead:
    """For the mapped spans of one stream."""

    def __init__(self, spans: Sequence[Span]) -> None:
        self._spans = tuple(spans)
        self._num_bytes = sum(span.end - span.begin for span in spans)
        self._process = 0  # a forked worker begins anew, at a place of its own
        self._steps: Iterator[int] = iter(())

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_process": 0, "_steps": iter(())}

    def asked(self, number: int, begin: int, num_bytes: int) -> None:
        """So many bytes are about to be read, the first at this place of this span."""
        if self._process != os.getpid():
            self._process = os.getpid()
            fits = self._num_bytes <= available_bytes() // 2
            self._steps = read_in_order(list(from_there_on(self._spans, number, begin))) if fits else iter(())
        left = min(TIMES * num_bytes, MOST_BYTES)
        while left > 0 and (done := next(self._steps, None)) is not None:
            left -= done


def from_there_on(spans: Sequence[Span], number: int, begin: int) -> Iterator[Span]:
    """All bytes once: from one place to the end, then from the beginning to that place."""
    start = spans[number]
    yield Span(start.path, begin, start.end)
    yield from spans[number + 1 :]
    yield from spans[:number]
    yield Span(start.path, start.begin, begin)


def read_in_order(spans: Sequence[Span]) -> Iterator[int]:
    """Reads a chunk at each step, and tells how many bytes came from the disk. What fails is told by who reads rows."""
    room = bytearray(CHUNK)
    try:
        for path, begin, end in spans:
            descriptor = os.open(path, os.O_RDONLY)
            try:
                for at in range(begin, end, CHUNK):
                    wanted = memoryview(room)[: end - at]
                    yield 0 if is_in_memory(descriptor, at) else os.preadv(descriptor, [wanted], at)
            finally:
                os.close(descriptor)
    except OSError:
        return


def is_in_memory(descriptor: int, at: int) -> bool:
    """Whether the page at this place can be read without the disk; False where the system cannot say."""
    if NOW is None:
        return False
    try:
        return os.preadv(descriptor, [bytearray(1)], at, NOW) > 0
    except OSError:  # not there, or a file system that does not know
        return False


def available_bytes() -> int:
    """Memory that could be had without swapping."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return 0
    found = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return 1024 * int(found[0]) if found else 0
