"""A disk that is full while data is written to it: how much is missing, and that the work so far is not lost."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

from paceline.core.paths import CannotWrite
from paceline.core.units import size

_FULL = (errno.ENOSPC, errno.EDQUOT)


class DiskFull(CannotWrite):
    """No room is left, of the disk or of what a user may take of it."""

    def __init__(self, path: Path, error: OSError, num_bytes: int, then: str) -> None:
        """`num_bytes`: that are still to be written, about; `then`: what the same command does."""
        super().__init__(path, error)
        self.num_bytes = num_bytes
        free = "" if (found := _free(path)) is None else f", and {size(found)} are free"
        self.hint = f"about {size(num_bytes)} more are needed there{free}: make room, and type the same command: {then}"


def cannot_write(path: Path, error: OSError, num_bytes: int, then: str) -> CannotWrite:
    """What to raise where a file cannot be written."""
    return DiskFull(path, error, num_bytes, then) if error.errno in _FULL else CannotWrite(path, error)


def _free(path: Path) -> int | None:
    try:
        return shutil.disk_usage(next(each for each in path.absolute().parents if each.exists())).free
    except OSError:
        return None
