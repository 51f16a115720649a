"""Outcome of a sweep: files of its trials, the table, the best one."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from paceline.core.disk import replacing
from paceline.lab.sweep.space import Value
from paceline.lab.sweep.study import Status, StudyTrial


@dataclass(frozen=True)
class TrialEnd:
    """End of a trial's run, as its process writes it down."""

    status: Literal["finished", "pruned", "failed", "stopped"]
    score: float | None = None
    num_steps: int = 0
    seconds: float = 0.0
    why: str = ""
    """Reason of a failure."""

    def write(self, path: Path) -> None:
        with replacing(path) as file:
            json.dump(asdict(self), file)

    @classmethod
    def read(cls, path: Path) -> TrialEnd | None:
        """Return None where nothing was written: the process was killed, or has not ended."""
        try:
            return cls(**json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return None


@dataclass(frozen=True)
class SweepTrial:
    """One trial of a sweep."""

    number: int
    settings: Mapping[str, Value]
    """Values that it tried."""
    status: Status
    """`finished`, `pruned` (ended early, as others were better at that point), `failed`, or `running`."""
    score: float | None
    """Its best score, see `monitor`; of a pruned one the last."""
    folder: Path
    """Its run."""
    num_steps: int = 0
    seconds: float = 0.0
    why: str = ""
    """Reason of a failure."""
    scores: Mapping[int, float] | None = None
    """Score by the number of the validation."""


@dataclass(frozen=True)
class SweepResult:
    """Outcome of a sweep."""

    folder: Path
    trials: tuple[SweepTrial, ...]
    mode: Literal["min", "max"]
    monitor: str
    report: Path | None = None
    """Page about all trials; None where plotly is not installed."""

    @property
    def best(self) -> SweepTrial | None:
        """The finished trial with the best score."""
        finished = [trial for trial in self.trials if trial.status == "finished" and trial.score is not None]
        sign = 1.0 if self.mode == "min" else -1.0
        return min(finished, key=lambda trial: sign * (trial.score or 0.0), default=None)


def joined(known: StudyTrial, end: TrialEnd | None, folder: Path) -> SweepTrial:
    """Return a trial from what the study and its process say of it."""
    last = known.scores[max(known.scores)] if known.scores else None
    score = known.score if known.status == "finished" else last
    end = end or TrialEnd("stopped")
    return SweepTrial(
        known.number, known.params, known.status, score, folder, end.num_steps, end.seconds, end.why, known.scores
    )


def rows(result: SweepResult) -> tuple[list[str], list[list[str]]]:
    """Return titles and rows of the table, the best trial first."""
    names = list(dict.fromkeys(name for trial in result.trials for name in trial.settings))
    sign = 1.0 if result.mode == "min" else -1.0
    order = {"finished": 0, "pruned": 1, "running": 2, "failed": 3}

    def place(trial: SweepTrial) -> tuple[int, float, int]:
        return order[trial.status], sign * trial.score if trial.score is not None else 0.0, trial.number

    best = result.best
    table = [
        [
            f"{trial.number}{' *' if best is not None and trial.number == best.number else ''}",
            trial.status,
            "-" if trial.score is None else f"{trial.score:.6g}",
            *(shown(trial.settings.get(name)) for name in names),
            str(trial.num_steps) if trial.num_steps else "-",
            f"{trial.seconds:.0f}" if trial.seconds else "-",
        ]
        for trial in sorted(result.trials, key=place)
    ]
    return ["trial", "status", result.monitor, *names, "steps", "seconds"], table


def shown(value: Value) -> str:
    return "none" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)


def text_table(titles: Sequence[str], table: Sequence[Sequence[str]]) -> list[str]:
    """Return the table as lines, columns below their titles."""
    every = [titles, *table]
    widths = [max(len(row[column]) for row in every) for column in range(len(titles))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in every]
    return [f"  {line}".rstrip() for line in lines]


def read_json(path: Path) -> dict[str, Any] | None:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return values if isinstance(values, dict) else None
