"""The learning-rate range test: from (rate, loss) pairs of one sweep to a suggestion. Pure functions.

The rate rises exponentially, a factor per step (Smith 2017, "Cyclical Learning Rates for Training Neural Networks").
The loss is smoothed, and the sweep ends where it has diverged. Two rules give a rate:

- steepest: where the smoothed loss falls fastest per factor of the rate;
- a tenth of the rate at which the loss diverges.

The suggestion is the smaller of the two.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

SMOOTHING = 0.9
"""Weight of what was before; the average is mended for its start at 0, as Adam's are."""
DIVERGED = 2.0
"""The smoothed loss has diverged where it is so many times the best so far and has also lost again all it had won, and
half as much beyond that: a loss that rises from 0.1 to 0.3 after 2.3 at the start is noise around a good place."""
FIRST_STEPS = 10
"""Steps whose smoothed loss is too rough to judge."""
BELOW = 10.0


@dataclass(frozen=True)
class Point:
    rate: float
    loss: float


@dataclass(frozen=True)
class Suggestion:
    """What a sweep says."""

    steepest: float | None
    """None: the loss falls nowhere."""
    diverges: float | None
    """None: it did not diverge."""

    @property
    def rate(self) -> float | None:
        tenth = None if self.diverges is None else self.diverges / BELOW
        found = [rate for rate in (self.steepest, tenth) if rate is not None]
        return min(found) if found and self.steepest is not None else None


def rate_at(step: int, steps: int, first: float, last: float) -> float:
    """Exponential from `first` at step 0 to `last` at the last one."""
    return first * math.exp(math.log(last / first) * step / max(1, steps - 1))


def smooth(losses: Sequence[float]) -> list[float]:
    """Exponential moving average without the pull of its start; stays where a loss is not finite."""
    average, weight, found = 0.0, 0.0, []
    for loss in losses:
        if math.isfinite(loss):
            average = SMOOTHING * average + (1 - SMOOTHING) * loss
            weight = SMOOTHING * weight + (1 - SMOOTHING)
        found.append(average / weight if weight else math.nan)
    return found


def diverged_at(losses: Sequence[float]) -> int | None:
    """The first step at which the loss has diverged."""
    smoothed = smooth(losses)
    best, start = math.inf, math.nan
    for step, (loss, value) in enumerate(zip(losses, smoothed, strict=True)):
        if not math.isfinite(loss):
            return step
        if step < FIRST_STEPS:
            start = value if math.isnan(start) else max(start, value)
            best = min(best, value)
            continue
        best = min(best, value)
        if value > max(best + (DIVERGED - 1) * abs(best), start + 0.5 * max(start - best, 0.0)):
            return step
    return None


def suggest(points: Sequence[Point]) -> Suggestion:
    """Both rules, for the points of a sweep in order."""
    losses = [point.loss for point in points]
    end = diverged_at(losses)
    smoothed = smooth(losses)[: len(points) if end is None else end]
    slopes = [
        ((smoothed[step + 1] - smoothed[step - 1]) / math.log(points[step + 1].rate / points[step - 1].rate), step)
        for step in range(FIRST_STEPS, len(smoothed) - 1)
    ]
    steepest = None
    if slopes and min(slopes)[0] < 0:
        steepest = points[min(slopes)[1]].rate
    return Suggestion(steepest, None if end is None else points[end].rate)
