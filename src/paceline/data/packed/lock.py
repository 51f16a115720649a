"""One packing of a file at a time: a lock in the folder of its parts, which goes with the process that holds it."""

from __future__ import annotations

import fcntl
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from paceline.core.errors import PacelineError
from paceline.core.paths import near

LOCK = "lock"
"""In the folder: who holds it."""


class PackBusy(PacelineError):
    """Another process is packing the same file."""

    hint = "wait for it or stop it, or name another file"

    def __init__(self, out: Path, owner: str) -> None:
        super().__init__(f"{near(out)} is being written by another `paceline pack`: {owner}")
        self.path, self.owner = out, owner


@contextmanager
def locked(out: Path, folder: Path) -> Iterator[None]:
    """The folder of the parts of `out`, made where there is none, for nobody else."""
    descriptor = _hold(out, folder)
    _held.add(descriptor)
    try:
        yield
    finally:
        try:
            (folder / LOCK).unlink(missing_ok=True)
            with suppress(OSError):
                folder.rmdir()  # where nothing is in it
        finally:
            _held.discard(descriptor)
            os.close(descriptor)


def _hold(out: Path, folder: Path) -> int:
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except FileNotFoundError:  # who held it has just removed the folder
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.read(descriptor, 1000).decode(errors="replace").strip()
            os.close(descriptor)
            raise PackBusy(out, owner or "one that has just begun") from None
        except OSError:
            return descriptor  # a file system without locks: nothing can be promised there
        if _is_at(folder / LOCK, descriptor):
            since = time.strftime("%Y-%m-%d %H:%M:%S")
            with suppress(OSError):  # a full disk: the lock holds, whether or not it says who has it
                os.ftruncate(descriptor, 0)
                os.write(descriptor, f"pid {os.getpid()} on {socket.gethostname()}, since {since}\n".encode())
            return descriptor
        os.close(descriptor)


def _is_at(path: Path, descriptor: int) -> bool:
    """Whether a file that is open is still the one of that name: who held it before has removed it."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


_held: set[int] = set()


def _let_go() -> None:
    """In a forked process, which would otherwise hold the lock for as long as it outlives its parent."""
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_let_go)
