"""Shapes of grains that a plan is made of, costly ones first: those to measure and record before the first step."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

from paceline.data.plan import Plan

RUNGS = 32
"""Number of distinct lengths, as equal parts of the longest, where nobody says what lengths are padded to."""
LOOKED_AT = 1000
"""Steps of an epoch that are looked at, spread evenly."""


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
    """Of the whole cost of the epoch, padding counted."""


def costly_shapes(plan: Plan, most: int, collate: object = None) -> list[Pick]:
    """At most so many shapes, that with the largest share of the epoch's cost first; which lengths come to one shape
    is what `collate` says, if it is a `Padding`."""
    steps = np.unique(np.linspace(0, plan.num_steps - 1, min(plan.num_steps, LOOKED_AT)).astype(np.int64))
    grains = [
        (size, longest, int(step), number)
        for step in steps
        for number, (size, longest) in enumerate(plan.shapes(int(step)))
    ]
    width = collate.padded if isinstance(collate, Padding) else _even(max(longest for _, longest, _, _ in grains))
    costs: dict[tuple[int, float], float] = {}
    first: dict[tuple[int, float], tuple[int, int]] = {}
    for size, longest, step, number in grains:
        shape = size, width(longest)
        costs[shape] = costs.get(shape, 0.0) + size * max(1, shape[1])
        first.setdefault(shape, (step, number))
    total = math.fsum(costs.values())
    ranked = sorted(costs, key=lambda shape: -costs[shape])[:most]
    return [Pick(*first[shape], costs[shape] / total) for shape in ranked]


def covering(picks: Sequence[Pick], share: float) -> list[Pick]:
    """Return the first of these until they have this share of the epoch's cost together."""
    before = np.cumsum([0.0, *(pick.share for pick in picks)])
    return [pick for pick, done in zip(picks, before[:-1], strict=True) if done < share]


def _even(longest: float) -> Callable[[float], float]:
    rung = longest / RUNGS
    return lambda length: math.ceil(length / rung) if rung > 0 else 0
