"""From what a user types to a task: a recipe's name, or a class in a file."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, TracebackType
from typing import TypeVar

from paceline.cli.recipes import EXTRAS, RECIPES
from paceline.core.errors import PacelineError
from paceline.train.task import Task

T = TypeVar("T")


class UnknownTask(PacelineError):
    """Neither a recipe nor a task class in a file."""

    what: str
    advice: str
    sentence = "{what}"
    hint = "{advice}"


class PackagesMissing(PacelineError):
    """A recipe that needs packages which are not installed with Paceline itself."""

    recipe: str
    package: str
    extra: str
    sentence = "the recipe {recipe!r} needs the package {package}, which is not installed"
    hint = "pip install 'paceline[{extra}]'"


class TaskFileFails(PacelineError):
    """The user's file raised while it was imported; its own traceback is shown, ours is not."""

    path: Path
    error: BaseException
    doing: str
    sentence = "{path} fails while {doing}\n\n{trace}"

    @property
    def trace(self) -> str:
        of_file = _from_file(self.error.__traceback__, self.path)
        return "".join(traceback.format_exception(type(self.error), self.error, of_file)).rstrip()


def load_task(name: str) -> Task:
    """Make the task that `name` means."""
    return make_task(find_task(name), name)


def find_task(name: str) -> type[Task]:
    """The task class that `name` means."""
    if name in RECIPES:
        module_name, _, class_name = RECIPES[name].partition(":")
        found: type[Task] = getattr(_import_recipe(name, module_name), class_name)
        assert issubclass(found, Task)
        return found
    path, separator, class_name = name.rpartition(":")
    if not separator:
        nearest = difflib.get_close_matches(name, RECIPES, n=1)
        guess = f"did you mean `{nearest[0]}`? " if nearest else ""
        raise UnknownTask(
            f"there is no recipe {name!r}",
            f"{guess}recipes: {', '.join(RECIPES)}; or give a class as path/to/file.py:ClassName",
        )
    module = import_file(Path(path))
    tasks = {
        key: value
        for key, value in vars(module).items()
        if isinstance(value, type) and issubclass(value, Task) and value is not Task
    }
    if class_name not in tasks:
        found_there = ", ".join(tasks) or "none (does it subclass paceline.Task?)"
        raise UnknownTask(f"{path} has no task class {class_name!r}", f"task classes there: {found_there}")
    return tasks[class_name]


def _import_recipe(name: str, module_name: str) -> ModuleType:
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in EXTRAS:
            raise  # a bug of ours
        raise PackagesMissing(name, package, EXTRAS[package]) from None


def make_task(found: type[Task], name: str) -> Task:
    """A task of this class, which knows by which name it is found again."""
    path, _, class_name = name.rpartition(":")
    task = found() if name in RECIPES else guarded(Path(path), f"{class_name}() is made", found)
    task.spec = name if name in RECIPES else f"{Path(path).resolve()}:{class_name}"
    return task


def import_file(path: Path) -> ModuleType:
    """Run a user's file as a module."""
    if not path.is_file():
        raise UnknownTask(f"there is no file {path}", "give the task as path/to/file.py:ClassName")
    name = f"paceline_task_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UnknownTask(f"{path} is no Python file", "give the task as path/to/file.py:ClassName")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # loader workers that are started afresh import it by this name
    sys.path.insert(0, str(path.parent.resolve()))
    loader = spec.loader
    guarded(path, "it is imported", lambda: loader.exec_module(module))
    return module


def guarded(path: Path, doing: str, action: Callable[[], T]) -> T:
    """Do something in the user's file; what it raises is shown from that file on."""
    try:
        return action()
    except PacelineError:
        raise
    except Exception as error:
        raise TaskFileFails(path, error, doing) from None


def _from_file(trace: TracebackType | None, path: Path) -> TracebackType | None:
    """The part of a traceback that begins in the user's file; nothing where it never got there (a syntax error)."""
    while trace is not None and Path(trace.tb_frame.f_code.co_filename).resolve() != path.resolve():
        trace = trace.tb_next
    return trace
