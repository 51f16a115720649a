"""Processes that end with the one that started them, however that one ends."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Sequence
from multiprocessing.connection import wait

_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG, which stays over an exec
_BIND = f"""
import ctypes, os, sys
ctypes.CDLL(None).prctl({_DEATH_SIGNAL}, int(sys.argv[2]), 0, 0, 0)
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[3], sys.argv[3:])
"""

_EVERY_S = 0.5

_parent: int | None = None


def bound(command: Sequence[str], how: signal.Signals) -> list[str]:
    """Return a command whose process gets this signal when the process that starts it, this one, is gone.

    From its beginning on: importing torch takes seconds, in which a process cannot ask for that itself.
    """
    if sys.platform != "linux":
        return list(command)
    return [sys.executable, "-I", "-S", "-c", _BIND, str(os.getpid()), str(int(how)), *command]


def end_with_parent(how: signal.Signals) -> None:
    """Ask Linux for this signal when the parent of this process is gone, even by SIGKILL; elsewhere there is no way."""
    global _parent
    if sys.platform == "linux":
        _parent = _parent or os.getppid()
        ctypes.CDLL(None).prctl(_DEATH_SIGNAL, how, 0, 0, 0)


def is_orphan() -> bool:
    """Return True if the parent that this process was to end with is gone."""
    return _parent is not None and os.getppid() != _parent


def leave_with_parent() -> None:
    """End this process of `multiprocessing` within a second after its parent is gone, whatever it is doing.

    By a thread: Linux's own signal comes when the *thread* that started a process ends, and where a server forks
    processes (`forkserver`) their parent is another one.
    """
    threading.Thread(target=_watch_parent, args=(os.getppid(),), name="paceline-parent-watch", daemon=True).start()


def _watch_parent(number: int) -> None:
    parent = multiprocessing.parent_process()
    # The end of a pipe that the parent holds; processes that were forked later hold it, too, and are asked as well.
    sentinels = [] if parent is None else [parent.sentinel]
    while os.getppid() == number and not wait(sentinels, _EVERY_S):
        continue
    os._exit(1)
