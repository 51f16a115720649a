"""Validation sets as they are typed: `dev.json`, `name=dev.json`, or `name=a.json+b.json` for several files of one."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, PlainSerializer

from paceline.core.cloud.address import placed_absolute, shown
from paceline.core.errors import PacelineError

_BETWEEN_FILES = re.compile(
    r"(?<=\.json)\+|(?<=\.jsonl)\+|(?<=\.h5)\+|(?<=\.hdf5)\+|(?<=\.hdf)\+|(?<=\.tar)\+|(?<=\.gz)\+"
)
"""Elsewhere a plus belongs to a name."""


class NamedTwice(PacelineError):
    """Two validation sets that would have one name."""

    name: str
    sentence = "two validation sets are called {name!r}"
    hint = "name them yourself: `first=FILE,second=FILE`"


def name_sets(words: Sequence[str]) -> dict[str, tuple[Path, ...]]:
    """Sets by name: as the word says, else by the file, with its folder where that is not enough."""
    named = [_parse(word) for word in words]
    stems = [_stem(paths[0]) for name, paths in named if name is None]
    sets: dict[str, tuple[Path, ...]] = {}
    for given, paths in named:
        stem = _stem(paths[0])
        name = given or (stem if stems.count(stem) == 1 else f"{paths[0].parent.name}-{stem}")
        if name in sets:
            raise NamedTwice(name)
        sets[name] = paths
    return sets


def absolute_set(word: str) -> str:
    """The same set, from whatever folder it is read."""
    name, paths = _parse(word)
    files = "+".join(str(placed_absolute(path)) for path in paths)
    return files if name is None else f"{name}={files}"


SetWord = Annotated[str, AfterValidator(absolute_set), PlainSerializer(shown, return_type=str, when_used="json")]


def _stem(path: Path) -> str:
    """Return the name of a file without its suffix, and of several without their numbers or their shards."""
    stem = Path(re.sub(r"@.*\.tar$", "", path.name).removesuffix(".gz")).stem
    return re.sub(r"[_.-]*(\{\d+\.\.\d+\}|_OP_\d+\.\.\d+_CL_)", "", stem) or stem


def _parse(word: str) -> tuple[str | None, tuple[Path, ...]]:
    match = re.fullmatch(r"([\w.-]+)=(.+)", word)
    if match is None or os.path.exists(word):  # also where a name is too long to be one
        return None, (Path(word),)
    return match[1], tuple(Path(file) for file in _BETWEEN_FILES.split(match[2]))
