"""Whether the end of an audio file is missing, where libsndfile does not say: it takes a cut WAV or Ogg as it is."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import BinaryIO

_MOST_HEADER_BYTES = 1 << 16
_STREAMED = 0x7FFF0000
"""A program that writes to a pipe cannot go back to fill in the length, and leaves a number above this, or 0."""
_MOST_PAGE_BYTES = 27 + 255 + 255 * 255
_LEAST_SHARE = 0.99
"""What is a percent too short still counts as whole, like a duration that is a percent off."""


def missing_end(path: Path) -> str | None:
    """What shows that a file was cut off; None where nothing does, and for a file that cannot be opened."""
    try:
        if not path.is_file():
            return None
        with path.open("rb") as file:
            begin = file.read(12)
            if begin[:4] == b"RIFF" and begin[8:] == b"WAVE":
                return _of_wav(file, path.stat().st_size)
            if begin[:4] == b"OggS":
                return _of_ogg(file, path.stat().st_size)
    except OSError:
        pass  # the reader says it better
    return None


def _of_wav(file: BinaryIO, size: int) -> str | None:
    place = 12
    while place + 8 <= min(size, _MOST_HEADER_BYTES):
        file.seek(place)
        name, length = struct.unpack("<4sI", file.read(8))
        place += 8
        if name == b"data":
            there = size - place
            is_cut = 0 < length < _STREAMED and there < _LEAST_SHARE * length
            return f"is truncated: {there:,} of {length:,} bytes of samples are there" if is_cut else None
        place += length + length % 2
    return None


def _of_ogg(file: BinaryIO, size: int) -> str | None:
    file.seek(max(0, size - _MOST_PAGE_BYTES))
    end = file.read()
    page = end.rfind(b"OggS")
    # Not every program marks the last page, so a file that was cut between two pages shows only by its length.
    if page >= 0 and len(end) >= page + 27:
        num_pieces = end[page + 26]
        pieces = end[page + 27 : page + 27 + num_pieces]
        if len(end) >= page + 27 + num_pieces + sum(pieces):
            return None
    return "is truncated: the last page of its Ogg stream is cut off"
