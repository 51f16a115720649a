"""Journal of a run: one JSON line per step, epoch, progress, validation and change of ranks.

Each is there exactly once, even after a crash. Steps are buffered and read from the device together, when something is
logged anyway; they are on disk before any checkpoint that contains them is. A resumed run first drops the lines past
its checkpoint.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import IO

from paceline.core.disk import replacing
from paceline.core.run_folder import count_epochs_from_one
from paceline.core.tree import map_leaves
from paceline.observe.callback import Callback, Record
from paceline.observe.records import STEP_KEYS

_STEP = '{"kind": "step", "step": %d, "epoch": %d, "loss": %r, "lr": %r}\n'
_STEP_WITH_NORM = '{"kind": "step", "step": %d, "epoch": %d, "loss": %r, "lr": %r, "gradient_norm": %r}\n'
NUM_STEP_KEYS = len(STEP_KEYS)
"""Keys of a step without notes."""


class Journal(Callback):
    """`metrics.jsonl` of a run."""

    def __init__(self, path: Path, *, next_step: int = 0, next_validation: int = 0) -> None:
        self._path = path
        self.last_epoch = -1
        """Last step of the last epoch in the file."""
        if path.exists():
            next_steps = {"step": next_step, "epoch": next_step, "progress": next_step, "validation": next_validation}
            self._keep(lambda record: record["kind"] == "ranks" or record["step"] < next_steps[record["kind"]])
            self.last_epoch = max((record["step"] for record in read(path, "epoch")), default=-1)
        self._file: IO[str] = path.open("a", encoding="utf-8")

    def step(self, records: list[Record]) -> None:
        """Write steps, formatted by hand because there are many. Numbers by layer (`larc/...`) are for the loggers."""
        text = "".join([_step_line(record) for record in records])
        if "nan" in text or "inf" in text or "None" in text:  # JSON has no word for them
            text = "".join([_line(_without_layers(record)) for record in records])
        self._file.write(text)
        self._file.flush()

    def epoch(self, record: Record) -> None:
        """Write an epoch; it replaces the record of its first part, where the run ended there and was given more."""
        before = self.last_epoch
        if before > record["step"] - record.get("steps", 0):
            self._file.close()
            self._keep(lambda line: line["kind"] != "epoch" or line["step"] != before)
            self._file = self._path.open("a", encoding="utf-8")
        self.last_epoch = record["step"]
        self._write(record)

    def progress(self, record: Record) -> None:
        self._write(record)

    def validation(self, record: Record) -> None:
        self._write(record)

    def ranks(self, record: Record) -> None:
        self._write(record)

    def end(self, status: str) -> None:
        self._file.close()

    def _write(self, record: Record) -> None:
        self._file.write(_line(record))
        self._file.flush()

    def _keep(self, is_kept: Callable[[Record], bool]) -> None:
        """Drop the other lines, and one that a crash has cut short. The file is whole at every moment."""
        lines, records = [], []
        for line in self._path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True):
            try:
                record = json.loads(line)
                if line.endswith("\n") and is_kept(record):
                    lines.append(line)
                    records.append(record)
            except (ValueError, KeyError, TypeError):
                continue
        if count_epochs_from_one(records):  # of an earlier version: one file counts in one way
            lines = [_line(record) for record in records]
        with replacing(self._path) as file:
            file.writelines(lines)


def _step_line(record: Record) -> str:
    number = len(record)
    if number == NUM_STEP_KEYS:
        return _STEP % (record["step"], record["epoch"], record["loss"], record["lr"])
    if number == NUM_STEP_KEYS + 1 and "gradient_norm" in record:
        step = (record["step"], record["epoch"], record["loss"], record["lr"], record["gradient_norm"])
        return _STEP_WITH_NORM % step
    return _line(_without_layers(record))


def _without_layers(record: Record) -> Record:
    return {name: value for name, value in record.items() if "/" not in name}


def _line(record: Record) -> str:
    try:
        return json.dumps(record, allow_nan=False) + "\n"
    except ValueError:  # not a number: JSON has no word for it
        return json.dumps(map_leaves(lambda value: value if math.isfinite(value) else None, record, float)) + "\n"


def read(path: Path, kind: str = "step") -> list[Record]:
    """Return all lines of one kind."""
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [record for record in records if record["kind"] == kind]
