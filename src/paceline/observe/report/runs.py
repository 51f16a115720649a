"""A run as its files tell it: what it was, what it wrote down, and how far it came."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.core.errors import PacelineError
from paceline.core.run_folder import (
    DIED,
    METRICS,
    RECORD,
    RUNNING,
    TIMELINES,
    UNSEEN,
    BrokenRecord,
    RunFolder,
    read_journal,
    read_record,
    status_now,
)
from paceline.observe.callback import Record

CONTINUAL = "continual.json"


class NoRun(PacelineError):
    """A folder that holds no run."""

    hint = f"give the folder with {RECORD} in it; `paceline runs` lists runs"

    def __init__(self, folder: Path) -> None:
        why = "holds no run" if folder.is_dir() else "is a file, not a run" if folder.exists() else None
        super().__init__(f"there is no folder {folder}" if why is None else f"{folder} {why}")
        self.folder = folder


class BrokenRun(PacelineError):
    """A run whose own description cannot be read."""

    def __init__(self, folder: Path, why: str) -> None:
        super().__init__(f"{folder / RECORD} is broken: {why}")
        self.folder = folder
        self.hint = "leave this run out"


class EmptyRun(PacelineError):
    """A run of which no step is written down: there is nothing to show."""

    def __init__(self, folder: Path, status: str) -> None:
        metrics = folder / METRICS
        is_begun = status in ("failed", DIED, RUNNING) or status.startswith(UNSEEN)
        if is_begun:
            super().__init__(f"{folder} has no steps yet (status: {status})")
        else:
            lost = "holds no steps" if metrics.exists() else "is missing"
            super().__init__(f"{metrics} {lost}, and the run is over (status: {status})")
        self.folder = folder
        if not is_begun:
            self.hint = f"bring back the {METRICS} that the run wrote, or leave this run out"
        elif status in ("failed", DIED):
            self.hint = f"it {status} before its first steps were written: `logs/` and what it printed say why"
        else:
            self.hint = "wait for its first steps, which are written every `log_every` steps"


@dataclass(frozen=True)
class RunRecord:
    """All that is known of one run."""

    folder: Path
    name: str
    """Short, and another than those of the runs beside it."""
    task: str
    status: str
    grains: int
    settings: dict[str, Any]
    starts: list[dict[str, Any]]
    steps: list[Record]
    epochs: list[Record]
    validations: list[Record]
    continual: dict[str, Any] | None = None
    """Matrices and numbers of a continual-learning run."""
    timelines: list[Path] = field(default_factory=list)
    num_unread: int = 0
    """Lines of its journal that are none of a journal."""

    @property
    def metrics(self) -> list[str]:
        """Names of all metrics, as `set/metric`, in the order in which they came."""
        return list(dict.fromkeys(name for record in self.validations for name in record if "/" in name))

    @property
    def monitor(self) -> str | None:
        """The metric that says which weights are best: as set, else the first word error rate or loss."""
        chosen = self.settings.get("monitor")
        if chosen is not None:
            return str(chosen)
        usual = [name for of in ("/wer", "/loss") for name in self.metrics if name.endswith(of)]
        return usual[0] if usual else None

    @property
    def is_higher_better(self) -> bool:
        return bool(self.settings.get("monitor_mode") == "max")

    @property
    def num_steps(self) -> int:
        return int(self.steps[-1]["step"]) + 1

    @property
    def num_ranks(self) -> int | None:
        """Of the last epoch that ended."""
        return len(self.epochs[-1]["seconds"]) if self.epochs and self.epochs[-1].get("seconds") else None

    @property
    def standing(self) -> str:
        """Its status, in words."""
        return {
            "finished": "finished",
            "early": "finished early: patience ran out",
            "stopped": "stopped by a signal: `--resume auto` goes on",
            "failed": "failed",
            RUNNING: "not finished: still running",
            DIED: "died without a word (killed, or for want of memory): `--resume auto` goes on",
        }.get(self.status, f"not finished: {self.status}, which cannot be told from here")


def read_runs(folders: Sequence[Path]) -> list[RunRecord]:
    """The runs in these folders, each named so that it can be told from the others."""
    names = short_names([folder.resolve() for folder in folders])
    return [read_run(folder, name) for folder, name in zip(folders, names, strict=True)]


def read_run(folder: Path, name: str | None = None) -> RunRecord:
    """A run from its folder; lines that a crash has cut short are left out."""
    if not RunFolder(folder).is_run:
        raise NoRun(folder)
    try:
        record = read_record(folder)
        record.require("task", "status")
    except BrokenRecord as error:
        raise BrokenRun(folder, error.cause) from error
    except OSError as error:
        raise BrokenRun(folder, str(error)) from error
    status = status_now(folder, str(record.status))
    journal = read_journal(folder / METRICS)
    if not journal.steps:
        raise EmptyRun(folder, status)
    return RunRecord(
        folder=folder,
        name=name or folder.resolve().name,
        task=str(record.task).rpartition("/")[2],
        status=status,
        grains=1 if record.grains is None else int(record.grains),
        settings=record.settings,
        starts=record.starts,
        steps=journal.steps,
        epochs=journal.epochs,
        validations=journal.validations,
        continual=_read_continual(folder / CONTINUAL),
        timelines=sorted((folder / TIMELINES).glob("*.json.gz")),
        num_unread=journal.num_unread,
    )


def short_names(folders: Sequence[Path]) -> list[str]:
    """As few of each path's last parts as tell them all apart."""
    for depth in range(1, max(len(folder.parts) for folder in folders) + 1):
        names = ["/".join(folder.parts[-depth:]) for folder in folders]
        if len(set(names)) == len(names):
            return names
    return [f"{folder.name} ({number})" for number, folder in enumerate(folders, 1)]  # one run, given twice


def _read_continual(path: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None
