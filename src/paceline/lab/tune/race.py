"""The race of `paceline tune`: trials in processes that stay alive and take turns, part by part, on the same machine.

A few seconds of that tell more than trials one after the other (see speed/autotune/race.py). The signal to go on and
the answer are files in the trial's folder.
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
from paceline.lab.tune.process import POLL_S, Spec, started
from paceline.speed.autotune.race import race

ENOUGH = "enough"
READY = "ready-0"
"""The trial has warmed up and waits for its first part."""


class FilePace:
    """The trial's end: waits for its turn. Ends with the process that started it."""

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


def run_race(
    command: Sequence[str],
    entries: Sequence[tuple[Path, Spec]],
    limit_s: float,
    tick: Callable[[], None],
    is_over: Callable[[Sequence[tuple[float, ...]]], bool],
) -> Sequence[tuple[float, ...]]:
    """Race trials in processes of their own, each alive all the time; return their samples per second, by round.

    There are fewer rounds where time is over or one of the processes has died.
    """
    deadline = time.monotonic() + limit_s
    with ExitStack() as stack:
        trials: list[_PacedTrial] = []
        try:
            for folder, spec in entries:
                process = stack.enter_context(started(command, folder, spec))
                trials.append(_PacedTrial(process, folder, deadline, tick))
                # One after the other: warming up beside another would be slow.
                if not trials[-1].wait_for(READY):
                    return []
            return race([trial.run for trial in trials], is_over)
        finally:
            # Also when it is interrupted: one that waits for its turn hears nothing else, and would have to be killed.
            for trial in trials:
                trial.end()


class _PacedTrial:
    """The parent's end of a trial that waits for its turn before each part."""

    def __init__(self, process: Popen[bytes], folder: Path, deadline: float, tick: Callable[[], None]) -> None:
        self._process, self._folder, self._deadline, self._tick = process, folder, deadline, tick

    def run(self, number: int) -> float | None:
        """Return the samples per second of one part; None if the process has ended or time is over."""
        (self._folder / f"go-{number}").touch()
        if not self.wait_for(f"part-{number}"):
            return None
        return float(json.loads((self._folder / f"part-{number}").read_text(encoding="utf-8")))

    def end(self) -> None:
        (self._folder / ENOUGH).touch()

    def wait_for(self, name: str) -> bool:
        """Return True once a file of that name is there."""
        while not (self._folder / name).exists():
            if self._process.poll() is not None or time.monotonic() > self._deadline:
                return False
            self._tick()
            time.sleep(POLL_S / 10)
        return True
