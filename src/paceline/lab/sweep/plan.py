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
from paceline.core.json_text import read_json
from paceline.core.secrets import masked_values
from paceline.lab.sweep.space import Space

RECORD, TRIALS = "sweep.json", "trials"
WITHOUT = ("out", "resume", "exp_name", "runs_dir", "allow_change")
"""Settings of the sweep, not of its trials."""
_MAY_CHANGE = ("threads", "workers", "progress", "loggers", "device")
"""Settings of trials that do not change what they come to."""
PrunerName = Literal["median", "hyperband", "none"]
SamplerName = Literal["tpe", "random", "grid"]


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
    monitor: str
    """Metric that trials are compared by."""
    jobs: int
    procs: int
    pruner: PrunerName
    sampler: SamplerName
    seed: int

    def file(self, number: int, kind: Literal["spec.json", "output.txt"]) -> Path:
        """Return a file beside the run of a trial."""
        return self.folder / TRIALS / f"{number:04d}.{kind}"

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
        return {**self.settings, **params, "out": str(run_folder(self.folder, number)), "resume": "auto"}


def run_folder(sweep: Path, number: int) -> Path:
    return sweep / TRIALS / f"{number:04d}"


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
    try:
        before = read_json(file)
    except (OSError, ValueError):
        if any(plan.folder.iterdir()):
            raise AlreadyExists(
                f"{plan.folder} has files, and is not a sweep", hint="choose another `--out`, or an empty folder"
            ) from None
        (plan.folder / TRIALS).mkdir()
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
