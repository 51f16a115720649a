"""Results of a run as text: metrics as a table, predictions as lines of text or JSON."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from paceline.core.disk import CannotWrite, DiskFull, is_full, replacing
from paceline.core.errors import TaskContract
from paceline.core.json_text import json_text
from paceline.core.terminal import emit
from paceline.world.link import Link


@dataclass(frozen=True)
class DetailedText:
    """A predicted text with more that JSON tells of it, as plain values by name.

    No `str`: of a class of strings only the text would reach another rank.
    """

    text: str
    details: Mapping[str, Any]

    def __str__(self) -> str:
        return self.text


def table(metrics: Mapping[str, float]) -> str:
    """Return `set/metric` numbers as a table with one line per set."""
    rows: dict[str, dict[str, float]] = {}
    for name, value in metrics.items():
        of, _, metric = name.rpartition("/")
        rows.setdefault(of, {})[metric] = value
    names = list(dict.fromkeys(metric for row in rows.values() for metric in row))
    cells = [["set", *names]]
    cells += [[of, *(f"{row[name]:.6g}" if name in row else "-" for name in names)] for of, row in rows.items()]
    widths = [max(len(line[column]) for line in cells) for column in range(len(names) + 1)]
    lines = ["  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]).rstrip() for line in cells]
    return "\n".join([*lines, ""])


def write_predictions(
    pairs: Iterator[tuple[int, Any]], link: Link, line: Callable[[int, Any], str], path: Path | None = None
) -> int:
    """Write a line per sample, to the console or to a file that has its name once it is complete. Returns how many.

    All ranks must call it; the first one writes.
    """
    if path is None or not link.is_first:
        number = 0
        for number, pair in enumerate(pairs, 1):  # noqa: B007
            emit(line(*pair))
        return number
    try:
        with ExitStack() as stack:
            try:
                file = stack.enter_context(replacing(path, errors="surrogateescape"))
            except OSError as error:
                raise CannotWrite(path, error) from error
            return sum(1 for pair in pairs if file.write(line(*pair)))
    except OSError as error:
        if not is_full(error):
            raise
        raise DiskFull(path, error, "make room, or choose another `--out`") from error


def json_line(index: int, prediction: Any, names: Sequence[str] | None = None) -> str:
    """Return one sample as a line of JSON; what is not a number (JSON has no word for it) becomes null."""
    name = {} if names is None else {"name": names[index]}
    details = plain(prediction.details) if isinstance(prediction, DetailedText) else {}
    return json_text({"index": index, **name, "prediction": plain(prediction), **details}) + "\n"


def text_line(index: int, prediction: Any, names: Sequence[str] | None = None) -> str:
    """Return one sample as `index<TAB>prediction` (or its name), one line: text as it is, everything else as JSON."""
    value = plain(prediction)
    shown = value if isinstance(value, str) and value.isprintable() else json_text(value)
    return f"{index if names is None else names[index]}\t{shown}\n"


def bare_line(index: int, prediction: Any, names: Sequence[str] | None = None) -> str:
    """Return the text of one sample alone, as one line: what was read as lines is written as lines."""
    return f"{' '.join(str(prediction).splitlines())}\n"


def plain(value: Any) -> Any:
    """Return a value as JSON has it: tensors as lists, NaN and infinity as null."""
    if isinstance(value, torch.Tensor | np.ndarray | np.generic):
        return plain(value.tolist())
    if isinstance(value, dict):
        return {str(name): plain(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, DetailedText):
        return value.text
    if value is None or isinstance(value, bool | int | str):
        return value
    raise TaskContract(
        f"a prediction holds a {type(value).__name__}, which cannot be written as JSON",
        hint="return numbers, strings, tensors, or lists and dictionaries of them from `predict`",
    )
