"""Parts of a run that are the same for training, timing and use: weights to start from, callbacks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from paceline.config.settings import TrainConfig
from paceline.observe import loggers
from paceline.observe.callback import Watcher, checked
from paceline.train.checkpoint import reader as restore
from paceline.train.task import HasWatchers, ReadsWeights, Task


def load_weights(model: torch.nn.Module, task: Task, path: Path | None, say: Callable[[str], None]) -> None:
    """Load by name the weights that a new run starts from (`init_from`): a checkpoint, or a file of the task's kind."""
    if path is None:
        return
    weights = task.read_weights(path) if isinstance(task, ReadsWeights) else None
    if weights is None:
        weights = restore.load(path, ["model"]).parts["model"]
    say(restore.load_by_name(model, weights).line(path))


def callbacks(
    task: Task, config: TrainConfig, say: Callable[[str], None], more: Sequence[Watcher] = ()
) -> list[Watcher]:
    """Return the loggers of the settings, the callbacks of the task, and `more`; for the first rank."""
    installed, missing = loggers.build(config.loggers, is_asked="loggers" in config.model_fields_set)
    for name in missing:
        say(f"{name} is not installed: metrics go to metrics.jsonl alone (`pip install {name}`)")
    own = task.watchers() if isinstance(task, HasWatchers) else ()
    return [*installed, *checked(own), *checked(more)]
