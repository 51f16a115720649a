"""The learning-rate range test: from (rate, loss) pairs of one sweep to a suggestion. Pure functions.

The rate rises exponentially, a factor per step (Smith 2017, "Cyclical Learning Rates for Training Neural Networks").
The loss is smoothed, and the sweep ends where it has diverged. Two rules give a rate:

- steepest: where the smoothed loss, on the way to its lowest, falls fastest per factor of the rate;
- a tenth of the rate at which the loss diverges.

The suggestion is the smaller of the two, where that is known: a sweep that saw no fall, or too little of what comes
before or after it, gives a doubt instead (`Doubt`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

SMOOTHING = 0.9
"""Weight of what was before; the average is mended for its start at 0, as Adam's are."""
DIVERGED = 2.0
"""The smoothed loss has diverged where it is so many times the best so far and has also lost again all it had won, and
half as much beyond that: a loss that rises from 0.1 to 0.3 after 2.3 at the start is noise around a good place."""
FIRST_STEPS = 10
"""Steps whose smoothed loss is too rough to judge."""
BELOW = 10.0
NOISE = 2.0
"""A loss has fallen, or risen, where it changed by more than so many standard deviations between batches."""
LEAST = 0.01
"""And by more than this share of what it was at first."""
TURNED = 0.1
"""Share of its fall by which the loss must be above its lowest again, for that to be a minimum."""
WIDER = 100.0
"""Factor by which a sweep that says too little is to be wider."""

Doubt = Literal["short", "interrupted", "flat", "high", "hasty", "early", "open"]
"""Reason why a sweep gives no rate:

- short: too few steps for any slope;
- interrupted: it was stopped before the loss rose again;
- flat: the loss neither fell nor rose;
- high: it rose without having fallen;
- hasty: so it did, but long after the first rates: there were too few steps to learn anything between;
- early: it falls most steeply at the very first rates, so that lower ones may be steeper;
- open: it does not diverge, and a tenth of where it would may be less than the steepest rate.
"""

Course = Literal["fell", "turned", "rose", "stayed"]
"""Course of a loss until it diverged, as far as the noise between batches shows it; turned: it fell, then rose."""


@dataclass(frozen=True)
class Point:
    rate: float
    loss: float


@dataclass(frozen=True)
class Suggestion:
    """Result of a sweep."""

    steepest: float | None
    """None: the loss falls nowhere."""
    diverges: float | None
    """None: it did not diverge."""
    doubt: Doubt | None = None
    """Reason why the rates that were found prove nothing."""

    @property
    def tenth(self) -> float | None:
        return None if self.diverges is None else self.diverges / BELOW

    @property
    def rate(self) -> float | None:
        """The smaller of both rules; None where it is not known."""
        if self.doubt is not None or self.steepest is None:
            return None
        return self.steepest if self.tenth is None else min(self.steepest, self.tenth)


def rate_at(step: int, steps: int, first: float, last: float) -> float:
    """Exponential from `first` at step 0 to `last` at the last one."""
    return first * math.exp(math.log(last / first) * step / max(1, steps - 1))


def smooth(losses: Sequence[float]) -> list[float]:
    """Exponential moving average without the pull of its start; stays where a loss is not finite."""
    average, weight, averages = 0.0, 0.0, []
    for loss in losses:
        if math.isfinite(loss):
            average = SMOOTHING * average + (1 - SMOOTHING) * loss
            weight = SMOOTHING * weight + (1 - SMOOTHING)
        averages.append(average / weight if weight else math.nan)
    return averages


class Divergence:
    """Tells, loss by loss, when a sweep has diverged."""

    def __init__(self) -> None:
        self._average, self._weight, self._step = 0.0, 0.0, 0
        self._best, self._start = math.inf, -math.inf
        self.has_come = False

    def add(self, loss: float) -> bool:
        """Take the next loss; return True from the first step on at which the loss has diverged."""
        if self.has_come or not math.isfinite(loss):
            self.has_come = True
            return True
        self._average = SMOOTHING * self._average + (1 - SMOOTHING) * loss
        self._weight = SMOOTHING * self._weight + (1 - SMOOTHING)
        value = self._average / self._weight
        self._best = min(self._best, value)
        if self._step < FIRST_STEPS:
            self._start = max(self._start, value)
        else:
            limit = self._start + 0.5 * max(self._start - self._best, 0.0)
            self.has_come = value > max(self._best + (DIVERGED - 1) * abs(self._best), limit)
        self._step += 1
        return self.has_come


def diverged_at(losses: Sequence[float]) -> int | None:
    """Return the first step at which the loss has diverged."""
    divergence = Divergence()
    return next((step for step, loss in enumerate(losses) if divergence.add(loss)), None)


def suggest(points: Sequence[Point], *, is_interrupted: bool = False) -> Suggestion:
    """Both rules, for the points of a sweep in order, and whether they can be trusted."""
    losses = [point.loss for point in points]
    end = diverged_at(losses)
    diverges = None if end is None else points[end].rate
    losses = losses[:end]
    smoothed = smooth(losses)
    slopes = _slopes(points, smoothed)
    if not slopes:
        return Suggestion(None, diverges, "high" if end is not None else "interrupted" if is_interrupted else "short")
    slope, place = min(slopes)
    course = _course(losses, smoothed)
    steepest = points[place].rate if slope < 0 and course in ("fell", "turned") else None
    if is_interrupted and end is None and course != "turned":
        return Suggestion(steepest, diverges, "interrupted")
    if steepest is None:
        return Suggestion(None, diverges, _doubt_without_fall(course, points[0].rate, diverges))
    return Suggestion(steepest, diverges, _doubt_of_fall(points, place, diverges))


def wider(doubt: Doubt, first: float, last: float, least: float, most: float) -> tuple[float, float]:
    """Return first and last rate for the next sweep after one that said too little; at least from `least` to `most`."""
    if doubt in ("high", "early"):
        return min(least, first / WIDER), last
    if doubt in ("flat", "open"):
        return last if doubt == "flat" else first, max(most, last * WIDER)
    return first, last


def _slopes(points: Sequence[Point], smoothed: Sequence[float]) -> list[tuple[float, int]]:
    """Return (slope, step) on the way of the smoothed loss to its lowest; the slope is per factor of the rate."""
    lowest = min(range(len(smoothed)), key=lambda step: (step < FIRST_STEPS, smoothed[step]), default=0)
    return [
        ((smoothed[step + 1] - smoothed[step - 1]) / math.log(points[step + 1].rate / points[step - 1].rate), step)
        for step in range(FIRST_STEPS, len(smoothed) - 1)
        if step <= lowest + 1  # a fall after that is one from a height it has just been thrown to
    ]


def _doubt_without_fall(course: Course, first: float, diverges: float | None) -> Doubt:
    """Return why a sweep from the rate `first` on saw no fall."""
    if diverges is None:
        return "flat" if course == "stayed" else "high"
    return "hasty" if diverges > WIDER * first else "high"


def _doubt_of_fall(points: Sequence[Point], place: int, diverges: float | None) -> Doubt | None:
    """Return why the steepest fall, at step `place`, may not give the rate; None if it does."""
    if place <= FIRST_STEPS + 1:
        return "early"
    if diverges is None and points[place].rate > points[-1].rate / BELOW:
        return "open"  # it diverges above the last rate, if anywhere: a tenth of that may be the smaller
    return None


def _course(losses: Sequence[float], smoothed: Sequence[float]) -> Course:
    """Return the course of a loss. The first one is that of untrained weights, whatever the rate."""
    noise = max(NOISE * _deviation(losses), LEAST * abs(losses[0]))
    start, best = min(losses[0], smoothed[FIRST_STEPS]), min(smoothed[FIRST_STEPS:])
    if start - best > noise:
        return "turned" if smoothed[-1] - best > max(noise, TURNED * (start - best)) else "fell"
    return "rose" if smoothed[-1] - losses[0] > noise else "stayed"


def _deviation(losses: Sequence[float]) -> float:
    """Standard deviation between batches, of whatever trend, by the median step from one loss to the next."""
    steps = [abs(after - before) for before, after in itertools.pairwise(losses)]
    return median(steps) / 0.6745 / math.sqrt(2)
