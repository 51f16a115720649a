"""Sample instances of our exceptions, made from the types of their fields."""

from __future__ import annotations

import errno
import importlib
import inspect
import os
import pkgutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

import paceline
from paceline import PacelineError, Task

NUM_VARIANTS = 3
"""One of everything, several of everything, nothing."""


def load_all() -> list[type[PacelineError]]:
    """Import every module of the package; return the exceptions that they define."""
    for module in pkgutil.walk_packages(paceline.__path__, "paceline."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    unique = {error.__module__ + error.__qualname__: error for error in _below(PacelineError)}
    return [unique[name] for name in sorted(unique)]


def _below(error: type[PacelineError]) -> Iterator[type[PacelineError]]:
    for each in error.__subclasses__():
        if each.__module__.startswith("paceline."):
            yield each
            yield from _below(each)


def fields(error: type[PacelineError], variant: int) -> list[Any] | None:
    """Return a value for each field of a declared error; None if a field has a type of our own."""
    kinds: dict[str, str] = {}
    for each in reversed(error.__mro__):
        kinds |= {name: str(kind) for name, kind in inspect.get_annotations(each).items()}
    values = _values(variant)
    wanted = [kinds[name] for name in error._fields]
    return [values[kind] for kind in wanted] if set(wanted) <= values.keys() else None


def _values(variant: int) -> dict[str, Any]:
    count, number = (1, 3, 0)[variant], (1, 17, 0)[variant]
    path = Path(("/nowhere/folder/file.json", "/usr/bin", "/dev/null")[variant])
    texts = [f"text-{each}" for each in range(count)]
    code = (errno.EACCES, errno.ENOSPC, errno.EROFS)[variant]
    return {
        **dict.fromkeys(("str", "object", "Any"), "text"),
        "str | None": None if variant == 2 else "text",
        "int": number,
        "int | None": None if variant == 2 else number,
        "float": number + 0.25,
        "bool": variant != 1,
        **dict.fromkeys(("Path", "Path | str", "str | Path"), path),
        "list[Path]": [path] * count,
        **dict.fromkeys(("Sequence[str]", "list[str]"), texts),
        "list[str] | None": texts or None,
        "Sequence[int]": range(4, 4 + count),
        "list[int]": list(range(4, 4 + count)),
        "Mapping[str, str]": {each: f"{each}!" for each in texts},
        "dict[str, tuple[Any, Any]]": dict.fromkeys(texts, (1, 2)),
        "OSError": OSError(code, os.strerror(code)),
        **dict.fromkeys(("Exception", "BaseException"), ValueError("text")),
        "Task": object.__new__(type("SampleTask", (Task,), {})),
        "NDArray[Any]": np.arange(count),
        "torch.Size": torch.Size(range(1, 1 + count)),
    }
