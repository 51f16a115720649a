"""Processes that end with the one that began them, however that one ends."""

from __future__ import annotations

import ctypes
import signal
import sys

_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG


def end_with_parent(how: signal.Signals) -> None:
    """Ask Linux for this signal when the parent of this process is gone, even by SIGKILL; elsewhere there is no way."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_DEATH_SIGNAL, how, 0, 0, 0)
