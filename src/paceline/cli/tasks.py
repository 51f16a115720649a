"""From what a user types to a task: a recipe's name, or a class in a file."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from paceline.config.errors import PacelineError
from paceline.train.task import Task

RECIPES = {"digits": "paceline.recipes.digits:Digits"}


class UnknownTask(PacelineError):
    """Neither a recipe nor a task class in a file."""

    def __init__(self, what: str, hint: str) -> None:
        super().__init__(what)
        self.hint = hint


def load_task(name: str) -> Task:
    """Make the task that `name` means."""
    if name in RECIPES:
        module_name, _, class_name = RECIPES[name].partition(":")
        task = getattr(importlib.import_module(module_name), class_name)()
        assert isinstance(task, Task)
        return task
    path, separator, class_name = name.rpartition(":")
    if not separator:
        nearest = difflib.get_close_matches(name, RECIPES, n=1)
        guess = f"did you mean `{nearest[0]}`? " if nearest else ""
        raise UnknownTask(
            f"there is no recipe {name!r}",
            f"{guess}recipes: {', '.join(RECIPES)}; or give a class as path/to/file.py:ClassName",
        )
    module = _import(Path(path))
    tasks = {
        key: value
        for key, value in vars(module).items()
        if isinstance(value, type) and issubclass(value, Task) and value is not Task
    }
    if class_name not in tasks:
        found = ", ".join(tasks) or "none (does it subclass paceline.Task?)"
        raise UnknownTask(f"{path} has no task class {class_name!r}", f"task classes there: {found}")
    return tasks[class_name]()


def _import(path: Path) -> ModuleType:
    if not path.is_file():
        raise UnknownTask(f"there is no file {path}", "give the task as path/to/file.py:ClassName")
    name = f"paceline_task_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UnknownTask(f"{path} is no Python file", "give the task as path/to/file.py:ClassName")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # loader workers that are started afresh import it by this name
    sys.path.insert(0, str(path.parent.resolve()))
    spec.loader.exec_module(module)
    return module
