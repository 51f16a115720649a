"""Task: what to train. Model, data, loss, metrics and a few hooks; a task knows nothing of ranks, devices or dtypes.

`Task` is what every task has. What only some tasks need (stages, export, kernels of their own, inputs from files) is in
small base classes below it: `class Mine(Task, HasStages)`.
"""

from __future__ import annotations

import copy
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Generic, cast, get_args, get_origin

import torch
from numpy.typing import NDArray
from torch.optim.lr_scheduler import LRScheduler
from typing_extensions import Self, TypeVar

from paceline.config.compared import shared_settings
from paceline.config.mode import Purpose
from paceline.config.named_sets import name_sets
from paceline.config.settings import OptimSettings, Section, TrainConfig
from paceline.core.errors import Conflict, PacelineError, TaskContract
from paceline.core.together import Exclusion
from paceline.core.units import counted
from paceline.core.user_file import code_of
from paceline.data.dataset import DatasetTraits
from paceline.data.grain import Batch, Grain
from paceline.data.packed.dataset import open_files
from paceline.observe.callback import Callback
from paceline.observe.throughput import RateWords
from paceline.optim import build
from paceline.train.metrics import Gathered, TorchMetric
from paceline.world.consistency import check_same
from paceline.world.discover.environment import World
from paceline.world.link import Link

if TYPE_CHECKING:
    from paceline.parallel.step import Step

Sums = tuple[Any, Any]
"""A metric as (sum, weight), divided once over all batches and ranks."""
Metric = Sums | Gathered | TorchMetric
"""A metric of one validation batch."""
Collate = Callable[[list[Any]], Any]


@dataclass(frozen=True)
class Stage:
    """A part of a run with its own data: the only one for most tasks, one per experience in continual learning."""

    name: str
    data: Any
    """The data set (map-style or iterable), or a function without arguments that makes it when the stage begins."""
    epochs: int | None = None
    """Instead of the run's `epochs`."""
    restart_optimizer: bool = False
    restart_schedule: bool = False


class TaskIncomplete(PacelineError):
    """A task lacks one of the three methods that every task needs."""

    task_name: str
    method_name: str
    parameters: str
    what: str
    sentence = "task {task_name} has no `{method_name}`"
    hint = "add `def {method_name}({parameters}):` that returns {what}"


class NotAttached(PacelineError, AttributeError):
    """An attribute of a task was read before a run attached the task."""

    task_name: str
    attribute: str
    sentence = "task {task_name} has no `{attribute}` yet: no run has begun"
    hint = "read `self.{attribute}` in `model`, `train_data` and what is called later, not in `__init__`"


class FilesForStages(PacelineError):
    """One data set for a task that trains on several, one after the other."""

    task_name: str
    excludes = (
        Exclusion(
            "`--train-files`",
            "a task with stages",
            "one thing twice",
            "The stages bring their own data.",
        ),
    )
    sentence = "`train_files` is set, but the task {task_name} has stages with data of their own"
    hint = "leave out `--train-files`; `paceline.PackedDataset` reads packed files in `stages()`"


def _not_training() -> AbstractContextManager[None]:
    raise TaskContract(
        "`self.evaluating()` is only available during training",
        hint="in `eval` and `infer` the model is in evaluation mode already",
    )


def _not_logged(name: str, total: Any, weight: Any) -> None:
    """Numbers of training are not wanted where nothing is trained."""


@dataclass(frozen=True)
class Surroundings:
    """The run around a task: everything that it may know of it, as one object."""

    settings: TrainConfig
    link: Link
    """The ranks, for a task whose own tensors travel."""
    say: Callable[[str], None]
    """Shows the user a line, once for all ranks."""
    evaluating: Callable[[], AbstractContextManager[None]] = _not_training
    """`with self.evaluating():` the model is as validation sees it; while training only, and all ranks must enter."""
    few_shapes: bool = False
    """Training batches should come in few shapes: see `Task.train_collate`."""
    log: Callable[[str, Any, Any], None] = _not_logged
    """Takes a number of training, as (name, sum, weight)."""
    purpose: Purpose = "train"


S_co = TypeVar("S_co", bound=TrainConfig, default=TrainConfig, covariant=True)


class Task(Generic[S_co]):
    """Subclass and fill in `model`, `train_data` and `loss`; everything else has a default.

    `class Mine(paceline.Task[MySettings])` has settings of its own, and `self.settings` is of that type.

    `settings`, `say`, `gather`, and for the rare task that wants to know of ranks `world` and `link`, are there before
    anything is called: whoever runs a task attaches it first.
    """

    Settings = TrainConfig  # without a type, so that checkers know what the constructor of a task's own takes
    """Settings of the task's own: a subclass of `TrainConfig` with more fields, or with other defaults. The one in
    `Task[...]`, if that is how the class is written."""
    Use: type[Section] = Section
    """Settings that `eval` and `infer` may choose anew: a section that is among the bases of `Settings`."""
    spec: str = ""
    """Address of this task for the command line: a recipe's name, or `/path/to/file.py:ClassName`."""
    collate: Collate | None = None
    """Joins the samples of one grain into a batch; stacking if None."""

    monitor: str = "loss"
    """The metric of the first validation set that names the best checkpoint, unless the setting `monitor` does."""
    eval_cost: float | None = None
    """Padded length of a validation batch at most, in the unit of `lengths`, where no setting says how large it is."""
    length_unit: str = ""
    """Unit of `lengths`, for people: `seconds` (shown as hours), `tokens`, `frames`."""
    sample_unit: str = "samples"
    """Name of samples, for people: `utterances`, `images`."""
    count_unit: str = ""
    """Unit of `counts`, for people, if its speed is worth showing: `tokens`."""
    rate_words: Mapping[str, RateWords] = {}
    """Names of speeds that are not called `UNIT_per_s`, by unit."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "Settings" in vars(cls):
            return
        for base in vars(cls).get("__orig_bases__", ()):
            for settings in get_args(base) if isinstance(get_origin(base), type) else ():
                if isinstance(settings, type) and issubclass(settings, TrainConfig):
                    cls.Settings = settings

    # -- what to train -------------------------------------------------------------------------------------------

    def model(self) -> torch.nn.Module:
        raise TaskIncomplete(type(self).__name__, "model", "self", "the module to train")

    def train_data(self) -> Any:
        raise TaskIncomplete(type(self).__name__, "train_data", "self", "the data set to train on")

    def val_data(self) -> Mapping[str, Any]:
        """Return validation sets by name."""
        return {}

    def loss(self, model: torch.nn.Module, grain: Grain) -> Any:
        """Return (sum of losses, count) of one grain; a third value is handed to `after_step`."""
        raise TaskIncomplete(type(self).__name__, "loss", "self, model, grain", "(sum of losses, how many)")

    def metrics(self, model: torch.nn.Module, grain: Grain) -> Mapping[str, Metric]:
        """Return validation metrics of one batch by name: a pair (sum, weight), `Gathered`, or a torchmetrics object
        that was updated with the batch."""
        total, count, *_ = self.loss(model, grain)
        return {"loss": (total, count)}

    def predict(self, model: torch.nn.Module, grain: Grain) -> Any:
        """Return predictions for one batch: a tensor or a list with one entry per sample."""
        raise NotImplementedError("this task has no `predict(model, grain)`")

    def train_collate(self, data: Any) -> Collate | None:
        """Return the collate function of training, `collate` by default. Where `self.few_shapes` is True, it should
        return few shapes: GPU libraries plan, and CUDA graphs are recorded, for one shape at a time."""
        return self.collate

    def infer_data(self) -> Any:
        """Return the data set to predict if none is named, the first validation set by default; None if there is
        none."""
        return next(iter(val_data_of(self).values()), None)

    def pack_data(self) -> Mapping[str, Any]:
        """Return what `paceline pack` writes, where that is not the data of training and validation: map-style data
        sets by name, of tensors, arrays, numbers and texts."""
        return {}

    def example_inputs(self, grain: Grain) -> Sequence[Any]:
        """Return the positional arguments of the model for a grain, for `paceline export --format onnx`: `grain.x` by
        default."""
        return (grain.data if isinstance(grain.data, torch.Tensor) else grain.x,)

    def optimizer(
        self, groups: list[dict[str, Any]], settings: OptimSettings, device: torch.device
    ) -> torch.optim.Optimizer:
        return build.optimizer(settings, groups, device)

    def scheduler(self, optimizer: torch.optim.Optimizer, num_steps: int | None) -> LRScheduler | None:
        """Return a torch scheduler of this optimizer, or None for the settings' `schedule`.

        It is stepped after every step (`ReduceLROnPlateau` after every validation, with the monitored score) and saved
        in checkpoints. `num_steps` is the number of steps of the run, None if unknown."""
        return None

    def watchers(self) -> Sequence[Callback]:
        """Return callbacks and loggers of the task; called on the first rank only."""
        return ()

    # -- hooks, called on every rank -----------------------------------------------------------------------------

    def before_stage(self, model: torch.nn.Module, stage: int) -> None:
        """Run before a stage's first step. On resume it is called again for all stages up to the current one, in order,
        so that a model that grows has its shape before its weights are loaded."""

    def before_step(self, model: torch.nn.Module, batch: Batch) -> None:
        """Run before a step's first forward, also on ranks that have no grain of this batch."""

    def after_backward(self, model: torch.nn.Module) -> None:
        """Run when gradients are complete (reduced, unscaled), not yet clipped or used."""

    def after_step(self, model: torch.nn.Module, step: Step, grains: list[Grain]) -> None:
        """Run after the update, with this rank's grains (`grain.samples` are ids in the data set) and
        `step.outputs`."""

    def after_stage(self, model: torch.nn.Module, stage: int) -> None:
        """Run after a stage's last step."""

    # -- surroundings --------------------------------------------------------------------------------------------

    _surroundings: Surroundings | None = None

    def attach(self, surroundings: Surroundings) -> None:
        """Put the task to work in a run, before anything of it is called. A later call replaces the surroundings."""
        self._surroundings = surroundings
        for line in methods_without_effect(self):
            surroundings.say(line)

    def detached(self) -> Self:
        """Return a copy that is in no run, and can be handed to another process."""
        copied = copy.copy(self)
        copied._surroundings = None
        return copied

    def _around(self, name: str) -> Surroundings:
        if self._surroundings is None:
            raise NotAttached(type(self).__name__, name)
        return self._surroundings

    @property
    def settings(self) -> S_co:
        return cast(S_co, self._around("settings").settings)

    @property
    def purpose(self) -> Purpose:
        """`train`; or `eval` or `infer`, which use a trained model and leave its run as it is."""
        return self._around("purpose").purpose

    @property
    def link(self) -> Link:
        """The ranks, for a task whose own tensors travel."""
        return self._around("link").link

    @property
    def world(self) -> World:
        """Rank, number of ranks and hosts."""
        return self._around("world").link.world

    @property
    def few_shapes(self) -> bool:
        """True if training batches should come in few shapes: see `train_collate`."""
        return self._around("few_shapes").few_shapes

    @property
    def say(self) -> Callable[[str], None]:
        """`self.say(text)` shows the user a line, once for all ranks."""
        return self._around("say").say

    def log(self, name: str, total: Any, weight: Any = 1.0) -> None:
        """Log a number of training, as a sum and its weight: all grains, ranks and steps since the last log line are
        added, then divided once. It goes where the loss goes: `metrics.jsonl`, TensorBoard, the report. Does nothing in
        validation, and outside of training."""
        self._around("log").log(name, total, weight)

    @property
    def gather(self) -> Callable[[Any], list[Any]]:
        """`self.gather(value)` returns every rank's value, by rank; all ranks must call it.

        Numbers, text, bytes, paths, lists, tuples, dictionaries, sets, tensors, arrays, dataclasses and named tuples.
        """
        return self._around("gather").link.gather_objects

    @property
    def evaluating(self) -> Callable[[], AbstractContextManager[None]]:
        """`with self.evaluating():` the model is as validation sees it; while training only, and all ranks must
        enter."""
        return self._around("evaluating").evaluating


def check_ranks(task: Task, settings: TrainConfig, link: Link) -> None:
    """Raise `RanksDisagree` unless all ranks run the same task with the same settings. All ranks must call it."""
    if link.has_group:
        code = {f"code of {name}": digest for name, digest in code_of(type(task)).items()}
        check_same(link, {"task": type(task).__name__} | shared_settings(settings) | code)


def overrides(task: Task, hook: str) -> bool:
    """Return True if a task has its own version of a hook, so that the loop pays only for hooks that do something."""
    return getattr(type(task), hook, None) is not getattr(Task, hook, None)


# -- what some tasks have ----------------------------------------------------------------------------------------------


class HasStages(ABC):
    """Base class of a task whose run has several parts, each with its own data."""

    @abstractmethod
    def stages(self) -> Sequence[Stage]:
        """Return the parts, in the order of training."""


class HasLengths:
    """Base class of a task that measures samples itself; by default the data set does."""

    def lengths(self, data: Any) -> NDArray[Any] | None:
        """Return the cost of each sample (seconds, tokens) for batching and balance; None if all are equal."""
        return DatasetTraits(data).lengths

    def counts(self, data: Any) -> NDArray[Any] | None:
        """Return what each sample adds to the loss count; None if that is 1."""
        return DatasetTraits(data).counts


class SavesState:
    """Base class of a task with state of its own in each checkpoint."""

    def state(self) -> dict[str, torch.Tensor]:
        """Return the tensors to save. Called on all ranks; those of the first rank are saved."""
        return {}

    def load_state(self, state: dict[str, torch.Tensor]) -> None:
        """Restore what `state` returned."""

    def about(self) -> dict[str, Any]:
        """Return plain values that describe the model; they are copied with every checkpoint and export."""
        return {}


class StepsSchedulers(ABC):
    """Base class of a task that steps torch schedulers itself, such as once per epoch."""

    @abstractmethod
    def schedulers(self) -> Mapping[str, LRScheduler]:
        """Return the schedulers by name, for checkpoints; called once `optimizer` has returned."""


class Reports:
    """Base class of a task with numbers and lines of its own in the output of a run."""

    def summary_rows(self) -> Sequence[tuple[str, str]]:
        """Return names and values for the summary before the first step, such as how data is augmented; called once
        the training data is loaded."""
        return ()

    def flops(self, model: torch.nn.Module) -> float | None:
        """Return the floating-point operations of training (forward and backward) on one unit of `lengths`, or on one
        sample without lengths; None if unknown. The epoch line then has the share of the device's peak."""
        return None

    def analysis(self, name: str, data: Any) -> Mapping[str, float]:
        """Return numbers that are not metrics (which errors, on which samples) about the validation set that `metrics`
        was just called for. Called on all ranks; the journal keeps those of the first."""
        return {}

    def report(self) -> None:
        """Use `say` to show findings after an epoch and its validation, an evaluation or a prediction. Called on all
        ranks."""


class ShowsSamples(ABC):
    """Base class of a task whose validation shows texts of a few samples."""

    @abstractmethod
    def samples(self, model: torch.nn.Module, grain: Grain) -> Sequence[Mapping[str, str]]:
        """Return texts by name for each sample, such as a reference and a hypothesis."""


class ReadsInputs(ABC):
    """Base class of a task that predicts inputs named on the command line: `paceline infer RUN WORDS...`."""

    @abstractmethod
    def read_inputs(self, words: Sequence[str]) -> Any:
        """Return the data set that the words mean; its `names`, if it has some, name the predictions."""


class StreamsInputs(ReadsInputs):
    """Base class of a task that predicts some inputs piece by piece while it reads them, such as live audio."""

    @abstractmethod
    def is_stream(self, words: Sequence[str]) -> bool:
        """Return True if these inputs are to be read piece by piece."""

    @abstractmethod
    def stream(self, model: torch.nn.Module, words: Sequence[str], out: IO[str], *, as_json: bool) -> int:
        """Predict the inputs, and write to `out` as text or JSON comes; return the number of lines."""


class ReadsWeights(ABC):
    """Base class of a task that reads weights from files of its own format, for `init_from`."""

    @abstractmethod
    def read_weights(self, path: Path) -> Mapping[str, torch.Tensor] | None:
        """Return weights by name; None if the file has another format and is to be read as a checkpoint."""


class ReadsModels(ReadsWeights):
    """Base class of a recipe that reads whole models, for `paceline eval MODEL` and `infer MODEL` without a run."""

    @abstractmethod
    def model_settings(self, path: Path) -> Mapping[str, Any]:
        """Return settings under which `model()` is the model of this file, and `read_weights` fit it. Called before
        the task is attached to anything."""


class Exports(ABC):
    """Base class of a task that writes its model in a format for other programs: `paceline export`."""

    @abstractmethod
    def export(self, folder: Path, weights: Mapping[str, torch.Tensor], about: Mapping[str, Any]) -> None:
        """Write a model of these weights; `about` names its run and checkpoint."""


class Accelerates(ABC):
    """Base class of a task with kernels of its own (`auto` and `-O4`)."""

    @abstractmethod
    def accelerate(self, model: torch.nn.Module) -> Sequence[str]:
        """Replace modules of the model by kernels; it keeps its weights and their names, is on its device and in
        training. Return which parts stay without one, and why: a compiler may do something for those. Raise `CannotRun`
        where nothing can be done for this model."""


class Recordable(ABC):
    """Base class of a task whose loss can be recorded as a CUDA graph (`auto`, `-O4`): it never waits for the device,
    decides nothing by values, draws random numbers from torch alone, and its count follows from the shapes."""

    @property
    def can_record(self) -> bool:
        """False if the settings ask for a loss that cannot be recorded."""
        return True

    @abstractmethod
    def recordable(self, grain: Grain) -> Any:
        """Return the grain's data as tensors alone, in dictionaries, tuples and lists."""


OPT_IN = (
    *(HasStages, HasLengths, SavesState, StepsSchedulers, Reports, ShowsSamples, ReadsInputs, StreamsInputs),
    *(ReadsWeights, ReadsModels, Exports, Accelerates, Recordable),
)
"""All base classes that a task may have besides `Task`."""


def methods_without_effect(task: Task) -> list[str]:
    """Return a line for each method that looks like one of a base class which the task does not have."""
    name = type(task).__name__
    return [
        f"task {name} defines `{method}`, but does not inherit from `paceline.{base.__name__}`: it has no effect"
        for base in OPT_IN
        if not isinstance(task, base)
        for method, declared in vars(base).items()
        if not method.startswith("_") and _is_like(getattr(type(task), method, None), declared)
    ]


def _is_like(method: Any, declared: Any) -> bool:
    """Return True if both are functions with the same number of parameters."""
    if not (inspect.isfunction(method) and inspect.isfunction(declared)):
        return False
    return len(inspect.signature(method).parameters) == len(inspect.signature(declared).parameters)


# -- their defaults ----------------------------------------------------------------------------------------------------


def stages_of(task: Task) -> Sequence[Stage]:
    around = task._surroundings  # a task that no run has yet has its own data
    files = () if around is None else around.settings.train_files
    if not isinstance(task, HasStages):
        return [Stage("train", partial(open_files, files) if files else task.train_data)]
    if files:
        raise FilesForStages(type(task).__name__)
    return task.stages()


def val_data_of(task: Task) -> Mapping[str, Any]:
    """Return validation sets by name: those that the settings name, else the task's."""
    around = task._surroundings
    words = () if around is None else around.settings.val_files
    return {name: open_files(paths) for name, paths in name_sets(words).items()} if words else task.val_data()


def lengths_of(task: Task, data: Any) -> NDArray[Any] | None:
    """Return the cost of each sample: the task's `lengths`, else the data set's, else None."""
    return task.lengths(data) if isinstance(task, HasLengths) else DatasetTraits(data).lengths


def counts_of(task: Task, data: Any) -> NDArray[Any] | None:
    """Return what each sample adds to the loss count: the task's `counts`, else the data set's, else None."""
    return task.counts(data) if isinstance(task, HasLengths) else DatasetTraits(data).counts


def summary_rows_of(task: Task) -> Sequence[tuple[str, str]]:
    return task.summary_rows() if isinstance(task, Reports) else ()


def read_inputs(task: Task, words: Sequence[str]) -> Any:
    """Return the data set that words on the command line mean to the task."""
    if not isinstance(task, ReadsInputs):
        raise TaskContract(
            f"task {type(task).__name__} cannot read {' '.join(words)}",
            hint="inherit from `paceline.ReadsInputs`, or name a function that returns a data set: "
            "`--data file.py:function`",
        )
    return task.read_inputs(words)


def export(task: Task, folder: Path, weights: Mapping[str, torch.Tensor], about: Mapping[str, Any]) -> None:
    """Write a model for other programs."""
    if not isinstance(task, Exports):
        raise TaskContract(
            f"task {type(task).__name__} has no `export`",
            hint="inherit from `paceline.Exports`; the checkpoint's model.safetensors has the weights, too",
        )
    task.export(folder, weights, about)


def accelerate(task: Task, model: torch.nn.Module) -> Sequence[str]:
    """Put the task's kernels into a model, if it has some; return which parts stay without one, and why."""
    return task.accelerate(model) if isinstance(task, Accelerates) else []


def recordable_of(task: Task) -> Callable[[Grain], Any]:
    """Return the function that makes a grain recordable; asked only of tasks that have one."""
    assert isinstance(task, Recordable)
    return task.recordable


def report(task: Task) -> None:
    if isinstance(task, Reports):
        task.report()


def state_of(task: Task) -> dict[str, torch.Tensor]:
    return task.state() if isinstance(task, SavesState) else {}


def about_of(task: Task) -> dict[str, Any]:
    return task.about() if isinstance(task, SavesState) else {}


def check_saved(task: Task, parts: Mapping[str, Mapping[str, Any]], begun_stages: int, stages: int) -> None:
    """Raise `Conflict` if a checkpoint has something of its task that this task does not take back."""
    name = type(task).__name__
    if begun_stages > stages:
        raise Conflict(
            f"the run has begun stage {begun_stages} of its task, and the task {name} has {counted(stages, 'stage')}",
            hint="give it the stages that it had; a task with stages inherits from `paceline.HasStages`",
        )
    saved = {
        SavesState: bool(parts.get("task")),
        StepsSchedulers: any(key.startswith("task.") for key in parts.get("schedulers", {})),
    }
    for base, is_saved in saved.items():
        if is_saved and not isinstance(task, base):
            what = "tensors" if base is SavesState else "torch schedulers"
            raise Conflict(
                f"the checkpoint has {what} of its task, and the task {name} does not inherit from "
                f"`paceline.{base.__name__}`: they would be lost",
                hint=f"write `class {name}(paceline.Task, paceline.{base.__name__})`: see docs/task.md",
            )


def load_state(task: Task, state: dict[str, torch.Tensor]) -> None:
    if isinstance(task, SavesState):
        task.load_state(state)
