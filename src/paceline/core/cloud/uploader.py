"""Sends the copy of a run in a thread, so that training never waits for a network."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from paceline.core.cloud.run_copy import RunCopy, RunTakenOver
from paceline.core.cloud.store import StoreFailed, without_secrets
from paceline.core.errors import PacelineError, first_line
from paceline.core.run_folder import RunListener

_LAST_PAUSES_S = (1.0, 3.0)
"""Pauses between the last attempts, when a run is over and nothing else can be done."""


class Uploader(RunListener):
    """Sends what is new in a copy whenever it is asked to; one pass at a time, and what fails is left to the next."""

    def __init__(self, copy: RunCopy, say: Callable[[str], None], sleep: Callable[[float], None] | None = None) -> None:
        self._copy, self._say, self._sleep = copy, say, sleep or time.sleep
        self._is_wanted, self._ends = threading.Event(), False
        self._has_failed = self._is_taken_over = False
        self._thread: threading.Thread | None = None

    @contextmanager
    def starting(self) -> Iterator[None]:
        """Keep other starts out while the caller writes the record, and send it: a store that cannot be written to ends
        a start, but not a run."""
        with self._copy.starting():
            yield
            self._copy.send_record()

    def on_written(self) -> None:
        """Have everything sent that is in the copy now; returns at once. Any thread may call it."""
        self._is_wanted.set()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="upload", daemon=True)
            self._thread.start()

    def close(self, *, is_patient: bool = True) -> bool:
        """Send everything, now; return True if the store has all of it."""
        self.abandon()
        if self._thread is not None:
            self._thread.join()
        self._ends = False
        for pause_s in _LAST_PAUSES_S if is_patient else ():
            if self._send() or self._is_taken_over:
                return not self._is_taken_over
            self._sleep(pause_s)
        return self._send()

    def abandon(self) -> None:
        """Stop after the checkpoint that is being sent; the next pass, of whoever goes on, sends the rest."""
        self._ends = True
        self._is_wanted.set()

    def _run(self) -> None:
        while True:
            self._is_wanted.wait()
            self._is_wanted.clear()
            if self._ends:
                return
            self._send()

    def _send(self) -> bool:
        copy = self._copy
        if self._is_taken_over:
            return False
        try:
            copy.send(lambda: not self._ends)
        except RunTakenOver as error:
            self._is_taken_over = True
            self._say(f"{error}; {error.hint}")
            return False
        except Exception as error:  # a thread that dies would say nothing
            why = error.reason if isinstance(error, StoreFailed) else without_secrets(first_line(error), os.environ)
            if not self._has_failed or not isinstance(error, PacelineError):
                self._say(
                    f"{copy.address} could not be brought up to date ({why}): the run goes on, everything is in "
                    f"{copy.folder}, and the next save tries again"
                )
            self._has_failed = True
            return False
        if self._has_failed:
            self._say(f"{copy.address} is up to date again")
        self._has_failed = False
        return True
