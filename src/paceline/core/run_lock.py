"""Who trains in a run's folder: a lock that is let go with the process that has it, however that ends."""

from __future__ import annotations

import fcntl
import os
import socket
from pathlib import Path

LOCK = ".lock"
RUNNING, DIED, UNSEEN = "running", "died", "running or died"
"""What a run that has not said how it ended may be: the last where nobody can tell from here."""
_ON = " on "


def owner() -> str:
    """This process, as it stands in the lock's file."""
    return f"pid {os.getpid()}{_ON}{socket.gethostname()}"


def status_now(folder: Path, status: str) -> str:
    """As the run wrote it down; of one that is `running`, what its lock says of it.

    A lock that is free here may be held on another machine: not all shared disks tell.
    """
    if status != RUNNING:
        return status
    try:
        with (folder / LOCK).open(encoding="utf-8", errors="replace") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            host = file.read().strip().rpartition(_ON)[2]
    except BlockingIOError:
        return RUNNING
    except OSError:  # no lock, or a file system without locks
        return UNSEEN
    if host == socket.gethostname():
        return DIED
    return f"{UNSEEN}{_ON}{host}" if host else UNSEEN
