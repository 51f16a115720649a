"""What to train: model, data, loss, metrics. A task knows nothing of ranks, devices or dtypes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.config.settings import OptimSettings, Section, TrainConfig
from paceline.core.errors import PacelineError
from paceline.data.grain import Batch, Grain
from paceline.observe.callback import Callback
from paceline.observe.throughput import RateWords
from paceline.optim import build
from paceline.world.discover.environment import World
from paceline.world.link import Link

if TYPE_CHECKING:
    from paceline.parallel.step import Step

Sums = tuple[Any, Any]
"""A metric as (sum, weight), divided once over all batches and ranks."""


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
    """A task without one of the three things that every task needs."""

    def __init__(self, task: Task, method: str, what: str) -> None:
        super().__init__(f"task {type(task).__name__} has no `{method.partition('(')[0]}`")
        self.hint = f"add `def {method}:` that returns {what}"


class NoInputs(PacelineError):
    """Files were given to a task that does not read any."""

    hint = "give the task a `read_inputs(words)`, or name a function that returns a data set: `--data file.py:function`"

    def __init__(self, task: Task, words: Sequence[str]) -> None:
        super().__init__(f"task {type(task).__name__} does not know what to do with {' '.join(words)}")


class NoExport(PacelineError):
    """A task that does not say what a model of its own is to other programs."""

    hint = "give it an `export(folder, weights, about)`; the checkpoint's model.safetensors has the weights, too"

    def __init__(self, task: Task) -> None:
        super().__init__(f"task {type(task).__name__} has no `export`")


class Task:
    """Subclass and fill in `model`, `train_data` and `loss`; everything else has a default.

    `settings`, `world` (ranks, for the rare task that wants to know), `say` and `gather` are set before anything is
    called.
    """

    Settings: type[TrainConfig] = TrainConfig
    """Settings of the task's own: a subclass of `TrainConfig` with more fields, or with other defaults."""
    Use: type[Section] = Section
    """Settings that `eval` and `infer` may choose anew: a section that is among the bases of `Settings`."""
    settings: TrainConfig
    spec: str = ""
    """How the command line finds this task again: a recipe's name, or `/path/to/file.py:ClassName`."""
    world: World
    say: Callable[[str], None]
    """Tells the user something, once for all ranks."""
    gather: Callable[[Any], list[Any]]
    """Everyone's value, by rank; all ranks must call it."""
    link: Link
    """The ranks themselves, for a task whose own tensors travel."""
    evaluating: Callable[[], AbstractContextManager[None]]
    """`with self.evaluating():` the model is as validation sees it; while training only, and all ranks must enter."""
    collate: Callable[[list[Any]], Any] | None = None
    """Samples of one grain into a batch; stacking if None."""

    monitor: str = "loss"
    """The metric of the first validation set that names the best checkpoint, unless the setting `monitor` does."""
    eval_cost: float | None = None
    """Padded length of a validation batch at most, in the unit of `lengths`, where no setting says how large it is."""
    length_unit: str = ""
    """What `lengths` count, for people: `seconds` (shown as hours), `tokens`, `frames`."""
    sample_unit: str = "samples"
    """What samples are, for people: `utterances`, `images`."""
    count_unit: str = ""
    """What `counts` count, for people, if its speed is worth showing: `tokens`."""
    rate_words: Mapping[str, RateWords] = {"seconds": RateWords("audio_hours_per_hour", "hours of audio per hour")}
    """Speeds whose name is not `UNIT_per_s`, by unit: a second of audio per second is an hour per hour."""

    # -- what to train -------------------------------------------------------------------------------------------

    def model(self) -> torch.nn.Module:
        raise TaskIncomplete(self, "model(self)", "the module to train")

    def train_data(self) -> Any:
        raise TaskIncomplete(self, "train_data(self)", "the data set to train on")

    def val_data(self) -> Mapping[str, Any]:
        """Validation sets by name."""
        return {}

    def loss(self, model: torch.nn.Module, grain: Grain) -> Any:
        """(sum of losses, how many) of one grain; a third value is handed to `after_step`."""
        raise TaskIncomplete(self, "loss(self, model, grain)", "(sum of losses, how many)")

    def metrics(self, model: torch.nn.Module, grain: Grain) -> Mapping[str, Sums]:
        """Validation metrics of one batch as name -> (sum, weight)."""
        total, count, *_ = self.loss(model, grain)
        return {"loss": (total, count)}

    def samples(self, model: torch.nn.Module, grain: Grain) -> Sequence[Mapping[str, str]]:
        """What validation shows of a few samples beside numbers, as texts by name: a reference and a hypothesis."""
        return []

    def read_inputs(self, words: Sequence[str]) -> Any:
        """The data set that `paceline infer RUN WORDS...` means; its `names`, if it has some, name the predictions."""
        raise NoInputs(self, words)

    def read_weights(self, path: Path) -> Mapping[str, torch.Tensor] | None:
        """Weights by name from a file of the task's own kind, for `init_from`; None: it is none, read it as usual."""
        return None

    def export(self, folder: Path, weights: Mapping[str, torch.Tensor], about: Mapping[str, Any]) -> None:
        """Write a model of these weights for programs that know nothing of Paceline; `about` says where it is from."""
        raise NoExport(self)

    def about(self) -> dict[str, Any]:
        """What a model of this task must be known by wherever its checkpoint goes: plain values, kept in each one."""
        return {}

    def infer_data(self) -> Any:
        """What inference predicts if no other data is named: the first validation set. None: there is nothing."""
        return next(iter(self.val_data().values()), None)

    def predict(self, model: torch.nn.Module, grain: Grain) -> Any:
        """What inference returns for one batch: a tensor or a list with one entry per sample."""
        raise NotImplementedError("this task has no `predict(model, grain)`")

    def train_collate(self, data: Any) -> Callable[[list[Any]], Any] | None:
        """How samples of `data` become a grain in training, where that is not as in validation."""
        return self.collate

    def accelerate(self, model: torch.nn.Module) -> Sequence[str]:
        """Let kernels of the task's own stand in for modules of the model, which keeps its weights and their names; it
        is on its device and in training (`-O4`). Returns which parts stay without one, and why: a compiler may do
        something for those. Raises `CannotRun` where nothing can be done for this model."""
        return []

    def recordable(self, grain: Grain) -> Any:
        """The grain's data as tensors alone, in dictionaries, tuples and lists.

        A task that has this says that its loss of such a grain can be recorded as a CUDA graph (`-O4`): it never waits
        for the device, decides nothing by values, draws random numbers from torch alone, and what it counts follows
        from the shapes."""
        return grain.data

    def optimizer(
        self, groups: list[dict[str, Any]], settings: OptimSettings, device: torch.device
    ) -> torch.optim.Optimizer:
        return build.optimizer(settings, groups, device)

    def stages(self) -> Sequence[Stage]:
        return [Stage("train", self.train_data)]

    def lengths(self, data: Any) -> NDArray[Any] | None:
        """Cost of each sample (seconds, tokens) for batching and balance: the data set's own `lengths`, if any."""
        lengths = getattr(data, "lengths", None)
        return None if lengths is None else np.asarray(lengths)

    def counts(self, data: Any) -> NDArray[Any] | None:
        """What each sample adds to the loss count, if not 1: the data set's own `counts`, if it has some."""
        counts = getattr(data, "counts", None)
        return None if counts is None else np.asarray(counts)

    def flops(self, model: torch.nn.Module) -> float | None:
        """Floating-point operations of training (forward and backward) on one unit of `lengths`, or on one sample where
        there are none; the epoch line then says what share of the device's peak that is. None: not known."""
        return None

    def watchers(self) -> Sequence[Callback]:
        """Callbacks and loggers of the task's own; only the first rank is asked for them."""
        return []

    # -- hooks ---------------------------------------------------------------------------------------------------

    def before_stage(self, model: torch.nn.Module, stage: int) -> None:
        """Before a stage's first step. On resume it is called again for all stages up to the current one, in order,
        so that a model that grows has its shape before its weights are loaded."""

    def before_step(self, model: torch.nn.Module, batch: Batch) -> None:
        """Before a step's first forward, on all ranks, also on those that have no grain of this batch."""

    def after_backward(self, model: torch.nn.Module) -> None:
        """Gradients are complete (reduced, unscaled), not yet clipped or used."""

    def after_step(self, model: torch.nn.Module, step: Step, grains: list[Grain]) -> None:
        """After the update, with this rank's grains (`grain.samples` are ids in the data set) and `step.outputs`."""

    def after_stage(self, model: torch.nn.Module, stage: int) -> None:
        """After a stage's last step."""

    def report(self) -> None:
        """After an epoch and its validation, an evaluation, a prediction: the moment to `say` what was noticed in it.
        All ranks call it."""

    def state(self) -> dict[str, torch.Tensor]:
        """Tensors of the task's own that belong into a checkpoint. All ranks call it, the first one's are saved."""
        return {}

    def load_state(self, state: dict[str, torch.Tensor]) -> None:
        """The counterpart of `state`."""


def attach(task: Task, settings: TrainConfig, link: Link, say: Callable[[str], None]) -> None:
    """Put a task to work on a rank: what it may know of the run, before any of it is asked for."""
    task.settings, task.world, task.gather, task.say = settings, link.world, link.gather_objects, say
    task.link = link


def overrides(task: Task, hook: str) -> bool:
    """Whether a task has its own version of a hook, so that the loop pays only for hooks that do something."""
    return getattr(type(task), hook) is not getattr(Task, hook)
