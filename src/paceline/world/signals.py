"""Stop signals: SIGTERM and SIGUSR1, as batch schedulers send them, and Ctrl-C mean save and leave cleanly.

They stay handled until the checkpoint of the stop is on disk, however many arrive: only SIGKILL abandons it.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from types import FrameType
from typing import TYPE_CHECKING, Any

from paceline.world.parent_process import is_orphan

if TYPE_CHECKING:
    from paceline.world.link import Link

Handler = Callable[[int, FrameType | None], Any] | int | None
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
IMPATIENT_AFTER_S = 1.0
"""Where nothing is saved a second Ctrl-C leaves at once; but one from a terminal may reach a rank twice, through its
launcher too."""
SAME_KEY_S = 0.2
"""Ctrl-C that comes twice within this time was typed once."""

_process_ends = False


def process_ends_with_run() -> None:
    """Say that this process ends soon after a run, so that late stop signals must not change its exit code."""
    global _process_ends
    _process_ends = True


def hand_back(before: Mapping[signal.Signals, Handler], *, was_asked: bool) -> None:
    """Restore handlers; a process that was asked to stop, and does so now, is deaf instead of killed by the next one.

    `SIG_IGN` holds until the process is gone; Python's own handlers are taken down before that.
    """
    for number, handler in before.items():
        is_default = handler in (signal.SIG_DFL, signal.default_int_handler)
        deaf = _process_ends and was_asked and is_default
        signal.signal(number, signal.SIG_IGN if deaf else handler)


@contextmanager
def handled(
    numbers: Iterable[signal.Signals],
    handle: Callable[[int, FrameType | None], None],
    was_asked: Callable[[], bool] = lambda: False,
) -> Iterator[None]:
    """Send signals to `handle` meanwhile; outside the main thread Python delivers none and nothing is changed.

    `was_asked` tells at the end if this process was asked to stop, and does: see `hand_back`.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield
    finally:
        hand_back(before, was_asked=was_asked())


class StopSignals:
    """Stop signals of a run, from its first step until it has left: `with StopSignals(ask, saves=True) as signals:`.

    The first one calls `ask`. Where the run saves, further ones only print that it does; where it does not, a second
    Ctrl-C leaves at once.
    """

    def __init__(self, ask: Callable[[], None], *, saves: bool, speaks: bool = True) -> None:
        """`speaks` is for one rank of those that get the same signals."""
        self._ask, self._saves, self._speaks = ask, saves, speaks
        self._asked_at: float | None = None
        self._interrupted_at = float("-inf")
        self._before: dict[signal.Signals, Handler] = {}
        self.is_closing = False
        """True once the run has ended by itself or by a signal, and its last checkpoint is being written."""

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._handle) for number in STOP_SIGNALS}
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        hand_back(self._before, was_asked=self._asked_at is not None and kind is None)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now, is_first = time.monotonic(), self._asked_at is None
        is_echo = number == signal.SIGINT and now - self._interrupted_at < SAME_KEY_S
        if number == signal.SIGINT:
            self._interrupted_at = now
        if self._asked_at is None:
            self._asked_at = now
            self._ask()
        if self._saves:
            if (self.is_closing or not is_first) and not is_echo and self._speaks:
                _say_saving(signal.Signals(number))
        elif number == signal.SIGINT and now - self._asked_at > IMPATIENT_AFTER_S:
            raise KeyboardInterrupt


def _say_saving(number: signal.Signals) -> None:
    text = (
        f"{number.name}: saving the run, then it leaves; SIGKILL (`kill -9 {os.getpid()}`) abandons what is not saved"
    )
    with suppress(OSError):  # not by `sys.stderr`: the main thread may be in the middle of writing there
        os.write(2, f"\n{text}\n".encode())


def stop_reason(link: Link) -> str:
    """Return why the ranks stop: asked to, or because a launcher was killed and cannot look after them any more."""
    hosts = link.gather_objects(socket.gethostname() if is_orphan() else None)
    names = ", ".join(dict.fromkeys(host for host in hosts if host is not None))
    return f"the launcher on {names} is gone" if names else "asked to stop"
