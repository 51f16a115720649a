"""Runs of a folder in one line each: how far they got and how well."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

from rich.cells import cell_len, set_cell_size

from paceline.core.run_folder import (
    METRICS,
    RECORD,
    RUNNING,
    UNSEEN,
    BrokenRecord,
    find_runs,
    read_progress,
    read_record,
    status_now,
)
from paceline.core.terminal import one_line
from paceline.observe.progress import clock_time
from paceline.observe.records import Json, ProgressRecord
from paceline.observe.typed_json import is_number

NAME_SHARE = 0.4
"""Share of the width that names keep, if they need it, before a less important column is left out."""
GAP = 2
"""Spaces between columns."""


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
    epoch: int | None = None
    """The epoch that it is in or ended with, from 1; None in runs of earlier versions."""
    epochs: int | None = None
    """Epochs that it is to have."""
    stage: str | None = None
    done: float | None = None
    """Share of its steps, at the last look."""
    left_s: float | None = None
    """Seconds until the end of a run that is going on, at its speed so far."""


def read_lines(folder: Path) -> list[RunLine]:
    """Return the runs below a folder, newest last."""
    lines = (read_line(run, folder) for run in find_runs(folder))
    return sorted(lines, key=lambda line: line.when or "")


def read_line(run: Path, base: Path) -> RunLine:
    """Return the line of a run; a broken one is listed as such."""
    name = str(run.relative_to(base)) if run != base else run.name
    try:
        record = read_record(run)
        record.require("task", "status")
    except (OSError, BrokenRecord):
        return RunLine(name, "?", f"{RECORD} is broken", 0, None, None, None, None, None)
    settings, starts = record.settings, record.starts
    end, status = read_progress(run / METRICS), status_now(run, str(record.status))
    step, validations = end.step, end.validations
    metric = settings.get("monitor") or next((key for key in (validations or [{}])[-1] if "/" in key), None)
    metric = None if metric is None else str(metric)
    scores = [entry[metric] for entry in validations if is_number(entry.get(metric))] if metric else []
    better = max if settings.get("monitor_mode") == "max" else min
    return RunLine(
        name=name,
        task=_short(str(record.task)),
        status=status,
        steps=step["step"] + 1 if is_number(step.get("step")) else 0,
        loss=step["loss"] if is_number(step.get("loss")) else None,
        metric=metric,
        last=scores[-1] if scores else None,
        best=better(scores) if scores else None,
        when=_time(starts[0]) if starts else None,
        **asdict(_standing(status, end.progress, time.time())),
    )


def _time(start: object) -> str | None:
    """Return when a run was started, as its record says."""
    moment = start.get("time") if isinstance(start, dict) else None
    return moment if isinstance(moment, str) else None


@dataclass(frozen=True)
class _Standing:
    """Position of a run, as the last look at its progress has it."""

    epoch: int | None = None
    epochs: int | None = None
    stage: str | None = None
    done: float | None = None
    left_s: float | None = None


def _standing(status: str, progress: Json, now_s: float) -> _Standing:
    """Return where a run is; the time left is of one that is going on, and goes on since the last look, too."""
    look = ProgressRecord.from_json(progress) if progress else None
    if look is None:
        return _Standing()
    is_going_on = status == RUNNING or status.startswith(UNSEEN)
    left_s = look.left_s if is_going_on else None
    if left_s is not None and look.time is not None:
        left_s = max(0.0, left_s - max(0.0, now_s - look.time))
    done = 1.0 if status == "finished" else look.done  # the last look was before the last step
    return _Standing(look.epoch, look.epochs, look.stage, done, left_s)


# -- the table ---------------------------------------------------------------------------------------------------------


class _Column(NamedTuple):
    title: str
    cells: list[str]
    rank: int
    """Those of the highest rank are left out first where there is not enough room."""
    is_number: bool = False

    @property
    def width(self) -> int:
        return max(cell_len(text) for text in (self.title, *self.cells))


def table(lines: Sequence[RunLine], width: int) -> str:
    """Return the runs as a table of at most so many columns.

    Where it is too narrow, less important columns are left out, then names are shortened in the middle.
    """
    columns = _columns(lines)
    needed = min(columns[0].width, int(NAME_SHARE * width))
    while len(columns) > 1 and needed + sum(GAP + column.width for column in columns[1:]) > width:
        columns.remove(max(columns[1:], key=lambda column: column.rank))
    rest = width - sum(GAP + column.width for column in columns[1:])
    names = columns[0]
    columns[0] = names._replace(cells=[shortened(name, max(1, rest)) for name in names.cells])
    rows = [[column.title for column in columns], ["-" * column.width for column in columns]]
    rows += [list(cells) for cells in zip(*(column.cells for column in columns), strict=True)]
    return "".join(f"{(' ' * GAP).join(_padded(columns, row)).rstrip()}\n" for row in rows)


def _columns(lines: Sequence[RunLine]) -> list[_Column]:
    columns = [
        _Column(title, [one_line(cell(line)) for line in lines], rank, is_number)
        for title, cell, rank, is_number in _CELLS
    ]
    return [column for column in columns if column.title == "run" or any(column.cells)]


def _done(line: RunLine) -> str:
    """Return the share of a run that has not had all of its steps, and the time that is left where it goes on."""
    if line.done is None or line.done >= 1:
        return ""
    share = f"{math.floor(100 * line.done)}%"
    return share if line.left_s is None else f"{share}, {clock_time(line.left_s)} left"


def _number(value: float | None) -> str:
    return f"{value:.4g}" if is_number(value) else ""


_CELLS: Sequence[tuple[str, Callable[[RunLine], str], int, bool]] = (
    ("run", lambda line: line.name, 0, False),
    ("status", lambda line: line.status, 1, False),
    ("steps", lambda line: str(line.steps), 2, True),
    ("done", _done, 3, False),
    ("loss", lambda line: _number(line.loss), 5, True),
    ("metric", lambda line: line.metric or "", 6, False),
    ("last", lambda line: _number(line.last), 7, True),
    ("best", lambda line: _number(line.best), 4, True),
    ("task", lambda line: line.task, 9, False),
    ("when", lambda line: (line.when or "")[:16], 8, False),
)
"""Columns of the table: title, content, rank, and whether it holds numbers."""


def _padded(columns: Sequence[_Column], row: Sequence[str]) -> Iterator[str]:
    for column, text in zip(columns, row, strict=True):
        space = " " * (column.width - cell_len(text))
        yield space + text if column.is_number else text + space


def shortened(text: str, width: int) -> str:
    """Return a text of at most so many columns: its head and its tail, with `...` between them."""
    if cell_len(text) <= width:
        return text
    if width <= 3:
        return set_cell_size(text, width).rstrip()
    head = set_cell_size(text, (width - 3 + 1) // 2).rstrip()
    tail = set_cell_size(text[::-1], width - 3 - cell_len(head)).rstrip()[::-1]
    return f"{head}...{tail}"


def _short(task: str) -> str:
    """`/a/b/file.py:Class` as `file.py:Class`."""
    return task.rpartition("/")[2]
