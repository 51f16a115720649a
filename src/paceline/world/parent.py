"""Processes that end with the one that began them, however that one ends."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG

_parent: int | None = None


def end_with_parent(how: signal.Signals) -> None:
    """Ask Linux for this signal when the parent of this process is gone, even by SIGKILL; elsewhere there is no way."""
    global _parent
    if sys.platform == "linux":
        _parent = _parent or os.getppid()
        ctypes.CDLL(None).prctl(_DEATH_SIGNAL, how, 0, 0, 0)


def is_orphan() -> bool:
    """Whether the parent that this process was to end with is gone."""
    return _parent is not None and os.getppid() != _parent
