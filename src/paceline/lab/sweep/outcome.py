"""Outcome of a sweep: its trials, the best one, and their table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from paceline.lab.sweep.space import Value

Status = Literal["running", "finished", "pruned", "failed"]


@dataclass(frozen=True)
class SweepTrial:
    """One trial of a sweep."""

    number: int
    settings: Mapping[str, Value]
    """Values of the searched settings."""
    status: Status
    """`finished`, `pruned` (ended early, as others were better at that point), `failed`, or `running`."""
    score: float | None
    """Best score of a finished trial, see `monitor`; the last score of another one."""
    folder: Path
    """Folder of its run."""
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


def rows(result: SweepResult) -> tuple[list[str], list[list[str]]]:
    """Return titles and rows of the table, the best trial first."""
    names = list(dict.fromkeys(name for trial in result.trials for name in trial.settings))
    sign = 1.0 if result.mode == "min" else -1.0
    order = {"finished": 0, "pruned": 1, "running": 2, "failed": 3}

    def rank(trial: SweepTrial) -> tuple[int, float, int]:
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
        for trial in sorted(result.trials, key=rank)
    ]
    return ["trial", "status", result.monitor, *names, "steps", "seconds"], table


def shown(value: Value) -> str:
    return "none" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)


def text_table(titles: Sequence[str], table: Sequence[Sequence[str]]) -> list[str]:
    """Return the table as lines, columns below their titles."""
    widths = [max(map(len, column)) for column in zip(titles, *table, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)) for row in [titles, *table]]
    return [f"  {line}".rstrip() for line in lines]
