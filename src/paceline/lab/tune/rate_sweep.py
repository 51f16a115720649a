"""The sweep of `paceline tune --lr`: the training loop under a rising learning rate, nothing kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from paceline.config.settings import TrainConfig
from paceline.lab.tune.range_test import Divergence, Point, diverged_at, rate_at
from paceline.observe.callback import Callback, Record
from paceline.train.feed import Feed
from paceline.train.loop import train
from paceline.train.probe import Probe, unkept
from paceline.train.run import Run, open_run
from paceline.train.task import Task
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
    """Return the losses under learning rates from `first` to `last`, until the loss diverges; on the first rank only.

    Fewer than `steps` that have not diverged (`is_cut_short`) are those of a sweep that a signal ended.
    """
    # Every loss is read, and a step whose gradients are not finite is an answer, not a failure.
    update = {"log_every": 1, "max_skipped": max(steps, 1), "progress": "none"}
    sweeping = _Sweep(partial(rate_at, steps=steps, first=first, last=last), tell)
    train(open_run(task, unkept(config, steps).model_copy(update=update), link, [sweeping], probe=sweeping))
    return sweeping.points


def is_cut_short(points: Sequence[Point], steps: int) -> bool:
    """Return True if a sweep ended before it was over."""
    return len(points) < steps and diverged_at([point.loss for point in points]) is None


class _Sweep(Probe, Callback):
    """Keeps (rate, loss) of every step, and stops the run when the loss has diverged.

    Losses come to the first rank alone, so it asks to stop, and the others learn of it with the next step's reduction.
    """

    def __init__(self, schedule: Callable[[int], float], tell: Callable[[int], None]) -> None:
        self.schedule = schedule
        self.points: list[Point] = []
        self._divergence = Divergence()
        self._tell = tell

    def begin(self, run: Run, feed: Feed) -> None:
        self._ask_to_stop = run.ask_to_stop

    def step(self, records: list[Record]) -> None:
        self.points += [Point(record["lr"], record["loss"]) for record in records]
        self._tell(len(self.points))
        if any(self._divergence.add(record["loss"]) for record in records):  # once it has come, it stays
            self._ask_to_stop()
