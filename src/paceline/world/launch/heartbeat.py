"""Heartbeats between the launchers of several machines: one that was killed cannot say so."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Mapping

from torch.distributed import DistError

from paceline.world.rendezvous.client import StoreSilent
from paceline.world.store import Store

_EVERY_S = 0.5
SILENT_S = 6.0
"""Without a beat for this long a launcher is gone: it has nothing else to do."""


def beats(store: Store, nodes: Collection[int]) -> dict[int, int]:
    """Return the number of beats of each of these launchers."""
    return {node: store.add(f"beat/{node}", 0) for node in nodes}


class Heartbeat:
    """Thread that counts up this launcher's beats in the store."""

    def __init__(self, store: Store, node: int) -> None:
        self._store, self._key = store, f"beat/{node}"
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="paceline-heartbeat", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread. Call it before the interpreter ends: a thread inside C++ code would abort it."""
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        while True:
            try:
                self._store.add(self._key, 1)
            except StoreSilent:
                pass  # it may only be busy
            except DistError:
                return  # the launcher of node 0 is gone, and with it whoever would listen
            if self._stopped.wait(_EVERY_S):
                return


class HeartbeatMonitor:
    """Finds launchers whose beats have stopped."""

    def __init__(self, silent_s: float = SILENT_S) -> None:
        self._silent_s = silent_s
        self._heard: dict[int, tuple[int, float]] = {}

    def silent(self, beats: Mapping[int, int], now_s: float | None = None) -> set[int]:
        """Return the launchers without a new beat for too long, counted from the first look."""
        now = time.monotonic() if now_s is None else now_s
        for node, beat in beats.items():
            if node not in self._heard or self._heard[node][0] != beat:
                self._heard[node] = (beat, now)
        return {node for node in beats if now - self._heard[node][1] >= self._silent_s}
