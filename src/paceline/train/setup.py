"""Set-up of a task: the same steps to a prepared engine for training, for timing candidates and for using a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from paceline.config.settings import TrainConfig
from paceline.core.errors import PacelineError
from paceline.core.keys import key
from paceline.core.run_folder import RunFolder
from paceline.core.secrets import masked
from paceline.data.grain import Grain
from paceline.observe import loggers
from paceline.observe.callback import Callback, checked
from paceline.optim import build, larc
from paceline.parallel.step import Step
from paceline.speed.precision import Precision
from paceline.train.checkpoint import reader
from paceline.train.checkpoint.format import STATE
from paceline.train.engine import Engine
from paceline.train.probe import Probe
from paceline.train.task import HasWatchers, ReadsWeights, Task, overrides


def prepare(
    engine: Engine, task: Task, config: TrainConfig, model: torch.nn.Module, *, is_for_now: bool = False
) -> larc.Larc | None:
    """Give a model its parameter groups and its optimizer, and prepare both. Returns LARC, where it is asked for."""
    optimizer = task.optimizer(build.groups(model, config), config, engine.device)
    layerwise = larc.attach(optimizer, config)
    engine.prepare(model, optimizer, is_for_now=is_for_now)
    return layerwise


def begin_stage(task: Task, config: TrainConfig, model: torch.nn.Module, number: int) -> None:
    """Let the task change the model for a stage, with the same random numbers whenever and wherever it is called.

    On resume, and when a run is used, it is called for all stages that had begun: see `Position.num_begun_stages`.
    """
    torch.manual_seed(key(config.seed, number))  # for layers that a task adds
    task.before_stage(model, number)


def few_shapes(
    config: TrainConfig, chosen: Precision, device: torch.device, checkpoint: reader.Checkpoint | None
) -> bool:
    """Return True if batches should come in few shapes: at `-O4`, and on a GPU from `-O2` on and in fp16.

    A resumed run goes on as it began.
    """
    if config.level == 4:
        return True
    if checkpoint is not None:
        return bool(checkpoint.state.get("few_shapes", False))
    return device.type == "cuda" and (chosen.level >= 2 or chosen.scaled)


class NoStartWeights(PacelineError):
    """A path for `init_from` that is no checkpoint."""

    path: Path
    sentence = "--init-from {shown}: {why}"
    hint = "name a checkpoint, which is a folder like RUN/checkpoints/step-00000120"

    @property
    def shown(self) -> str:
        return masked(str(self.path))

    @property
    def why(self) -> str:
        if RunFolder(self.path).is_run:
            return "it is a run, not one of its checkpoints"
        return "it is no checkpoint" if self.path.exists() else "there is no such folder"


def load_weights(model: torch.nn.Module, task: Task, path: Path | None, say: Callable[[str], None]) -> None:
    """Load by name the weights that a new run starts from (`init_from`): a checkpoint, or a file of the task's kind."""
    if path is None:
        return
    weights = task.read_weights(path) if isinstance(task, ReadsWeights) else None
    if weights is None:
        if not (path / STATE).is_file():
            raise NoStartWeights(path)
        weights = reader.load(path, ["model"]).parts["model"]
    say(reader.load_by_name(model, weights).line(path))


def after_step(task: Task, probe: Probe | None) -> Callable[[torch.nn.Module, Step, list[Grain]], None] | None:
    """Return the hooks that follow a step as one, None if there are none: the task's, then the probe's."""
    hook = task.after_step if overrides(task, "after_step") else None
    if probe is None:
        return hook

    def both(model: torch.nn.Module, step: Step, grains: list[Grain]) -> None:
        if hook is not None:
            hook(model, step, grains)
        probe.after_step(step, grains)

    return both


def callbacks(
    task: Task, config: TrainConfig, say: Callable[[str], None], more: Sequence[Callback] = ()
) -> list[Callback]:
    """Return the loggers of the settings, the callbacks of the task, and `more`; for the first rank."""
    installed, missing = loggers.build(config.loggers, is_asked="loggers" in config.model_fields_set)
    for name in missing:
        say(f"{name} is not installed: metrics go to metrics.jsonl alone (`pip install {name}`)")
    of_task = task.watchers() if isinstance(task, HasWatchers) else ()
    return [*installed, *checked(of_task), *checked(more)]
