"""Shapes of grains that a plan is made of, costly ones first: those to measure and record before the first step."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np

from paceline.data.dataset import Collate
from paceline.data.partition import Ids
from paceline.data.plan import Plan

RUNGS = 32
"""Number of distinct lengths, as equal parts of the longest, where nobody says what lengths are padded to."""
LOOKED_AT = 1000
"""Steps that are looked at: spread evenly over an epoch that has more, or those of several epochs."""
MOST_PLANNED = 2_000_000
"""Samples of these epochs, beyond the first: to plan so many takes about a second."""


@runtime_checkable
class Padding(Protocol):
    """A collate function that pads to few lengths, and says to which."""

    def padded(self, length: float) -> float:
        """Return the padded length, in any unit, of a grain with this longest sample (as in `Task.lengths`)."""


@runtime_checkable
class KnownShapes(Protocol):
    """A collate function whose grains have shapes that follow from more than their longest sample."""

    def shape(self, samples: Ids) -> tuple[Hashable, float]:
        """Return what tells the shape of a grain of these samples from others, and its cost."""


@runtime_checkable
class FitsShapes(Protocol):
    """A collate function that can choose its shapes: as few as can all be recorded before the first step."""

    def fitted(self, grains: Iterable[Ids]) -> Collate:
        """Return one whose shapes hold these grains, of these samples each, and such as are like them."""


def fitted(collate: Collate | None, plans: Iterable[Plan]) -> Collate | None:
    """Return a collate function with its shapes chosen for these epochs, as many of them as it takes to look at
    `LOOKED_AT` steps; one that has none to choose as it is."""
    if not isinstance(collate, FitsShapes):
        return collate
    return collate.fitted(grain for _, plan, step in _looked_at(plans)[0] for grain in plan.grains(step))


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
    is what `collate` says, if it is a `Padding` or knows shapes."""
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
    steps, is_all = _looked_at(plans)
    costs: dict[Hashable, float] = {}
    times: Counter[Hashable] = Counter()
    first: dict[Hashable, tuple[int, int, int]] = {}
    for (epoch, _, step), grains in zip(steps, _shapes(steps, collate), strict=True):
        for number, (shape, cost) in enumerate(grains):
            costs[shape] = costs.get(shape, 0.0) + cost
            times[shape] += 1
            first.setdefault(shape, (epoch, step, number))
    total = math.fsum(costs.values())
    picks = []
    for shape in sorted(costs, key=lambda shape: -costs[shape])[:most]:
        epoch, step, number = first[shape]
        picks.append(Pick(step, number, costs[shape] / total, epoch, times[shape]))
    return Ahead(picks, is_all)


def _looked_at(plans: Iterable[Plan]) -> tuple[list[tuple[int, Plan, int]], bool]:
    """Return the steps to look at, each by epoch, plan and number, and True if those are all."""
    steps: list[tuple[int, Plan, int]] = []
    is_all, num_samples = True, 0
    for epoch, plan in enumerate(plans):
        is_all = is_all and len(steps) + plan.num_steps <= LOOKED_AT
        if len(steps) >= LOOKED_AT or num_samples >= MOST_PLANNED:
            is_all = False
            break
        num_samples += plan.num_samples
        chosen = np.unique(np.linspace(0, plan.num_steps - 1, min(plan.num_steps, LOOKED_AT)).astype(np.int64))
        steps += [(epoch, plan, int(step)) for step in chosen]
    return steps, is_all


def covering(picks: Sequence[Pick], share: float) -> list[Pick]:
    """Return the first of these until they have this share of the cost together."""
    before = np.cumsum([0.0, *(pick.share for pick in picks)])
    return [pick for pick, done in zip(picks, before[:-1], strict=True) if done < share]


def _shapes(steps: Sequence[tuple[int, Plan, int]], collate: object) -> Iterator[list[tuple[Hashable, float]]]:
    """Yield the shape and the cost of each grain of these steps."""
    if isinstance(collate, KnownShapes):
        for _, plan, step in steps:
            yield [collate.shape(samples) for samples in plan.grains(step)]
        return
    known = [plan.shapes(step) for _, plan, step in steps]
    width = (
        collate.padded
        if isinstance(collate, Padding)
        else _even(max(longest for grains in known for _, longest in grains))
    )
    for grains in known:
        shapes = [(size, width(longest)) for size, longest in grains]
        yield [(shape, shape[0] * max(1, shape[1])) for shape in shapes]


def _even(longest: float) -> Callable[[float], float]:
    rung = longest / RUNGS
    return lambda length: math.ceil(length / rung) if rung > 0 else 0
