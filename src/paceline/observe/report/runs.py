"""A run as the report reads it from its folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.core.errors import PacelineError, Unreadable
from paceline.core.language import translate
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
from paceline.observe.records import EpochRecord, ProgressRecord, RanksRecord, StepRecord, ValidationRecord
from paceline.observe.report.section import RecipeReport


class NoRun(PacelineError):
    """A folder that holds no run."""

    folder: Path
    sentence = "{what}"
    hint = f"give the folder with {RECORD} in it; `paceline runs` lists runs"

    @property
    def what(self) -> str:
        if not self.folder.exists():
            return f"there is no folder {self.folder}"
        text = "{folder} holds no run" if self.folder.is_dir() else "{folder} is a file, not a run"
        return text.format(folder=self.folder)


class EmptyRun(PacelineError):
    """A run without a step in its journal: there is nothing to show."""

    folder: Path
    status: str
    sentence = "{what} (status: {status})"
    hint = "{advice}"

    @property
    def is_over(self) -> bool:
        return self.status not in ("failed", DIED, RUNNING) and not self.status.startswith(UNSEEN)

    @property
    def what(self) -> str:
        if not self.is_over:
            return f"{self.folder} has no steps yet"
        metrics = self.folder / METRICS
        none, gone = "{file} holds no steps, and the run is over", "{file} is missing, and the run is over"
        return (none if metrics.exists() else gone).format(file=metrics)

    @property
    def advice(self) -> str:
        if self.is_over:
            return f"bring back the {METRICS} that the run wrote, or leave this run out"
        if self.status in ("failed", DIED):
            why = "it {status} before its first steps were written: `logs/` and what it printed say why"
            return why.format(status=self.status)
        return "wait for its first steps, which are written every `log_every` steps"


STANDINGS = {
    "finished": "finished",
    "early": "finished early: patience ran out",
    "stopped": "stopped by a signal: `--resume auto` goes on",
    "diverged": "diverged: its loss exploded, or its weights or gradients were not finite",
    "failed": "failed",
    RUNNING: "not finished: still running",
    DIED: "died without a word (killed, or for want of memory): `--resume auto` goes on",
}
"""Statuses of runs in words."""


@dataclass(frozen=True)
class ReportedRun:
    """One run: its settings, its journal, its timelines, and the recipes that know words for them."""

    folder: Path
    name: str
    """Short, and another than those of the runs beside it."""
    task: str
    status: str
    grains: int
    settings: dict[str, Any]
    starts: list[dict[str, Any]]
    steps: list[StepRecord]
    epochs: list[EpochRecord]
    validations: list[ValidationRecord]
    looks: list[ProgressRecord] = field(default_factory=list)
    """Looks at the speed, where the run's version recorded them."""
    ranks: list[RanksRecord] = field(default_factory=list)
    """Changes of its ranks, where survivors go on."""
    timelines: list[Path] = field(default_factory=list)
    num_unread: int = 0
    """Lines of its journal that are no records."""
    recipes: Sequence[RecipeReport] = ()

    @property
    def metrics(self) -> list[str]:
        """Names of all metrics, as `set/metric`, in the order in which they came."""
        return list(dict.fromkeys(name for record in self.validations for name in record.metrics if "/" in name))

    @property
    def monitor(self) -> str | None:
        """The metric that tells which weights are best: as set, else the first goal of a recipe or loss."""
        chosen = self.settings.get("monitor")
        if chosen is not None:
            return str(chosen)
        goals = [*(goal for recipe in self.recipes for goal in recipe.goals), "loss"]
        return next((name for goal in goals for name in self.metrics if name.endswith(f"/{goal}")), None)

    def is_percent(self, metric: str) -> bool:
        """Return True if `set/metric` is shown in percent."""
        return any(metric.rpartition("/")[2] in recipe.percent for recipe in self.recipes)

    @property
    def is_higher_better(self) -> bool:
        return bool(self.settings.get("monitor_mode") == "max")

    @property
    def num_steps(self) -> int:
        return self.steps[-1].step + 1

    @property
    def stage_ends(self) -> list[tuple[str, int]]:
        """Stages, where there are several, each with the number of steps at its end; the last one may go on."""
        ends = {epoch.stage: epoch.step + 1 for epoch in self.epochs if epoch.stage is not None}
        return list(ends.items())

    @property
    def num_ranks(self) -> int | None:
        """Number of ranks in the last epoch that ended; None where it is not known."""
        return (len(self.epochs[-1].seconds) or None) if self.epochs else None

    @property
    def standing(self) -> str:
        """Its status, in words."""
        unknown = translate("not finished: {status}, which cannot be told from here")
        known = STANDINGS.get(self.status)
        return unknown.format(status=self.status) if known is None else translate(known)


def read_runs(folders: Sequence[Path], recipes: Sequence[RecipeReport] = ()) -> list[ReportedRun]:
    """Read the runs in these folders, each with a name of its own."""
    names = short_names([folder.resolve() for folder in folders])
    return [read_run(folder, name, recipes) for folder, name in zip(folders, names, strict=True)]


def read_run(folder: Path, name: str | None = None, recipes: Sequence[RecipeReport] = ()) -> ReportedRun:
    """Read a run from its folder; a line that a crash has cut short is left out."""
    if not RunFolder(folder).is_run:
        raise NoRun(folder)
    try:
        record = read_record(folder)
        record.require("task", "status")
    except (BrokenRecord, OSError) as error:
        why = error.cause if isinstance(error, BrokenRecord) else error
        raise Unreadable(f"{folder / RECORD} is broken: {why}", hint="leave this run out") from error
    status = status_now(folder, str(record.status))
    journal = read_journal(folder / METRICS)
    if not journal.steps:
        raise EmptyRun(folder, status)
    return ReportedRun(
        folder=folder,
        name=name or folder.resolve().name,
        task=str(record.task).rpartition("/")[2],
        status=status,
        grains=1 if record.grains is None else int(record.grains),
        settings=record.settings,
        starts=record.starts,
        steps=[StepRecord.from_json(line) for line in journal.steps],
        epochs=[EpochRecord.from_json(line) for line in journal.epochs],
        validations=[ValidationRecord.from_json(line) for line in journal.validations],
        looks=[ProgressRecord.from_json(line) for line in journal.progress],
        ranks=[change for line in journal.ranks if (change := RanksRecord.from_json(line)) is not None],
        timelines=sorted((folder / TIMELINES).glob("*.json.gz")),
        num_unread=journal.num_unread,
        recipes=recipes,
    )


def short_names(folders: Sequence[Path]) -> list[str]:
    """Return as few of each path's last parts as make all names different."""
    for depth in range(1, max(len(folder.parts) for folder in folders) + 1):
        names = ["/".join(folder.parts[-depth:]) for folder in folders]
        if len(set(names)) == len(names):
            return names
    return [f"{folder.name} ({number})" for number, folder in enumerate(folders, 1)]  # one run, given twice
