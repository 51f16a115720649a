"""Data sets of a RETURNN config: files of `HDFDataset`, read as packed data, or the task's own data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from returnn_mistakes import OptionRefused

Values = dict[str, Any]
FILES = "HDFDataset"
HEEDED = ["class", "files"]
HEEDED_IN_TRAINING = ["seq_ordering", "partition_epoch"]


def data_files(given: Mapping[str, Any], task: str | None) -> tuple[Values, list[str]]:
    """Settings that name the files of `train`, `dev`, `eval` and `eval_datasets`; and those of them that are the task's
    own data."""
    values: Values = {}
    if "train" in given and (files := _files("train", given["train"], task)):
        values["train_files"] = files
    sets = {name: given[name] for name in ("dev", "eval") if name in given}
    others = given.get("eval_datasets", {})
    if not isinstance(others, Mapping):
        raise OptionRefused(f"`eval_datasets` is {others!r}, not a dictionary of data sets by name")
    found = {name: _files(name, options, task) for name, options in sets.items()}
    found |= {str(name): _files(f"eval_datasets/{name}", options, task) for name, options in others.items()}
    own = [name for name, files in found.items() if not files]
    named = {name: files for name, files in found.items() if files}
    if named and own:
        hint = f"give all of them as {FILES}, or none"
        raise OptionRefused(f"`{next(iter(named))}` names files, and `{own[0]}` is the task's own data", hint)
    if named:
        values["val_files"] = tuple(f"{name}={'+'.join(files)}" for name, files in named.items())
    return values, [name for name in ("dev", "eval", "eval_datasets") if name in given] if not named else []


def idle_data_options(given: Mapping[str, Any]) -> list[str]:
    """What is to be said of options of data sets that mean nothing here."""
    sets = {name: given[name] for name in ("train", "dev", "eval") if isinstance(given.get(name), dict)}
    others = given.get("eval_datasets")
    sets |= {f"eval_datasets/{name}": each for name, each in (others.items() if isinstance(others, Mapping) else ())}
    idle = [
        f"`{name}/{key}`"
        for name, options in sets.items()
        if isinstance(options, Mapping) and options.get("class") == FILES
        for key in options
        if key not in HEEDED and not (name == "train" and key in HEEDED_IN_TRAINING)
    ]
    return [f"no effect here: {', '.join(idle)}"] if idle else []


def _files(name: str, options: Any, task: str | None) -> list[str]:
    """The files that a data set of theirs is read from; none where it is the task's own data."""
    if not isinstance(options, Mapping):
        hint = f'{name} = {{"class": "{FILES}", "files": ["data.hdf"]}}'
        raise OptionRefused(f"`{name}` is {options!r}, not a dictionary", hint)
    kind = options.get("class")
    if kind in (None, task):
        return []
    if kind != FILES:
        own = f', or "{task}" for the task\'s own data' if task else ""
        raise OptionRefused(
            f"`{name}/class` {kind!r} is not read here", f'"{FILES}" is{own}; `hdf_dump` makes its files'
        )
    files = options.get("files")
    files = [files] if isinstance(files, str) else files
    if not isinstance(files, Sequence) or not files or not all(isinstance(file, str) for file in files):
        raise OptionRefused(
            f"`{name}/files` is {files!r}, not a list of files", f'{name} = {{..., "files": ["a.hdf"]}}'
        )
    return list(files)
