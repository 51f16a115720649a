"""Folder for the files of trials; it is removed when the search ends, however that ends.

A signal that asks to leave ends the search as Ctrl-C does. A search that was killed leaves its folder; the next one
takes it away.
"""

from __future__ import annotations

import fcntl
import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from paceline.world.signals import handled

PREFIX = "paceline-tune-"
LOCK = "alive"
"""A file that a search has locked as long as it lives."""


class AskedToLeave(KeyboardInterrupt):
    """By a signal."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


@contextmanager
def leaving_when_asked() -> Iterator[None]:
    """SIGTERM and SIGHUP, too, unwind what was begun; more of them do not disturb that."""
    numbers = (signal.SIGTERM, signal.SIGHUP)

    def leave(number: int, frame: FrameType | None) -> None:
        for each in numbers:
            signal.signal(each, signal.SIG_IGN)
        raise AskedToLeave(number)

    with handled(numbers, leave):
        yield


@contextmanager
def work_folder() -> Iterator[Path]:
    """A folder for this search; those of searches that were killed are removed."""
    for old in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        _remove_if_dead(old)
    folder = Path(tempfile.mkdtemp(prefix=PREFIX))
    try:
        with (folder / LOCK).open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _remove_if_dead(folder: Path) -> None:
    try:
        with (folder / LOCK).open("r+") as lock:  # no folder of ours without it, and nobody else's can be opened
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
    except OSError:
        return
