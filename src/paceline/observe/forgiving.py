"""A logger whose failures do not end a run: a server that is gone, a token that has run out, a name it does not like.

`metrics.jsonl` has every number in any case. What a logger could not take is kept and handed over again, later and
later, so that one that waits long for its server does not slow the run down.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from paceline.core.errors import Failed, PacelineError, first_line
from paceline.core.units import counted
from paceline.observe.callback import Callback, Record, RunInfo

FIRST_PAUSE_S, LONGEST_PAUSE_S = 30.0, 600.0
MOST_KEPT = 10_000
"""Records that are kept for a logger that fails."""


class Forgiving(Callback):
    """Callback that hands everything on to a logger, and survives it."""

    def __init__(
        self,
        logger: Callback,
        name: str,
        say: Callable[[str], None],
        advice: str = "",
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`advice` is what to do where the logger does not start."""
        self._logger, self._name, self._say, self._advice, self._now = logger, name, say, advice, now
        self._is_started = False
        self._waiting: list[tuple[str, Any]] = []
        self._num_lost = 0
        self._pause_s, self._next_s = FIRST_PAUSE_S, 0.0

    def start(self, info: RunInfo) -> None:
        """Start the logger. A new run ends here if it cannot: nothing is lost yet. One that is resumed goes on."""
        try:
            self._logger.start(info)
            self._is_started = True
        except PacelineError:
            raise
        except Exception as error:
            without = f"take {self._name} out of `loggers`"
            if info.next_step == 0:
                advice = f"{self._advice}, or {without}" if self._advice else without
                raise Failed(f"the logger {self._name} did not start: {first_line(error)}", hint=advice) from error
            self._say(f"the logger {self._name} did not start: {first_line(error)}; the run goes on without it")

    def step(self, records: list[Record]) -> None:
        self._hand_on("step", records)

    def progress(self, record: Record) -> None:
        self._hand_on("progress", record)

    def epoch(self, record: Record) -> None:
        self._hand_on("epoch", record)

    def validation(self, record: Record) -> None:
        self._hand_on("validation", record)

    def ranks(self, record: Record) -> None:
        self._hand_on("ranks", record)

    def end(self, status: str) -> None:
        if not self._is_started:
            return
        self._send()
        lost = self._num_lost + len(self._waiting)
        if lost:
            self._say(f"the logger {self._name} did not get {counted(lost, 'record')}; metrics.jsonl has them all")
        try:
            self._logger.end(status)
        except Exception as error:
            self._say(f"the logger {self._name} could not end: {first_line(error)}")

    def _hand_on(self, kind: str, record: Any) -> None:
        if not self._is_started:
            return
        self._waiting.append((kind, record))
        if self._now() >= self._next_s:
            self._send()
        if len(self._waiting) > MOST_KEPT:
            self._num_lost += 1
            del self._waiting[0]

    def _send(self) -> None:
        """Hand over what is waiting, in its order, until the logger fails."""
        try:
            while self._waiting:
                kind, record = self._waiting[0]
                getattr(self._logger, kind)(record)
                del self._waiting[0]
        except Exception as error:
            if self._pause_s == FIRST_PAUSE_S:
                self._say(f"the logger {self._name} failed: {first_line(error)}; the run goes on, it is tried again")
            self._next_s = self._now() + self._pause_s
            self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
            return
        self._pause_s, self._next_s = FIRST_PAUSE_S, 0.0
