"""One trial of a sweep: its run, and `python -m paceline.lab.sweep.trial FILE`, its process (or launcher of ranks)."""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from paceline.core.errors import PacelineError, first_line
from paceline.core.language import ENGLISH, speaking
from paceline.core.run_folder import METRICS, read_progress
from paceline.lab.sweep.study import Report, Study, TrialEnd
from paceline.observe.callback import Callback, Record, RunInfo
from paceline.train.find_task import load_task
from paceline.train.fit import fit
from paceline.train.task import Task
from paceline.world.discover.environment import World, discover
from paceline.world.failure.together import fail_together
from paceline.world.launch.launcher import launch
from paceline.world.parent_process import end_with_parent
from paceline.world.signals import process_ends_with_run


class Pruning(Callback):
    """Callback that reports each validation, and asks the run to stop and save where the study ends the trial."""

    def __init__(self, report: Report, monitor: str | None, task_monitor: str) -> None:
        self._report, self._monitor, self._task_monitor = report, monitor, task_monitor
        self._number = 0
        self.is_pruned = False

    def monitored(self, metrics: Mapping[str, Any]) -> str | None:
        """Return the name of the score: `monitor`, else the task's metric on the first set; None without it."""
        names = (
            [self._monitor] if self._monitor else [name for name in metrics if name.endswith(f"/{self._task_monitor}")]
        )
        return names[0] if names and names[0] in metrics else None

    def start(self, info: RunInfo) -> None:
        self._stop = info.stop
        if info.folder is not None and info.next_step:  # a resumed trial continues to count
            before = read_progress(info.folder / METRICS).validations
            self._number = sum(record.get("step", 0) < info.next_step for record in before)

    def validation(self, record: Record) -> None:
        number, self._number = self._number, self._number + 1
        name = self.monitored(record)
        score = None if name is None else record[name]
        if not isinstance(score, int | float) or not math.isfinite(score) or self.is_pruned:
            return
        if self._report(float(score), number):
            self.is_pruned = True
            self._stop()


def train_trial(make: Callable[[], Task[Any]], settings: Mapping[str, Any], report: Report) -> TrialEnd:
    """Train one trial, and return how it ended; an error in it does not end the sweep."""
    began = time.monotonic()
    try:
        task = make()
        config = task.Settings(**settings)
        pruning = Pruning(report, config.monitor, task.monitor)
        result = fit(task, config, watchers=[pruning])
    except PacelineError as error:
        with speaking(ENGLISH):
            return TrialEnd("failed", seconds=time.monotonic() - began, why=str(error))
    except Exception as error:  # values that do not fit the model or the memory, or a bug of the task's
        traceback.print_exc()
        return TrialEnd("failed", seconds=time.monotonic() - began, why=first_line(error))
    steps, seconds = result.num_steps, time.monotonic() - began
    if result.status == "stopped":
        return TrialEnd("pruned" if pruning.is_pruned else "stopped", None, steps, seconds)
    if result.status == "diverged":
        return TrialEnd("failed", None, steps, seconds, "the loss diverged")
    if result.best_score is not None:
        return TrialEnd("finished", result.best_score, steps, seconds)
    why = f"no validation gave a score to compare: set `--monitor` to one of {', '.join(result.metrics) or 'none'}"
    if pruning.monitored(result.metrics) is not None:
        why = "its score was never a finite number"
    return TrialEnd("failed", None, steps, seconds, why)


def main(file: Path) -> int:
    spec, world = json.loads(file.read_text(encoding="utf-8")), discover(os.environ)
    end_with_parent(signal.SIGTERM)
    process_ends_with_run()
    if world.launcher == "plain" and spec["procs"] > 1:
        command = [sys.executable, "-m", "paceline.lab.sweep.trial", str(file)]
        return launch(spec["procs"], command, device=spec["settings"].get("device", "auto"))
    return fail_together(world, lambda: _train(world, spec))


def _train(world: World, spec: Mapping[str, Any]) -> int:
    make = partial(load_task, spec["task"])
    if world.rank > 0:  # only the first rank has callbacks
        return 1 if train_trial(make, spec["settings"], lambda score, number: False).status == "failed" else 0
    study = Study(Path(spec["folder"]), spec["pruner"])
    end = train_trial(make, spec["settings"], study.report_of(spec["number"]))
    study.note(spec["number"], end)
    return 1 if end.status == "failed" else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
