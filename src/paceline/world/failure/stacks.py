"""Stack traces of all threads, written into the rank's log when it ends because another rank failed."""

from __future__ import annotations

import faulthandler
import time
from contextlib import suppress
from pathlib import Path

_path: Path | None = None


def send_to(path: Path | None) -> None:
    """Set the log file of this rank; None if it has none."""
    global _path
    _path = path


def has_log() -> bool:
    """Return True if this rank has a log file."""
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
