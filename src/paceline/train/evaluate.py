"""Validation that does not depend on the number of ranks.

A set is cut into fixed whole batches; each runs on exactly one rank, none is padded or repeated. Sums are collected
per batch and added in batch order in float64, so the result is the same number at any world size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from paceline.config.errors import PacelineError
from paceline.data.grain import Grain
from paceline.data.loader import Loader
from paceline.data.plan import BatchRule, Plan
from paceline.world.link import Link

Metrics = Callable[[Grain], Mapping[str, tuple[Any, Any]]]


class MetricContract(PacelineError):
    """A metric is not a (sum, weight) pair."""

    hint = "return {'accuracy': (number_correct, number_of_samples)}"

    def __init__(self, name: str, value: Any) -> None:
        super().__init__(f"metric {name!r} is {type(value).__name__}, not a pair (sum, weight)")
        self.name = name


def evaluation_plan(num_samples: int, rule: BatchRule, lengths: Any = None) -> Plan:
    """Whole batches in a fixed order: as in the data set, or by length where lengths are known."""
    order = "none" if lengths is None else "sorted"
    return Plan(num_samples, rule=rule, grains=1, seed=0, lengths=lengths, order=order)


def evaluate(
    metrics: Metrics, loader: Loader, plan: Plan, link: Link, *, limit_batches: int | None = None
) -> dict[str, float]:
    """Each metric over the whole set, as sum / weight."""
    steps = plan.num_steps if limit_batches is None else min(plan.num_steps, limit_batches)
    world = link.world
    names: list[str] = []
    rows: list[tuple[int, list[torch.Tensor]]] = []
    for batch in loader.run(plan, range(world.rank, steps, world.size)):
        for grain in batch.grains:
            found = metrics(grain)
            names = list(found)
            values = []
            for name, pair in found.items():
                if not isinstance(pair, tuple) or len(pair) != 2:
                    raise MetricContract(name, pair)
                values += [torch.as_tensor(number).detach().double() for number in pair]
            rows.append((batch.step, values))
    return _join(names, rows, steps, link)


def _join(
    names: list[str], rows: list[tuple[int, list[torch.Tensor]]], num_batches: int, link: Link
) -> dict[str, float]:
    tables = [torch.stack([value.cpu() for value in values]).tolist() for _, values in rows]
    mine = (names, [(number, table) for (number, _), table in zip(rows, tables, strict=True)])
    everyone = link.gather_objects(mine)
    names = next((names for names, found in everyone if found), [])
    ordered = np.zeros((num_batches, 2 * len(names)))
    for _, found in everyone:
        for number, table in found:
            ordered[number] = table
    sums = ordered.sum(axis=0)
    return {name: float(sums[2 * index] / sums[2 * index + 1]) for index, name in enumerate(names)}
