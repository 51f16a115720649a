"""Set-up of a task: the same steps to a prepared engine for training, for timing candidates and for using a run."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import torch
from torch.optim.lr_scheduler import LRScheduler

from paceline.config.settings import BuiltInLogger, BuiltInOptimizer, BuiltInSchedule, TrainConfig
from paceline.core import plugins
from paceline.core.cloud.address import shown
from paceline.core.cloud.file_copy import bring_folder, bring_parts
from paceline.core.cloud.run_copy import bring_run
from paceline.core.errors import NotFound, TaskContract
from paceline.core.keys import key
from paceline.core.run_folder import CHECKPOINTS, RunFolder
from paceline.core.secrets import masked
from paceline.observe import loggers
from paceline.observe.callback import Callback, checked
from paceline.observe.forgiving import Forgiving
from paceline.optim import build, larc
from paceline.speed.precision import Precision
from paceline.train import exchange, rates
from paceline.train.checkpoint import reader
from paceline.train.checkpoint.contents import RunValues
from paceline.train.checkpoint.format import DIGESTS, STATE, listed
from paceline.train.stepper import Stepper
from paceline.train.task import ReadsWeights, StepsSchedulers, Task, overrides
from paceline.world.discover.plugin_launchers import BUILT_IN, plugin_of


def prepare(stepper: Stepper, task: Task, config: TrainConfig, model: torch.nn.Module) -> larc.Larc | None:
    """Give a model its parameter groups and its optimizer, and prepare both. Returns LARC, if the settings ask for it.

    A model whose precision is still to be chosen (`-O4`) is prepared again after the choice, and not sharded before.
    """
    optimizer = check_optimizer(task, task.optimizer(build.groups(model, config), config, stepper.device))
    rates.mark_own(optimizer, config.lr)
    layerwise = larc.attach(optimizer, config)
    stepper.prepare(model, optimizer, shards=not stepper.precision.is_open)
    schedulers = task.schedulers() if isinstance(task, StepsSchedulers) else {}
    if not isinstance(schedulers, Mapping):
        raise TaskContract(
            f"`schedulers` of task {type(task).__name__} returned {_kind(schedulers)}, not a dictionary",
            hint='name each scheduler, because checkpoints have its state by name: `return {"warmup": scheduler}`',
        )
    for name, scheduler in schedulers.items():
        stepper.schedulers.add(f"task.{name}", scheduler, optimizer)
    return layerwise


def plugins_of(task: Task, config: TrainConfig, launcher: str) -> list[plugins.Plugin]:
    """Return the plugins that a run uses. A name that more than one package has, or we have, too, is refused."""
    names: list[tuple[plugins.Group, str, Collection[str]]] = [
        ("optimizers", config.optimizer, get_args(BuiltInOptimizer)),
        ("schedules", config.schedule, get_args(BuiltInSchedule)),
        *(("loggers", name, get_args(BuiltInLogger)) for name in config.loggers),
    ]
    named = [plugin for group, name, own in names if (plugin := plugins.find(group, name, own)) is not None]
    home = f"{type(task).__module__}:{type(task).__qualname__}"
    recipes = [
        plugin
        for plugin in plugins.installed().of("recipes")
        if not plugin.is_ours and (task.spec == plugin.name or plugin.value == home)
    ]
    launchers = [plugin_of(launcher)] if launcher not in BUILT_IN else []
    return [*recipes[:1], *named, *(each for each in launchers if each is not None)]


def _kind(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"{type(value).__name__} of {', '.join(type(entry).__name__ for entry in value)}"
    return type(value).__name__


def _advice(value: Any) -> str:
    """Return what to do about a task's `optimizer` that returned this value instead of an optimizer."""
    entries = value.values() if isinstance(value, dict) else value
    flat = list(_flat(entries)) if isinstance(value, list | tuple | dict) else []
    if any(isinstance(entry, LRScheduler) for entry in flat):
        return "return the optimizer alone, and the scheduler from `def scheduler(self, optimizer, num_steps):`"
    if sum(isinstance(entry, torch.optim.Optimizer) for entry in flat) > 1:
        return (
            "a task trains one model with one optimizer; parts with other rates are groups of that optimizer. "
            "Models that take turns (a GAN) are two engines in a loop of your own: docs/own-loop.md"
        )
    return "return a torch.optim.Optimizer"


def _flat(entries: Iterable[Any]) -> Iterator[Any]:
    for entry in entries:
        if isinstance(entry, list | tuple):
            yield from _flat(entry)
        else:
            yield entry


def check_optimizer(task: Task, optimizer: Any) -> torch.optim.Optimizer:
    """Return what a task's `optimizer` returned, if it is one."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TaskContract(
            f"`optimizer` of task {type(task).__name__} returned {_kind(optimizer)}, not one torch optimizer",
            hint=_advice(optimizer),
        )
    return optimizer


def follow(
    stepper: Stepper,
    task: Task,
    schedule: Callable[[int], float],
    config: TrainConfig,
    num_steps: int | None,
    say: Callable[[str], None],
) -> list[str]:
    """Let the stepper follow the schedule of the settings and the task's own; return what there is to tell of it."""
    stepper.follow(schedule, peak=config.lr, tell=say)
    if overrides(task, "scheduler") and stepper.schedulers.stepped is None:
        scheduler: Any = task.scheduler(stepper.optimizer, num_steps)
        if scheduler is not None:  # None: the settings' schedule after all
            if not isinstance(scheduler, LRScheduler):
                raise TaskContract(
                    f"`scheduler` of task {type(task).__name__} returned {_kind(scheduler)}, not a torch scheduler",
                    hint="return one of `torch.optim.lr_scheduler`, or None for the settings' `schedule`",
                )
            stepper.follow(scheduler)
    stepper.schedulers.check_length(num_steps)
    return rates.lines(stepper.optimizer, stepper.schedulers, config)


def begin_stage(task: Task, config: TrainConfig, model: torch.nn.Module, number: int) -> None:
    """Let the task change the model for a stage, with the same random numbers whenever and wherever it is called.

    On resume, and when a run is used, it is called for all stages that had begun: see `Position.num_begun_stages`.
    """
    torch.manual_seed(key(config.seed, number))  # for layers that a task adds
    task.before_stage(model, number)


def few_shapes(config: TrainConfig, chosen: Precision, device: torch.device, resumed: RunValues | None) -> bool:
    """Return True if batches should come in few shapes: at `-O4`, and on a GPU from `-O2` on and in fp16.

    A resumed run goes on as it began.
    """
    if config.level == 4:
        return True
    if resumed is not None:
        return resumed.few_shapes
    return device.type == "cuda" and (chosen.level >= 2 or chosen.scaled)


def _no_start_weights(path: Path) -> NotFound:
    """Return the error of a path for `init_from` that is not a checkpoint."""
    if not RunFolder(path).is_run:
        why = "it is not a checkpoint" if path.exists() else "there is no such file or folder"
        hint = (
            "name a checkpoint, which is a folder like RUN/checkpoints/step-00000120, a .safetensors or .pt file, a "
            "Hugging Face folder, or a torch.distributed.checkpoint"
        )
    else:
        why = "it is a run, not one of its checkpoints"
        newest = next(iter(listed(path / CHECKPOINTS)), None)
        hint = "it has no checkpoint yet"
        if newest is not None:
            hint = f"name one of them, such as the last: `--init-from {masked(shown(newest))}`"
    return NotFound(f"--init-from {masked(shown(path))}: {why}", hint=hint)


def load_weights(model: torch.nn.Module, task: Task, path: Path | None, say: Callable[[str], None]) -> None:
    """Load by name the weights that a new run starts from (`init_from`): a checkpoint, a file of the task's kind, or
    weights of another program."""
    if path is None:
        return
    _bring_weights(path)
    weights = task.read_weights(path) if isinstance(task, ReadsWeights) else None
    if weights is None and (path / STATE).is_file():
        weights = reader.load(path, ["model"]).parts["model"]
    elif weights is None:
        if not exchange.is_foreign(path):
            raise _no_start_weights(path)
        weights = exchange.fitted(exchange.read(path), set(model.state_dict()))
    say(reader.load_by_name(model, weights).line(path))


def _bring_weights(path: Path) -> None:
    """Bring what `init_from` names, if that is the copy of an address: a file, a folder, or a run's checkpoint."""
    if path.parent.name == CHECKPOINTS:
        bring_run(path.parent.parent)
        bring_parts(path, (STATE, DIGESTS))
    if not (path / STATE).is_file():
        bring_folder(path)


def callbacks(
    task: Task, config: TrainConfig, say: Callable[[str], None], more: Sequence[Callback] = ()
) -> list[Callback]:
    """Return the loggers of the settings, the callbacks of the task, and `more`; for the first rank."""
    installed, missing = loggers.build(config.loggers, is_asked="loggers" in config.model_fields_set)
    for name in missing:
        say(f"{name} is not installed: metrics go to metrics.jsonl alone (`pip install {name}`)")
    names = [name for name in config.loggers if name not in missing]
    forgiving = [
        Forgiving(logger, name, say, loggers.advice(name)) for name, logger in zip(names, installed, strict=True)
    ]
    return [*forgiving, *checked(task.watchers()), *checked(more)]
