"""The sweep of `paceline tune --lr`: the training loop under a rising learning rate, nothing kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from paceline.config.settings import TrainConfig
from paceline.observe.callback import Record, Watcher
from paceline.train.benchmark import unkept
from paceline.train.feed import Feed
from paceline.train.task import Stage, Task
from paceline.train.trainer import Result, Trainer
from paceline.train.tune.range_test import Point, diverged_at, rate_at
from paceline.world.link import Link


def sweep(
    task: Task,
    config: TrainConfig,
    link: Link,
    *,
    first: float,
    last: float,
    steps: int,
    tell: Callable[[int], None] = lambda done: None,
) -> list[Point]:
    """Losses under learning rates from `first` to `last`, until the loss diverges; on the first rank, else nothing.

    Fewer than `steps` that have not diverged (`is_cut_short`) are those of a sweep that a signal ended.
    """
    watching = _Losses(tell)
    running = _Sweep(task, config, link, watching, first, last, steps)
    watching.is_enough = running.stop
    running.fit()
    return watching.points


def is_cut_short(points: Sequence[Point], steps: int) -> bool:
    """Whether a sweep ended before it was over."""
    return len(points) < steps and diverged_at([point.loss for point in points]) is None


class _Losses(Watcher):
    """Keeps (rate, loss) of every step and says when the loss has diverged."""

    def __init__(self, tell: Callable[[int], None]) -> None:
        self.points: list[Point] = []
        self.is_enough: Callable[[], None] = lambda: None
        self._tell = tell

    def step(self, records: list[Record]) -> None:
        self.points += [Point(record["lr"], record["loss"]) for record in records]
        self._tell(len(self.points))
        if diverged_at([point.loss for point in self.points]) is not None:
            self.is_enough()


class _Sweep(Trainer):
    def __init__(
        self, task: Task, config: TrainConfig, link: Link, losses: _Losses, first: float, last: float, steps: int
    ) -> None:
        # Every loss is looked at, and a step whose gradients are not finite is an answer, not a failure.
        update = {"log_every": 1, "max_skipped": max(steps, 1), "progress": "none"}
        super().__init__(task, unkept(config, steps).model_copy(update=update), link, [losses])
        self.stages: list[Stage] = [replace(self.stages[0], epochs=None)]
        self._first_rate, self._last_rate, self._num_rates = first, last, steps

    def stop(self) -> None:
        """Told to all ranks with the next step's reduction."""
        self.engine.ask_to_stop()

    def _schedule(self, feed: Feed) -> Callable[[int], float]:
        self._schedule_steps = self._num_rates
        return lambda step: rate_at(step, self._num_rates, self._first_rate, self._last_rate)

    def _close(self, status: str) -> Result:
        # One that was stopped has no run to go on with, and must not say so; `is_cut_short` tells.
        return super()._close("finished")
