"""Two settings side by side: both trials stay alive and take turns, part by part, on the same machine at the same time.

What else the machine does then hits both alike, so that a few seconds tell more than trials one after the other.
The word to go on and the answer are files in the trial's folder.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from subprocess import Popen

from paceline.core.disk import replacing
from paceline.train.tune.process import POLL_S, Spec, started

ENOUGH = "enough"
READY = "ready-0"
"""The trial has warmed up and waits for its first part."""


class FilePace:
    """In a trial: waits for the word of the race. Ends with the process that started it."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._parent = folder, os.getppid()

    def may_go(self, number: int) -> bool:
        (self._folder / f"ready-{number}").touch()
        while not (self._folder / f"go-{number}").exists():
            if (self._folder / ENOUGH).exists() or os.getppid() != self._parent:
                return False
            time.sleep(POLL_S / 10)
        return True

    def passed(self, number: int, samples_per_s: float) -> None:
        with replacing(self._folder / f"part-{number}") as file:
            json.dump(samples_per_s, file)


def race(
    command: Sequence[str],
    entries: Sequence[tuple[Path, Spec]],
    rounds: int,
    limit_s: float,
    tick: Callable[[], None],
    is_decided: Callable[[Sequence[tuple[float, float]]], bool] = lambda found: False,
) -> list[tuple[float, float]]:
    """Samples per second of both, round by round, until it is decided; fewer where time is over or one of them died."""
    deadline = time.monotonic() + limit_s
    found: list[tuple[float, float]] = []
    with ExitStack() as stack:
        runners: list[tuple[Popen[bytes], Path]] = []
        try:
            for folder, spec in entries:
                runners.append((stack.enter_context(started(command, folder, spec)), folder))
                # One after the other: warming up beside another would be slow.
                if not _wait(*runners[-1], READY, deadline, tick):
                    return []
            for number in range(rounds):
                rates = [0.0, 0.0]
                for index in (0, 1) if number % 2 == 0 else (1, 0):
                    process, folder = runners[index]
                    (folder / f"go-{number}").touch()
                    if not _wait(process, folder, f"part-{number}", deadline, tick):
                        return found
                    rates[index] = float(json.loads((folder / f"part-{number}").read_text(encoding="utf-8")))
                found.append((rates[0], rates[1]))
                if is_decided(found):
                    break
        finally:
            # Also when it is interrupted: one that waits for its turn hears nothing else, and would have to be killed.
            for _, folder in runners:
                (folder / ENOUGH).touch()
    return found


def _wait(process: Popen[bytes], folder: Path, name: str, deadline: float, tick: Callable[[], None]) -> bool:
    while not (folder / name).exists():
        if process.poll() is not None or time.monotonic() > deadline:
            return False
        tick()
        time.sleep(POLL_S / 10)
    return True
