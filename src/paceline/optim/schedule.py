"""Learning-rate schedules: pure functions of the step. Formulas after NeMo's lr_policies.

Every schedule warms up alike: lr * (step + 1) / (warmup_steps + 1) while step < warmup_steps. A new one is a function
of `Span` and step, and a line in `SCHEDULES`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from paceline.config.errors import PacelineError
from paceline.config.settings import OptimSettings


class MinLrAboveLr(PacelineError):
    """A floor above the peak: the schedule would rise instead of fall."""

    hint = "set `min_lr` below `lr`"

    def __init__(self, lr: float, min_lr: float) -> None:
        super().__init__(f"min_lr {min_lr:g} is above lr {lr:g}")
        self.lr = lr
        self.min_lr = min_lr


class ScheduleNeedsEnd(PacelineError):
    """A schedule that falls until the last step of a run whose last step is not known."""

    hint = "set `steps`, or `schedule: constant`"

    def __init__(self, schedule: str) -> None:
        super().__init__(f"schedule {schedule!r} needs to know how many steps the run has")
        self.schedule = schedule


@dataclass(frozen=True)
class Span:
    """From which learning rate to which, and over which steps."""

    lr: float
    min_lr: float
    warmup_steps: int
    total_steps: int

    def progress(self, step: int) -> float:
        """0 at the end of the warm-up, 1 at the end of the run and after it."""
        if step >= self.total_steps:
            return 1.0
        return (step - self.warmup_steps) / (self.total_steps - self.warmup_steps)


def constant(span: Span, step: int) -> float:
    return span.lr


def cosine(span: Span, step: int) -> float:
    """Half a cosine from lr to min_lr."""
    return (span.lr - span.min_lr) * 0.5 * (1.0 + math.cos(math.pi * span.progress(step))) + span.min_lr


def linear(span: Span, step: int) -> float:
    """A straight line from lr to min_lr."""
    return (span.lr - span.min_lr) * (1.0 - span.progress(step)) + span.min_lr


SCHEDULES: dict[str, Callable[[Span, int], float]] = {"constant": constant, "cosine": cosine, "linear": linear}
ENDLESS = frozenset({"constant"})
"""Schedules that do not depend on the number of steps."""


def build(settings: OptimSettings, total_steps: int | None) -> Callable[[int], float]:
    """The learning rate as a function of the step, counted from 0; `total_steps` is None where it is not known."""
    if settings.schedule not in ENDLESS:
        if total_steps is None:
            raise ScheduleNeedsEnd(settings.schedule)
        if settings.min_lr > settings.lr:
            raise MinLrAboveLr(settings.lr, settings.min_lr)
    after_warmup = SCHEDULES[settings.schedule]
    span = Span(settings.lr, settings.min_lr, settings.warmup_steps, total_steps or 0)

    def rate(step: int) -> float:
        if step < span.warmup_steps:
            return span.lr * (step + 1) / (span.warmup_steps + 1)
        return after_warmup(span, step)

    return rate
