"""Tasks by name: a recipe, or a class in a user's file."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType

from paceline.core import plugins, user_file
from paceline.core.errors import PacelineError
from paceline.core.extras import imports_for
from paceline.core.run_folder import RECORD
from paceline.core.user_file import guarded
from paceline.train.task import Task


class UnknownTask(PacelineError):
    """Neither a recipe nor a task class in a file."""

    what: str
    advice: str
    sentence = "{what}"
    hint = "{advice}"


def load_task(name: str) -> Task:
    """Return a new task of the class that `name` means."""
    return make_task(find_task(name), name)


def find_task(name: str) -> type[Task]:
    """Return the task class that `name` means."""
    plugin = plugins.find("recipes", name)
    if plugin is not None:
        return _from_plugin(plugin)
    path, separator, class_name = name.rpartition(":")
    if not separator:
        known = recipe_names()
        nearest = difflib.get_close_matches(name, known, n=1)
        listed = {"names": ", ".join(known), "nearest": nearest[0] if nearest else ""}
        plain = "recipes: {names}; or give a class as path/to/file.py:ClassName".format(**listed)
        guess = "did you mean `{nearest}`? recipes: {names}; or give a class as path/to/file.py:ClassName".format(
            **listed
        )
        raise UnknownTask(f"there is no recipe {name!r}", guess if nearest else plain)
    module = import_file(Path(path))
    tasks = user_file.subclasses_in(module, Task)
    if class_name not in tasks:
        found_there = ", ".join(tasks) or "none (does it subclass paceline.Task?)"
        what = f"{path} has no task class {class_name!r}"
        raise UnknownTask(what, f"task classes there: {found_there}")
    return tasks[class_name]


def recipe_names() -> list[str]:
    """Return the names of all recipes; of several names for one recipe, the first."""
    return sorted({plugin.value: plugin.name for plugin in reversed(plugins.installed().of("recipes"))}.values())


def _from_plugin(plugin: plugins.Plugin) -> type[Task]:
    with imports_for(plugin.name):
        value = plugins.load(plugin)
    if not isinstance(value, type) or not issubclass(value, Task):
        raise plugins.unfit(plugin, value, "a subclass of paceline.Task")
    return value


def make_task(task_class: type[Task], name: str) -> Task:
    """A task of this class, which knows by which name it is found again."""
    plugin = plugins.find("recipes", name)
    if plugin is not None:
        task = plugins.guarded(plugin, "cannot be made", task_class)
    else:
        path, _, class_name = name.rpartition(":")
        task = guarded(Path(path), f"{class_name}() is made", task_class)
        name = f"{Path(path).resolve()}:{class_name}"
    task.spec = name
    return task


def import_file(path: Path) -> ModuleType:
    """Run a user's file as a module."""
    hint = "give the task as path/to/file.py:ClassName"
    if path.is_dir():
        raise UnknownTask(f"{path} is a folder, not a Python file", hint)
    if not path.is_file():
        raise UnknownTask(f"there is no file {path}", hint)
    module = user_file.import_file(path, "task")
    if module is None:
        raise UnknownTask(f"{path} is no Python file", hint)
    return module


def recipe_of_model(path: Path) -> str | None:
    """Return the recipe that uses a file or folder as a model without a run; None if none does, or if it is a run.

    A path that does not exist is judged by its ending.
    """
    if (path / RECORD).exists():
        return None
    for plugin in plugins.installed().of("models"):
        is_model: Callable[[Path], bool] = plugins.load(plugin)
        if plugins.guarded(plugin, "fails", partial(is_model, path)):
            return plugin.name
    return None
