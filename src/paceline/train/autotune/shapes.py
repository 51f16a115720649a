"""Shapes of grains that a plan is made of, costly ones first: those to measure and record before the first step."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np

from paceline.data.plan import Plan

RUNGS = 32
"""Number of distinct lengths, as equal parts of the longest, where nobody says what lengths are padded to."""
LOOKED_AT = 1000
"""Steps that are looked at: spread evenly over an epoch that has more, or those of several epochs."""


@runtime_checkable
class Padding(Protocol):
    """A collate function that pads to few lengths, and says to which."""

    def padded(self, length: float) -> float:
        """Return the padded length, in any unit, of a grain with this longest sample (as in `Task.lengths`)."""


@dataclass(frozen=True)
class Pick:
    """One grain that stands for all of its shape."""

    step: int
    number: int
    share: float
    """Of the whole cost of the epochs, padding counted."""
    epoch: int = 0
    """Of those that were looked at, the first that has it."""
    times: int = 1
    """Grains of this shape, in the steps that were looked at."""


def costly_shapes(plan: Plan, most: int, collate: object = None) -> list[Pick]:
    """At most so many shapes, that with the largest share of the epoch's cost first; which lengths come to one shape
    is what `collate` says, if it is a `Padding`."""
    return shapes_ahead([plan], most, collate).picks


class Ahead(NamedTuple):
    """Shapes of the epochs to come."""

    picks: list[Pick]
    is_all: bool
    """True if every step of these epochs was looked at."""

    def worth_recording(self, share: float) -> list[Pick]:
        """Return those that come back; where not every step was looked at, until they have this share of the cost."""
        return [pick for pick in self.picks if pick.times > 1] if self.is_all else covering(self.picks, share)


def shapes_ahead(plans: Iterable[Plan], most: int, collate: object = None) -> Ahead:
    """Return the shapes of epochs that follow each other, as many as it takes to look at `LOOKED_AT` steps.

    Batches are mixed anew in every epoch, so a later one may have a shape that the first has not.
    """
    grains: list[tuple[int, float, int, int, int]] = []
    num_steps, is_all = 0, True
    for epoch, plan in enumerate(plans):
        is_all = is_all and num_steps + plan.num_steps <= LOOKED_AT
        if num_steps >= LOOKED_AT:
            break
        steps = np.unique(np.linspace(0, plan.num_steps - 1, min(plan.num_steps, LOOKED_AT)).astype(np.int64))
        grains += [
            (size, longest, epoch, int(step), number)
            for step in steps
            for number, (size, longest) in enumerate(plan.shapes(int(step)))
        ]
        num_steps += len(steps)
    width = collate.padded if isinstance(collate, Padding) else _even(max(longest for _, longest, *_ in grains))
    costs: dict[tuple[int, float], float] = {}
    times: Counter[tuple[int, float]] = Counter()
    first: dict[tuple[int, float], tuple[int, int, int]] = {}
    for size, longest, epoch, step, number in grains:
        shape = size, width(longest)
        costs[shape] = costs.get(shape, 0.0) + size * max(1, shape[1])
        times[shape] += 1
        first.setdefault(shape, (epoch, step, number))
    total = math.fsum(costs.values())
    picks = []
    for shape in sorted(costs, key=lambda shape: -costs[shape])[:most]:
        epoch, step, number = first[shape]
        picks.append(Pick(step, number, costs[shape] / total, epoch, times[shape]))
    return Ahead(picks, is_all)


def covering(picks: Sequence[Pick], share: float) -> list[Pick]:
    """Return the first of these until they have this share of the cost together."""
    before = np.cumsum([0.0, *(pick.share for pick in picks)])
    return [pick for pick, done in zip(picks, before[:-1], strict=True) if done < share]


def _even(longest: float) -> Callable[[float], float]:
    rung = longest / RUNGS
    return lambda length: math.ceil(length / rung) if rung > 0 else 0
