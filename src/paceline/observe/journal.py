"""What a run writes down: one JSON line per step and per validation, each exactly once even after a crash.

Steps are buffered and read from the device together, when something is logged anyway; they are on disk before any
checkpoint that contains them is. A resumed run first drops the lines past its checkpoint.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import IO, Any

Record = dict[str, Any]


class Journal:
    """`metrics.jsonl` of a run. Only the first rank has a file; on the others it is silent."""

    def __init__(self, path: Path | None, *, next_step: int = 0, next_validation: int = 0) -> None:
        self._file: IO[str] | None = None
        if path is not None:
            if path.exists():
                _drop_from(path, {"step": next_step, "validation": next_validation})
            self._file = path.open("a", encoding="utf-8")

    def steps(self, rows: Iterable[tuple[int, int, float, float | None]]) -> None:
        """(step, epoch, loss, lr) of many steps; written by hand because it happens at every one."""
        if self._file is not None:
            lines = [
                f'{{"kind": "step", "step": {step}, "epoch": {epoch}, "loss": {_number(loss)}, "lr": {_number(lr)}}}'
                for step, epoch, loss, lr in rows
            ]
            self._file.write("\n".join([*lines, ""]))
            self._file.flush()

    def write(self, records: list[Record]) -> None:
        if self._file is not None and records:
            self._file.write("".join(_line(record) for record in records))
            self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def _number(value: float | None) -> str:
    return repr(value) if value is not None and math.isfinite(value) else "null"


def _line(record: Record) -> str:
    try:
        return json.dumps(record, allow_nan=False) + "\n"
    except ValueError:  # not a number: JSON has no word for it
        return json.dumps(_map(record, lambda value: value if math.isfinite(value) else None)) + "\n"


def _map(value: Any, change: Callable[[float], Any]) -> Any:
    if isinstance(value, dict):
        return {name: _map(entry, change) for name, entry in value.items()}
    return change(value) if isinstance(value, float) else value


def _drop_from(path: Path, next_steps: dict[str, int]) -> None:
    """Keep the lines of steps before the next one of their kind; a line cut short by a crash goes too."""
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
        try:
            record = json.loads(line)
            is_past = record["step"] < next_steps[record["kind"]]
        except (ValueError, KeyError, TypeError):
            continue
        if is_past and line.endswith("\n"):
            kept.append(line)
    aside = path.with_suffix(".writing")
    with aside.open("w", encoding="utf-8") as file:
        file.writelines(kept)
        file.flush()
        os.fsync(file.fileno())
    os.replace(aside, path)


def read(path: Path, kind: str = "step") -> list[Record]:
    """All records of one kind."""
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [record for record in records if record["kind"] == kind]
