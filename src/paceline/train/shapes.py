"""Which shapes of grains a plan is made of, the costly ones first: what to measure and record before the first step."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from paceline.data.plan import Plan

RUNGS = 32
"""Lengths are told apart to one part in so many of the longest."""
LOOKED_AT = 1000
"""Steps of an epoch that are looked at, spread evenly."""


@dataclass(frozen=True)
class Pick:
    """One grain that stands for all of its shape."""

    step: int
    number: int
    share: float
    """Of the whole cost of the epoch, padding counted."""


def costly_shapes(plan: Plan, most: int) -> list[Pick]:
    """At most so many shapes, that with the largest share of the epoch's cost first."""
    steps = np.unique(np.linspace(0, plan.num_steps - 1, min(plan.num_steps, LOOKED_AT)).astype(np.int64))
    grains = [
        (size, longest, int(step), number)
        for step in steps
        for number, (size, longest) in enumerate(plan.shapes(int(step)))
    ]
    rung = max(longest for _, longest, _, _ in grains) / RUNGS
    costs: dict[tuple[int, int], float] = {}
    first: dict[tuple[int, int], tuple[int, int]] = {}
    for size, longest, step, number in grains:
        shape = size, math.ceil(longest / rung) if rung > 0 else 0
        costs[shape] = costs.get(shape, 0.0) + size * max(1, shape[1])
        first.setdefault(shape, (step, number))
    total = math.fsum(costs.values())
    ranked = sorted(costs, key=lambda shape: -costs[shape])[:most]
    return [Pick(*first[shape], costs[shape] / total) for shape in ranked]
