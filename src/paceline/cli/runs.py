"""`paceline runs [DIR]`: what was trained, how far it got and how well."""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from paceline.config.load import load
from paceline.config.settings import Section
from paceline.core.errors import PacelineError
from paceline.core.run_folder import METRICS, RECORD, BrokenRecord, read_progress, read_record, status_now

with warnings.catch_warnings():
    # `json` hides a method that pydantic itself has given up; it is the word that users know.
    warnings.filterwarnings("ignore", message='Field name "json"', category=UserWarning)

    class RunsOptions(Section):
        """List the runs in a folder, newest last."""

        folder: Path = Path("runs")
        """Where to look; the folders in it are looked through too."""
        json: bool = False  # type: ignore[assignment]
        """Print JSON instead of a table."""


OPTIONS, POSITIONAL = RunsOptions, ("folder",)


WIDTH = 132
"""Columns that the table needs for usual names."""


class NoSuchFolder(PacelineError):
    """The folder of runs does not exist."""

    folder: Path
    sentence = "there is no folder {folder}"
    hint = (
        "`paceline runs FOLDER` looks elsewhere; runs are made in `runs` unless `--runs-dir` or `--out` say otherwise"
    )


@dataclass(frozen=True)
class RunLine:
    """A run in one line."""

    name: str
    task: str
    status: str
    steps: int
    loss: float | None
    """Loss of the last step."""
    metric: str | None
    """The name of what is monitored."""
    last: float | None
    """The metric at the last validation."""
    best: float | None
    when: str | None
    """Its first start."""


def run(argv: Sequence[str]) -> int:
    options = load(RunsOptions, argv, prog="paceline runs", positional=POSITIONAL)
    if not options.folder.is_dir():
        raise NoSuchFolder(options.folder)
    lines = sorted(
        (read_line(folder, options.folder) for folder in find_runs(options.folder)), key=lambda line: line.when or ""
    )
    if options.json:
        sys.stdout.write(json.dumps([asdict(line) for line in lines], indent=1) + "\n")
    elif lines:
        _show(lines)
    else:
        sys.stdout.write(f"no runs in {options.folder}\n")
    return 0


def find_runs(folder: Path) -> Iterator[Path]:
    """Yield all run folders below; the folders of a run are not searched."""
    for place, below, files in os.walk(folder):
        if RECORD in files:
            below.clear()
            yield Path(place)


def read_line(run: Path, base: Path) -> RunLine:
    """Return the line of a run; a broken one is listed as such."""
    name = str(run.relative_to(base)) if run != base else run.name
    try:
        record = read_record(run)
        record.require("task", "status")
    except (OSError, BrokenRecord):
        return RunLine(name, "?", f"{RECORD} is broken", 0, None, None, None, None, None)
    settings, starts = record.settings, record.starts
    step, validations = read_progress(run / METRICS)
    metric = settings.get("monitor") or next((key for key in (validations or [{}])[-1] if "/" in key), None)
    scores = [entry[metric] for entry in validations if entry.get(metric) is not None] if metric else []
    better = max if settings.get("monitor_mode") == "max" else min
    return RunLine(
        name=name,
        task=_short(str(record.task)),
        status=status_now(run, str(record.status)),
        steps=step.get("step", -1) + 1,
        loss=step.get("loss"),
        metric=metric,
        last=scores[-1] if scores else None,
        best=better(scores) if scores else None,
        when=starts[0]["time"] if starts else None,
    )


def _show(lines: list[RunLine]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for title in ("run", "task", "status"):
        table.add_column(title, overflow="fold")
    for title in ("steps", "loss"):
        table.add_column(title, justify="right")
    table.add_column("metric", overflow="fold")
    for title in ("last", "best"):
        table.add_column(title, justify="right")
    table.add_column("when")
    for line in lines:
        numbers = [f"{value:.4g}" if value is not None else "" for value in (line.loss, line.last, line.best)]
        table.add_row(
            *(line.name, line.task, line.status, str(line.steps), numbers[0]),
            *(line.metric or "", numbers[1], numbers[2], (line.when or "")[:19]),
        )
    console = Console(file=sys.stdout, highlight=False, markup=False)
    console.width = max(console.width, WIDTH)  # words are not cut: a narrow terminal wraps whole lines
    console.print(table)


def _short(task: str) -> str:
    """`/a/b/file.py:Class` as `file.py:Class`."""
    return task.rpartition("/")[2]
