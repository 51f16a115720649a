"""Config files of OpenSeq2Seq: Python, executed with names in the place of TensorFlow and OpenSeq2Seq."""

from __future__ import annotations

import ast
import difflib
import importlib.abc
import runpy
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from paceline.core.errors import PacelineError
from paceline.train.find_task import guarded

NAMES_ONLY = ("tensorflow", "open_seq2seq")


class ParameterRefused(PacelineError):
    """A parameter that is not known, or that means nothing we can do."""

    def __init__(self, what: str, hint: str = "") -> None:
        super().__init__(what)
        self.hint = hint


class StandIn(ModuleType):
    """A module, class, function or dtype of which a config says no more than the name."""

    def __getattr__(self, name: str) -> StandIn:
        if name.startswith("__"):
            raise AttributeError(name)
        return StandIn(f"{self.__name__}.{name}")

    def __call__(self, *args: Any, **kwargs: Any) -> StandIn:
        return self


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(fullname, self, is_package=True) if fullname.split(".")[0] in NAMES_ONLY else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing is in it."""


@contextmanager
def only_names() -> Iterator[None]:
    """While a config is read, imports of theirs bring stand-ins; later they are what they were before."""
    before = {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] in NAMES_ONLY}
    finder = Finder()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if name.split(".")[0] in NAMES_ONLY]:
            del sys.modules[name]
        sys.modules.update(before)


def read_config(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ParameterRefused(f"there is no config file {path}")
    sys.path.insert(0, str(path.parent.resolve()))  # its task may be beside it
    with only_names():
        return guarded(path, "it is executed", lambda: runpy.run_path(str(path), {"tf": StandIn("tensorflow")}))


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`over` on top of `base`, dictionaries entry by entry."""
    both = {name for name in over if isinstance(over[name], dict) and isinstance(base.get(name), dict)}
    return {**base, **over, **{name: merged(base[name], over[name]) for name in both}}


def overrides(words: Sequence[str], base: Mapping[str, Any]) -> dict[str, Any]:
    """Base parameters of the command line, `--outer/name=value` or `--name value`."""
    found: dict[str, Any] = {}
    left = list(words)
    while left:
        name, equals, text = left.pop(0).partition("=")
        if not name.startswith("--") or not (equals or left):
            raise ParameterRefused(f"{name}: no flag with a value", "base parameters are typed as --name=value")
        text = text if equals else left.pop(0)
        *outer, key = name[2:].split("/")
        place, known = found, base
        for part in outer:
            place, known = place.setdefault(part, {}), known.get(part, {})
        place[key] = text if isinstance(known.get(key), str) else literal(text)
    return found


def literal(text: str) -> Any:
    try:
        return ast.literal_eval(text.capitalize() if text.lower() in ("true", "false", "none") else text)
    except (ValueError, SyntaxError):
        return text


def check_known(where: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Refuse what OpenSeq2Seq would refuse, and name what was probably meant."""
    check_all_known([(where, given, known)])


def check_all_known(levels: Iterable[tuple[str, Iterable[str], Iterable[str]]]) -> None:
    """The same for several dictionaries of parameters, all names at once: where, what is given there, what is known."""
    wrong: dict[str, str] = {}
    for where, given, known in levels:
        names = list(known)
        for name in given:
            if name not in names:
                close = difflib.get_close_matches(name, names, n=1)
                hint = f"did you mean `{close[0]}`?" if close else f"known: {', '.join(names)}"
                wrong[f"there is no parameter `{where}{name}`"] = hint
    if wrong:
        *before, (what, hint) = wrong.items()
        raise ParameterRefused("".join(f"{each}\n  {meant}\nerror: " for each, meant in before) + what, hint)


def plain(value: Any) -> str:
    """Name of a class or function of theirs; names may be given as such."""
    return value if isinstance(value, str) else str(getattr(value, "__name__", value)).rpartition(".")[2]
