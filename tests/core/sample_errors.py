"""Sample instances of all our exceptions, made from what their constructors take.

`python -m tests.core.sample_errors FILE`, with another version of paceline on the path, writes the golden file of
test_error_messages.py: class -> arguments, message and hint of its samples. With `--add` only classes that the file
does not have are added: `python -m tests.core.sample_errors --add tests/core/golden/errors.json`.
"""

from __future__ import annotations

import errno
import importlib
import inspect
import json
import os
import pkgutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

import paceline
from paceline import PacelineError, Task

Described = dict[str, Any]
"""A value as JSON: its kind, and what it is made from."""

NUM_VARIANTS = 3
"""One of everything, several of everything, nothing."""

KINDS: dict[str, Callable[[Any], Any]] = {
    "plain": lambda value: value,
    "path": Path,
    "paths": lambda value: [Path(each) for each in value],
    "os error": lambda value: OSError(value, os.strerror(value)),
    "exception": ValueError,
    "task": lambda value: object.__new__(type(value, (Task,), {})),
    "array": np.array,
    "size": torch.Size,
    "pairs": lambda value: {name: tuple(pair) for name, pair in value.items()},
    "differences": lambda value: [
        _ours("world.consistency:Difference")(name, {text: tuple(ranks) for text, ranks in values.items()}, {})
        for name, values in value.items()
    ],
    "claim": lambda value: _ours("world.roll_call:Claim")(*value),
    "broken": lambda value: [
        _ours("train.checkpoint.format:CheckpointBroken")(Path(path), "model.safetensors", "is cut short")
        for path in value
    ],
}


def _ours(name: str) -> Any:
    module, _, kind = name.partition(":")
    return getattr(importlib.import_module(f"paceline.{module}"), kind)


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


def samples(error: type[PacelineError]) -> list[dict[str, Any]]:
    """Arguments, message and hint of each variant that the constructor accepts."""
    result: list[dict[str, Any]] = []
    for variant in range(NUM_VARIANTS):
        try:
            args, named = _arguments(error, variant)
            sample = {"args": args, "named": named} if named else {"args": args}
            sample |= said(error, sample)
        except Exception:
            continue
        if sample not in result:
            result.append(sample)
    return result


def said(error: type[PacelineError], sample: dict[str, Any]) -> dict[str, str]:
    """Message and hint of an exception with the arguments of a sample."""
    named = {name: build(value) for name, value in sample.get("named", {}).items()}
    made = error(*map(build, sample["args"]), **named)
    return {"message": str(made), "hint": made.hint}


def build(described: Described) -> Any:
    return KINDS[described["kind"]](described["value"])


def _arguments(error: type[PacelineError], variant: int) -> tuple[list[Described], dict[str, Described]]:
    args, named = [], {}
    if error.sentence:  # declared: its fields are the arguments
        kinds: dict[str, str] = {}
        for each in reversed(error.__mro__):
            kinds |= {name: str(kind) for name, kind in inspect.get_annotations(each).items()}
        return [_sample(kinds[name], number, variant) for number, name in enumerate(error._fields)], {}
    parameters = list(inspect.signature(error.__init__).parameters.values())[1:]
    if any(parameter.kind == parameter.VAR_POSITIONAL for parameter in parameters):
        return [_sample("str", 0, variant)], {}
    for number, parameter in enumerate(parameters):
        value = _sample(str(parameter.annotation), number, variant)
        if parameter.kind == parameter.KEYWORD_ONLY:
            named[parameter.name] = value
        else:
            args.append(value)
    return args, named


def _sample(annotation: str, number: int, variant: int) -> Described:
    """A value of a type, different for each parameter; raises KeyError for types that are ours alone."""
    count = (1, 3, 0)[variant]
    text, whole = f"text{number}", (1, 17 + 3 * number, 0)[variant]
    path = (f"/nowhere/folder{number}/file{number}.json", "/usr/bin", "/dev/null")[variant]
    texts = [f"{text}-{each}" for each in range(count)]
    described: dict[str, tuple[str, Any]] = {
        "str": ("plain", text),
        "str | None": ("plain", None if variant == 2 else text),
        "object": ("plain", text),
        "Any": ("plain", text),
        "int": ("plain", whole),
        "int | None": ("plain", None if variant == 2 else whole),
        "float": ("plain", whole + 0.25),
        "bool": ("plain", variant != 1),
        "Path": ("path", path),
        "Path | str": ("path", path),
        "str | Path": ("path", path),
        "list[Path]": ("paths", [f"{path}-{each}" for each in range(count)]),
        "Sequence[str]": ("plain", texts),
        "list[str]": ("plain", texts),
        "list[str] | None": ("plain", texts or None),
        "Sequence[int]": ("plain", list(range(4, 4 + count))),
        "list[int]": ("plain", list(range(4, 4 + count))),
        "Mapping[str, str]": ("plain", {each: f"{each}!" for each in texts}),
        "dict[str, tuple[Any, Any]]": ("pairs", {each: [1, 2] for each in texts}),
        "OSError": ("os error", (errno.EACCES, errno.ENOSPC, errno.EROFS)[variant]),
        "Exception": ("exception", text),
        "BaseException": ("exception", text),
        "Task": ("task", "SampleTask"),
        "NDArray[Any]": ("array", list(range(count))),
        "torch.Size": ("size", list(range(1, 1 + count))),
        "Sequence[Difference]": ("differences", {each: {"1": [0], "2": [1, 2]} for each in texts}),
        "Claim": ("claim", [whole, text, 2 + number]),
        "list[CheckpointBroken]": ("broken", [f"{path}-{each}" for each in range(count)]),
    }
    kind, value = described[annotation]
    return {"kind": kind, "value": value}


if __name__ == "__main__":
    found: dict[str, list[list[dict[str, Any]]]] = {}
    is_added = sys.argv[1] == "--add"
    known = json.loads(Path(sys.argv[-1]).read_text(encoding="utf-8")) if is_added else {}
    for each in load_all():
        if each.__name__ not in known:
            found.setdefault(each.__name__, []).append(samples(each))
    found |= known
    rows = [f"{json.dumps(name)}: {json.dumps(found[name])}" for name in sorted(found)]
    lines = ",\n".join(rows).replace('{"args"', '\n  {"args"').replace(", \n", ",\n")
    Path(sys.argv[-1]).write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")
