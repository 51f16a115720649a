"""Being asked to stop: SIGTERM and SIGUSR1 mean save and leave cleanly, as batch schedulers send them."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


@contextmanager
def on_stop_signal(ask: Callable[[], None]) -> Iterator[None]:
    """Call `ask` when a stop signal arrives; outside the main thread Python delivers none and nothing is changed."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(number: int, frame: Any) -> None:
        ask()

    before = {number: signal.signal(number, handle) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
