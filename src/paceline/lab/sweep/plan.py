"""Plan of a sweep: its task, what it searches, where it lives; and the file by which it is found again."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from paceline.core.disk import replacing
from paceline.core.errors import AlreadyExists, Busy, Conflict
from paceline.core.secrets import masked_values
from paceline.core.units import counted
from paceline.lab.sweep.outcome import SweepResult, TrialEnd, joined, read_json
from paceline.lab.sweep.space import Space
from paceline.lab.sweep.study import PrunerName, SamplerName, Study

RECORD, TRIALS = "sweep.json", "trials"
WITHOUT = ("out", "resume", "exp_name", "runs_dir", "allow_change")
"""Settings of the sweep, not of its trials."""
_MAY_CHANGE = ("threads", "workers", "progress", "loggers", "device")
"""Settings of trials that do not change what they come to."""


@dataclass(frozen=True)
class Plan:
    """A sweep."""

    folder: Path
    task: str
    """As `paceline train` takes it; the class's name where only this process has it."""
    space: Space
    settings: Mapping[str, Any]
    """Settings that all trials share, as JSON has them."""
    trials: int
    mode: Literal["min", "max"]
    monitor: str | None
    task_monitor: str
    jobs: int = 1
    procs: int = 1
    pruner: PrunerName = "median"
    sampler: SamplerName = "tpe"
    seed: int = 0

    @property
    def monitor_name(self) -> str:
        return self.monitor or self.task_monitor

    def run_folder(self, number: int) -> Path:
        return self.folder / TRIALS / f"{number:04d}"

    def file(self, number: int, kind: Literal["spec", "end", "output"]) -> Path:
        """Return a file beside the run of a trial."""
        return self.folder / TRIALS / f"{number:04d}.{kind}.{'txt' if kind == 'output' else 'json'}"

    def record(self) -> dict[str, Any]:
        """Return what must be the same when the sweep is resumed."""
        return {
            "task": self.task,
            "search": {name: str(dimension) for name, dimension in self.space.items()},
            "settings": masked_values({key: self.settings[key] for key in self.settings if key not in _MAY_CHANGE}),
            "pruner": self.pruner,
            "sampler": self.sampler,
        }

    def trial_settings(self, number: int, params: Mapping[str, Any]) -> dict[str, Any]:
        """Return all settings of a trial's run."""
        return {**self.settings, **params, "out": str(self.run_folder(number)), "resume": "auto"}


@contextmanager
def only_sweep(folder: Path) -> Iterator[None]:
    """Keep other processes from sweeping in a folder: each would take the other's running trials for its own."""
    folder.mkdir(parents=True, exist_ok=True)
    number = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Busy(
                f"a sweep is under way in {folder} already",
                hint="wait until it has ended, or choose another `--out`; `--jobs N` tries several at once",
            ) from None
        except OSError:  # a file system without locks
            pass
        yield
    finally:
        with suppress(OSError):
            fcntl.flock(number, fcntl.LOCK_UN)  # a process that was forked meanwhile has it open, too
        os.close(number)


def open_folder(plan: Plan, *, may_resume: bool) -> None:
    """Make the folder of a sweep, or check that it is the one that is resumed."""
    file = plan.folder / RECORD
    before = read_json(file)
    if before is None:
        if plan.folder.exists() and any(plan.folder.iterdir()):
            raise AlreadyExists(
                f"{plan.folder} has files, and is not a sweep", hint="choose another `--out`, or an empty folder"
            )
        (plan.folder / TRIALS).mkdir(parents=True, exist_ok=True)
        with replacing(file) as out:
            json.dump(plan.record(), out, indent=1)
        return
    if not may_resume:
        raise AlreadyExists(
            f"{plan.folder} holds a sweep already", hint="add `--resume auto` to continue it, or choose another `--out`"
        )
    changes = _changes(before, json.loads(json.dumps(plan.record())))
    if changes:
        raise Conflict(
            f"{plan.folder} was begun with another search or other settings: {'; '.join(changes)}",
            hint="type the same ones to continue it, or choose another `--out`",
        )


def _changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    lines = []
    for part, value in now.items():
        old = before.get(part)
        if isinstance(value, dict) and isinstance(old, dict):
            names = [name for name in {**old, **value} if old.get(name) != value.get(name)]
            lines += [f"{name} was {old.get(name, 'not set')}, is {value.get(name, 'not set')}" for name in names]
        elif old != value:
            lines.append(f"{part} was {old}, is {value}")
    return lines


def check_room(jobs: int, procs: int, *, cores: int, gpus: int) -> None:
    """Refuse more trials at once than there is room for; `gpus` is 0 where trials compute on the CPU."""
    if jobs > 1 and jobs * procs > (gpus or cores):
        available, kind = gpus or cores, "GPUs" if gpus else "cores"
        raise Conflict(
            f"{counted(jobs, 'trial')} at once with {counted(procs, 'rank')} each need {jobs * procs} {kind}, and "
            f"there are {available}",
            hint=f"set `--jobs {max(1, available // procs)}`, or fewer `--procs`",
        )


def result_of(plan: Plan, study: Study) -> SweepResult:
    """Return all trials so far."""
    trials = [
        joined(each, TrialEnd.read(plan.file(each.number, "end")), plan.run_folder(each.number))
        for each in study.trials()
    ]
    return SweepResult(plan.folder, tuple(trials), plan.mode, plan.monitor_name)


def headline(plan: Plan) -> str:
    searched = ", ".join(f"{name} {dimension}" for name, dimension in plan.space.items())
    return f"sweep of {plan.task} in {plan.folder}: {counted(plan.trials, 'trial')} over {searched}\n"
