"""The callback of a sweep's trial: tells the study every score, and ends a run that is not worth going on with."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from paceline.core.run_folder import METRICS, read_progress
from paceline.observe.callback import Callback, Record, RunInfo

Report = Callable[[float, int], bool]
"""Takes the score of a validation and its number; returns True if the trial should end."""


def monitored(metrics: Mapping[str, Any], monitor: str | None, task_monitor: str) -> str | None:
    """Return the name of the metric that trials are compared by, None if it is not there."""
    names = [monitor] if monitor else [name for name in metrics if name.endswith(f"/{task_monitor}")]
    return names[0] if names and names[0] in metrics else None


def score_of(metrics: Mapping[str, Any], monitor: str | None, task_monitor: str) -> float | None:
    """Return the monitored score of a validation: that of `monitor`, else the task's metric of the first set."""
    name = monitored(metrics, monitor, task_monitor)
    value = None if name is None else metrics[name]
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


class Pruning(Callback):
    """Reports each validation, and asks the run to stop where the study says so: it is saved, and may go on later."""

    def __init__(self, report: Report, monitor: str | None, task_monitor: str) -> None:
        self._report, self._monitor, self._task_monitor = report, monitor, task_monitor
        self._number = 0
        self.is_pruned = False
        self.num_scores = 0
        """Validations that had a score."""

    def has_monitored(self, metrics: Mapping[str, Any]) -> bool:
        """Return True if the metric that trials are compared by is among these, whatever it is."""
        return monitored(metrics, self._monitor, self._task_monitor) is not None

    def start(self, info: RunInfo) -> None:
        self._stop = info.stop
        if info.folder is not None and info.next_step:  # a resumed trial goes on counting
            before = read_progress(info.folder / METRICS).validations
            self._number = sum(record.get("step", 0) < info.next_step for record in before)

    def validation(self, record: Record) -> None:
        number, self._number = self._number, self._number + 1
        score = score_of(record, self._monitor, self._task_monitor)
        if score is None or self.is_pruned:
            return
        self.num_scores += 1
        if self._report(score, number):
            self.is_pruned = True
            self._stop()
