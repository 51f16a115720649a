"""What every thread was doing, written into the rank's log when the rank must end for another's sake."""

from __future__ import annotations

import faulthandler
import time
from contextlib import suppress
from pathlib import Path

_path: Path | None = None


def send_to(path: Path | None) -> None:
    """The log of this rank; None where it has none."""
    global _path
    _path = path


def has_log() -> bool:
    """Whether there is a place for what would only fill the screen."""
    return _path is not None


def dump(why: str) -> None:
    """Add the stacks of all threads to the log, under a line that says why."""
    path = _path
    if path is None:
        return
    with suppress(OSError):  # a full disk must not keep a rank from ending
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} ERROR {why}; all threads were here:\n")
            file.flush()
            faulthandler.dump_traceback(file, all_threads=True)
