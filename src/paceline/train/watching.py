"""Who follows a run: the loggers of the settings, those of the task, and those that were given."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from paceline.config.settings import TrainConfig
from paceline.observe import loggers
from paceline.observe.callback import Watcher, checked
from paceline.train.task import Task


def watchers_of(
    task: Task, config: TrainConfig, say: Callable[[str], None], given: Sequence[Watcher] = ()
) -> list[Watcher]:
    """For the first rank; a logger that is not installed is said."""
    found, missing = loggers.build(config.loggers, is_asked="loggers" in config.model_fields_set)
    for name in missing:
        say(f"{name} is not installed: metrics go to metrics.jsonl alone (`pip install {name}`)")
    return [*found, *checked(task.watchers()), *checked(given)]
