"""Files that are complete or absent: write aside, sync, rename; and the errors of a disk that refuses."""

from __future__ import annotations

import errno
import glob
import io
import os
import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager as _Opened
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, Literal, overload

from paceline.core.errors import PacelineError
from paceline.core.paths import near
from paceline.core.units import size

_FULL = (errno.ENOSPC, errno.EDQUOT)
_ASIDE = ".writing"


class CannotWrite(PacelineError):
    """A file cannot be created or written."""

    path: Path
    error: OSError
    advice: str = "choose another file, in a folder that you may write to"
    sentence = "{where} cannot be written: {reason}"
    hint = "{advice}"

    @property
    def where(self) -> str:
        return near(self.path)

    @property
    def reason(self) -> str:
        return str(self.error.strerror or self.error)


class DiskFull(CannotWrite):
    """No space is left on the disk, or in the user's quota."""


class OutputFull(PacelineError):
    """No space for what a command prints, or for a file that nobody has an advice for."""

    error: OSError
    sentence = "{what} cannot be written: {reason}"
    hint = "make room there, or write to another disk, and type the same command again"

    @property
    def what(self) -> str:
        return "the output" if self.error.filename is None else near(self.error.filename)

    @property
    def reason(self) -> str:
        return str(self.error.strerror or self.error)


def is_full(error: BaseException) -> bool:
    """Return True if the disk or the user's quota is full."""
    return isinstance(error, OSError) and error.errno in _FULL


def cannot_write(path: Path, error: OSError, num_bytes: int, then: str) -> CannotWrite:
    """Return the error to raise for a failed write: `DiskFull` with the space that is missing, or `CannotWrite`.

    Args:
        path: The file that was to be written.
        error: The failure of the operating system.
        num_bytes: Estimate of the bytes that are still to be written.
        then: What the same command does when it is typed again.
    """
    if not is_full(error):
        return CannotWrite(path, error)
    num_free = _free_bytes(path)
    free = "" if num_free is None else f", and {size(num_free)} are free"
    needed = f"about {size(num_bytes)} more are needed there{free}"
    return DiskFull(path, error, f"{needed}: make room, and type the same command: {then}")


class OutputFile(io.TextIOWrapper):
    """A file for lines that are there to be read as they are written; what was written stays, whatever happens.

    Raises `CannotWrite` where the disk refuses, not `OSError`, which readers of other files raise.
    """

    def __init__(self, path: Path, advice: str) -> None:
        self._path, self._advice = path, advice
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            super().__init__(path.open("wb"), encoding="utf-8", errors="surrogateescape")
        except OSError as error:
            raise CannotWrite(path, error) from error

    def write(self, text: str, /) -> int:
        try:
            return super().write(text)
        except OSError as error:
            raise self._refused(error) from error

    def flush(self) -> None:
        try:
            super().flush()
        except OSError as error:
            raise self._refused(error) from error

    def close(self) -> None:
        try:
            super().close()
        except OSError as error:
            raise self._refused(error) from error

    def _refused(self, error: OSError) -> CannotWrite:
        return DiskFull(self._path, error, self._advice) if is_full(error) else CannotWrite(self._path, error)


def sync(path: Path) -> None:
    """Flush a file's content to the disk, or a folder's entries: syncing files does not sync their names."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@overload
def replacing(path: Path, mode: Literal["w"] = "w", *, errors: str | None = None) -> _Opened[IO[str]]: ...


@overload
def replacing(path: Path, mode: Literal["wb"], *, errors: str | None = None) -> _Opened[IO[bytes]]: ...


@contextmanager
def replacing(path: Path, mode: str = "w", *, errors: str | None = None) -> Iterator[IO[Any]]:
    """Open a file that gets the name `path` when the block ends, complete and safe on the disk.

    Until then, and if the block raises, what was at `path` stays untouched. A file that is replaced hands on its
    permissions. Raises `OSError` as it comes; callers know what to advise.

        with replacing(path) as file:
            json.dump(record, file)
    """
    aside = path.with_name(f".{path.name}.{os.getpid()}{_ASIDE}")
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        with aside.open(mode, encoding=None if "b" in mode else "utf-8", errors=errors) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        with suppress(OSError):
            shutil.copymode(path, aside)
        os.replace(aside, path)
    finally:
        with suppress(OSError):
            aside.unlink(missing_ok=True)
    # Not every file system can sync a folder, and not every folder that may be written to may be read.
    with suppress(OSError):
        sync(path.parent)


def check_writable(path: Path) -> None:
    """Raise `OSError` unless a file could be written at `path` now; its folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if path.exists() and not os.access(path, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    aside = path.with_name(f".{path.name}.{os.getpid()}{_ASIDE}")
    aside.touch()
    aside.unlink(missing_ok=True)


def is_aside(name: str) -> bool:
    """Return True for the name of a file that `replacing` was writing when the process was killed."""
    return name.startswith(".") and name.endswith(_ASIDE)


def remove_asides(path: Path) -> None:
    """Remove what `replacing(path)` of processes that were killed has left; nobody may be writing it now."""
    for aside in path.parent.glob(f".{glob.escape(path.name)}.*{_ASIDE}"):
        with suppress(OSError):
            aside.unlink(missing_ok=True)


def _free_bytes(path: Path) -> int | None:
    try:
        return shutil.disk_usage(next(each for each in path.absolute().parents if each.exists())).free
    except OSError:
        return None
