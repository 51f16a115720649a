"""Stop signals: SIGTERM and SIGUSR1, as batch schedulers send them, and Ctrl-C mean save and leave cleanly."""

from __future__ import annotations

import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType

from paceline.world.link import Link
from paceline.world.parent_process import is_orphan

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
IMPATIENT_AFTER_S = 1.0
"""A second Ctrl-C leaves at once; but one from a terminal may reach a rank twice, through its launcher too."""


@contextmanager
def handled(numbers: Iterable[int], handle: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Send signals to `handle` meanwhile; outside the main thread Python delivers none and nothing is changed."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def on_stop_signal(ask: Callable[[], None]) -> Iterator[None]:
    """Call `ask` when a stop signal arrives."""
    asked_at: float | None = None

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal asked_at
        now = time.monotonic()
        if number == signal.SIGINT and asked_at is not None and now - asked_at > IMPATIENT_AFTER_S:
            raise KeyboardInterrupt
        asked_at = asked_at or now
        ask()

    with handled(STOP_SIGNALS, handle):
        yield


def stop_reason(link: Link) -> str:
    """Return why the ranks stop: asked to, or because a launcher was killed and cannot look after them any more."""
    hosts = link.gather_objects(socket.gethostname() if is_orphan() else None)
    names = ", ".join(dict.fromkeys(host for host in hosts if host is not None))
    return f"the launcher on {names} is gone" if names else "asked to stop"
