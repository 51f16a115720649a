"""The task and settings of an existing run, as its record has them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from paceline.config.plugin_name import RECORDED
from paceline.config.settings import FOR_USE, TrainConfig
from paceline.core import plugins
from paceline.core.errors import NotFound, NotInstalled, PacelineError
from paceline.core.run_folder import RunRecord
from paceline.train.find_task import UnknownTask, load_task

if TYPE_CHECKING:
    from paceline.train.task import Task


class SettingsOutdated(PacelineError):
    """The present task does not take the settings of the run."""

    run: Path
    error: ValidationError
    sentence = "settings of {run} are no settings of its task:\n{problems}"
    hint = "use the task and the version of Paceline that the run was made with"

    @property
    def problems(self) -> str:
        return "\n".join(f"  {'.'.join(map(str, entry['loc']))}: {entry['msg']}" for entry in self.error.errors())


def task_of(run: Path, spec_now: str | None, record: RunRecord) -> Task:
    """Return the task of a run: from where the record names it, or from where the user says that it is now."""
    if spec_now is not None:
        return load_task(spec_now)
    spec = str(record.task)
    try:
        return load_task(spec)
    except UnknownTask as error:
        plugin = next((each for each in record.plugins if each.get("group") == "recipes"), None)
        if plugin is not None:
            recipe = plugin.get("name", spec)
            if recipe in plugins.names("recipes"):  # `paceline.fit` recorded its class
                return load_task(recipe)
            package, version = plugin.get("package", ""), plugin.get("version", "")
            raise NotInstalled(
                f"{run} was made with the recipe {recipe!r} of {package} {version}, which is not installed",
                hint=f"`pip install {package}=={version}`" if plugins.are_enabled() else "leave out `--no-plugins`",
            ) from error
        if ":" not in spec:
            raise NotFound(
                f"{run} was made by paceline.fit with the task {spec}, whose file is unknown: it was defined in a "
                "notebook or a function, takes arguments, or the run is of an earlier version",
                hint=f"add `--task path/to/file.py:{spec}`, or in Python paceline.load(run, task={spec}(...))",
            ) from None
        raise NotFound(
            f"{run} was made with the task {spec}, which cannot be loaded: {error}",
            hint="put it back, or say where it is now with `--task path/to/file.py:ClassName`",
        ) from error


def settings_of(task: Task, run: Path, values: Mapping[str, Any]) -> TrainConfig:
    """Return the recorded settings, as those of the present task."""
    names = {values.get("optimizer"), values.get("schedule"), *(values.get("loggers") or ())}
    try:
        # Plugins that are only for training need not be here.
        return task.Settings.model_validate(values, context={RECORDED: names, FOR_USE: True})
    except ValidationError as error:
        raise SettingsOutdated(run, error) from error
