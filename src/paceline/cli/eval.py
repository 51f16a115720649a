"""`paceline eval RUN`: the validation metrics of a run's checkpoint, the same at any number of ranks."""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

from pydantic import ValidationError, create_model

from paceline.config import messages
from paceline.config.command_line import Typed, dashed, read_words
from paceline.config.load import load
from paceline.config.parse import Given
from paceline.config.problems import WORDS, SettingsInvalid
from paceline.config.settings import Positive, Section, TrainConfig
from paceline.core.cloud.address import Place, local_path, shown
from paceline.core.cloud.run_copy import bring_run
from paceline.core.errors import Conflict, PacelineError
from paceline.core.paths import near
from paceline.core.run_folder import BrokenRecord, RunRecord, read_record
from paceline.core.terminal import emit, tell
from paceline.train.find_task import recipe_of_model
from paceline.train.recorded import SettingsOutdated, settings_of, task_of
from paceline.world.discover.procs import check_procs

if TYPE_CHECKING:
    from paceline.config.mode import Purpose
    from paceline.train.stepper import Stepper
    from paceline.train.task import Task
    from paceline.world.link import Link

with warnings.catch_warnings():
    # `json` hides a method that pydantic itself has given up; it is the word that users know.
    warnings.filterwarnings("ignore", message='Field name "json"', category=UserWarning)

    class UseOptions(Section):
        """What all commands ask that use a run instead of making one."""

        aliases: ClassVar[dict[str, str]] = {"code_optimization": "level"}

        run: Place
        """Folder of the run, or its address; of speech also a .nemo archive or an export."""
        manifest: tuple[str, ...] = ()
        """Other manifests or packed files than the run's, with commas between them, for a task that reads manifests."""
        checkpoint: Literal["best", "last"] | Place = "best"
        """The one with the best score (the newest where none has one), the newest, or one by its path or name."""
        average: Positive = 1
        """Use the mean of the weights of so many checkpoints: that one and those before it (`--keep-last`)."""
        device: Literal["auto", "cpu", "cuda"] = "auto"
        """`auto` takes CUDA where there is one."""
        level: Literal["auto", 0, 1, 2, 3] | None = None
        """Precision (`-O0` to `-O3`); the run's own if not set."""
        eval_batch: Positive | None = None
        """Samples per batch; as in the run's validation if not set."""
        limit_batches: Positive | None = None
        """Batches per data set at most, for a quick try."""
        procs: Positive | Literal["auto"] = 1
        """Ranks to start on this machine; `auto` is one per GPU, one without."""
        task: str | None = None
        """Where the task is now (`path/to/file.py:ClassName`), if its file has moved since the run was made."""
        json: bool = False  # type: ignore[assignment]
        """Print JSON instead of text."""


class EvalOptions(UseOptions):
    """Validate a checkpoint of RUN on the validation sets of its task, or on other data."""

    data: str | None = None
    """A function without arguments that returns a data set, or several by name, as `path/to/file.py:function`; the
    task's validation sets if not set."""


OPTIONS, POSITIONAL = EvalOptions, ("run",)
Options = TypeVar("Options", bound=UseOptions)


class NoDataFunction(PacelineError):
    """`--data` names nothing that returns data."""

    spec: str
    why: str
    sentence = "`--data {spec}`: {why}"
    hint = "give it as path/to/file.py:function, a function without arguments that returns a data set"


def data_twice(data: str, inputs: Sequence[str]) -> Conflict:
    """Return the error of `--data` besides files."""
    files = f"{' '.join(inputs[:3])}{' ...' * (len(inputs) > 3)}"
    return Conflict(f"both `--data {data}` and {files} are given", hint="give one of them")


def run(argv: Sequence[str]) -> int:
    return run_here_or_on_procs("eval", EvalOptions, POSITIONAL, argv, evaluate)


def evaluate(options: EvalOptions) -> int:
    """Validate on this rank, with all others; the first one prints."""
    from paceline.train import apply
    from paceline.train import predictions as outcome

    task, config, link = open_run(options, "eval", {}, {"val_manifest": options.manifest})
    with link:
        if options.data is not None and options.manifest:
            raise data_twice(options.data, options.manifest)
        sets = None if options.data is None else _sets(options.data)
        restored = restore(task, config, link, options, "eval")
        metrics = apply.evaluate_stepper(task, config, restored.stepper, restored.grains, sets)
    path = shown(restored.path)
    if link.is_first and options.json:
        results = {"run": shown(options.run), "checkpoint": path, "step": restored.step, "metrics": metrics}
        emit(json.dumps(outcome.plain(results)) + "\n")
    elif link.is_first:
        tell(f"{path}\n{outcome.table(metrics)}")
    return 0


@dataclass(frozen=True)
class Restored:
    """A model that is ready for use, of a run or by itself."""

    stepper: Stepper
    path: Path
    """The checkpoint, or the file or folder of a model by itself."""
    step: int | None
    """Of the checkpoint."""
    grains: int


def restore(task: Task, config: TrainConfig, link: Link, options: UseOptions, purpose: Purpose) -> Restored:
    """Return the model that was asked for; all ranks must call it."""
    from paceline.train import apply

    if recipe_of_model(options.run):
        stepper = apply.restore_model(task, config, link, options.run, purpose)
        return Restored(stepper, options.run, None, config.grains or 1)
    checkpoint = apply.choose_checkpoint(link, options.run, options.checkpoint)
    stepper = apply.restore_for_use(task, config, link, checkpoint, options.average, purpose=purpose)
    return Restored(stepper, checkpoint, stepper.num_steps, apply.grains_of(options.run, config))


def run_here_or_on_procs(
    command: str,
    model: type[Options],
    positional: Sequence[str],
    argv: Sequence[str],
    on_this_rank: Callable[[Options], int],
) -> int:
    """Do `here` as the rank that this process is, or start `--procs` ranks that each do."""
    model = with_task_options(model, read_words(model, argv, positional), argv)
    options = load(model, argv, prog=f"paceline {command}", positional=positional)
    from paceline.world.discover.environment import discover
    from paceline.world.failure.together import fail_together
    from paceline.world.launch.launcher import launch

    world = discover(os.environ)
    if world.size == 1 and world.launcher == "plain" and options.procs != 1:
        again = [sys.executable, "-m", "paceline", command, *argv]
        return fail_together(world, lambda: launch(options.procs, again, device=options.device))

    def checked() -> int:
        check_procs(world, options.procs, f"paceline {command}")
        return on_this_rank(options)

    return fail_together(world, checked)


def with_task_options(model: type[Options], typed: Typed, argv: Sequence[str]) -> type[Options]:
    """Return the options with those that the task of the run or model adds; raise `NoRun` if the word that must be one
    is none."""
    # Before the task is known its options are not: the run may stand behind one, and pass for a part of its value.
    words = [str(typed.given["run"].raw)] if "run" in typed.given else []
    names = (_task_name(Path(word)) for word in [*words, *(argv[place] for place in typed.swallowed)])
    name = next((each for each in names if each is not None), None)
    if name is None:
        if words:  # before options are called unknown that the task of a run may have
            from paceline.train.apply import read_run

            read_run(local_path(Path(words[0])))
        return model  # RUN is missing
    spec = str(typed.given["task"].raw) if "task" in typed.given else name
    from paceline.train.find_task import UnknownTask, find_task

    try:
        use = find_task(spec).Use
    except UnknownTask:
        return model
    bases: Any = (model, use)
    return model if use is Section else create_model(model.__name__, __base__=bases, __doc__=model.__doc__)


def _task_name(run: Path) -> str | None:
    """Return the name of the task of a run, or the recipe of a model; None of anything else."""
    try:
        folder = local_path(run)
        bring_run(folder)
        return str(read_record(folder).task)
    except (OSError, BrokenRecord, PacelineError):
        return recipe_of_model(run)


def open_run(
    options: UseOptions, purpose: Purpose, changes: dict[str, Any], manifests: Mapping[str, Any]
) -> tuple[Task, TrainConfig, Link]:
    """Return the task of a run, its settings with those of this command, and the link to the other ranks.

    `manifests` says which setting `--manifest` stands for.
    """
    from paceline.world.start import from_settings

    record, task = _opened(options)
    values = {**record.settings, "device": options.device, **changes}
    typed = {name: getattr(options, name) for name in options.model_fields_set & set(task.Use.model_fields)}
    forgotten = task.Use.forgotten(typed)
    values = {name: value for name, value in values.items() if name not in forgotten} | typed
    for name, manifest in manifests.items():
        if manifest and name not in task.Settings.model_fields:
            raise Conflict(f"the task {record.task} reads no manifests", hint="leave out `--manifest`")
        values |= {name: manifest} if manifest else {}
    if options.level is not None:
        values |= {"level": options.level, "precision": None}  # a level asked for is not to be overruled by the run's
    for name in ("eval_batch", "limit_batches"):
        if getattr(options, name) is not None:
            values[name] = getattr(options, name)
    try:
        config = settings_of(task, options.run, values)
    except SettingsOutdated as outdated:
        settings_of(task, options.run, record.settings)  # raises where the run itself is the reason
        raise _wrong_options(task, typed, outdated.error, f"paceline {purpose}") from outdated
    return task, config, from_settings(config)


def _opened(options: UseOptions) -> tuple[RunRecord, Task]:
    """Return the record of a run, or of one that a model by itself could be of, and its task."""
    from paceline.train.apply import read_run
    from paceline.train.find_task import load_task
    from paceline.train.task import ReadsModels

    recipe = recipe_of_model(options.run)
    if recipe is None:
        record = read_run(options.run)
        return record, task_of(options.run, options.task, record)
    for name in ("checkpoint", "average", "task"):
        if name in options.model_fields_set:
            raise Conflict(
                f"{options.run} is a model by itself, not a run: `--{name}` has nothing to choose from",
                hint="leave it out",
            )
    task = load_task(recipe)
    assert isinstance(task, ReadsModels)
    return RunRecord(dict(task.model_settings(options.run)), recipe), task


def _wrong_options(task: Task, typed: Mapping[str, Any], error: ValidationError, prog: str) -> SettingsInvalid:
    """Return the mistake of options that do not go together, or not with the settings of the run."""

    def text(value: Any) -> str:
        if isinstance(value, tuple):
            return ",".join(map(text, value))
        return near(str(value))

    given = {name: Given(value, dashed(name), text(value), (WORDS, 0)) for name, value in typed.items()}
    by_field = messages.problems(error, task.Settings, given)
    problems = [*by_field.values(), *messages.across(error, task.Settings, given, set(by_field))]
    return SettingsInvalid(problems, prog)


def _sets(spec: str) -> Mapping[str, Any]:
    """Return validation sets by name: those that the function returned, or one that has the function's name."""
    data = call_data_function(spec)
    return data if isinstance(data, Mapping) else {spec.rpartition(":")[2]: data}


def call_data_function(spec: str) -> Any:
    """Return the data of `path/to/file.py:function`."""
    from paceline.core.user_file import guarded
    from paceline.train import find_task as tasks

    path, separator, name = spec.rpartition(":")
    if not separator:
        raise NoDataFunction(spec, "the name of a function is missing")
    try:
        module = tasks.import_file(Path(path))
    except tasks.UnknownTask as error:
        raise NoDataFunction(spec, str(error)) from error
    function = getattr(module, name, None)
    if not callable(function):
        raise NoDataFunction(spec, f"{path} has no function {name!r}")
    return guarded(Path(path), f"{name}() is called", function)
