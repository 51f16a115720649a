"""Launchers of several machines hear from each other that they live, as one that was killed says nothing at its end."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Mapping

from torch.distributed import DistError

from paceline.world.store import Store

_EVERY_S = 0.5
SILENT_S = 6.0
"""A launcher that says nothing for so long is gone: it has nothing else to do, so that only its end keeps it silent."""


def beats(store: Store, nodes: Collection[int]) -> dict[int, int]:
    """How often each of these launchers has said that it lives."""
    return {node: store.add(f"beat/{node}", 0) for node in nodes}


class Pulse:
    """The thread by which this launcher says that it lives."""

    def __init__(self, store: Store, node: int) -> None:
        self._store, self._key = store, f"beat/{node}"
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="paceline-pulse", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """To be called before the interpreter ends: a thread inside C++ code would abort it."""
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        while True:
            try:
                self._store.add(self._key, 1)
            except DistError:
                return  # the launcher of node 0 is gone, and with it whoever would listen
            if self._stopped.wait(_EVERY_S):
                return


class Listener:
    """Which launchers have fallen silent, by how often each had said that it lives when it was last looked at."""

    def __init__(self, silent_s: float = SILENT_S) -> None:
        self._silent_s = silent_s
        self._heard: dict[int, tuple[int, float]] = {}

    def silent(self, beats: Mapping[int, int], now_s: float | None = None) -> set[int]:
        """Those of whom nothing new was heard for too long, counted from the first look."""
        now = time.monotonic() if now_s is None else now_s
        for node, beat in beats.items():
            if node not in self._heard or self._heard[node][0] != beat:
                self._heard[node] = (beat, now)
        return {node for node in beats if now - self._heard[node][1] >= self._silent_s}
