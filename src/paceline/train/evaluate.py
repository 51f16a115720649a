"""Validation that does not depend on the number of ranks.

A set is cut into fixed whole batches; each runs on exactly one rank, none is padded or repeated. Sums are collected
per batch and added in batch order in float64, so the result is the same number at any world size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from paceline.core.errors import PacelineError
from paceline.core.keys import key
from paceline.data.fetch import seed_everything
from paceline.data.grain import Grain
from paceline.data.loader import Loader
from paceline.data.plan import BatchRule, Plan
from paceline.train.contract import OutOfMemory
from paceline.world.link import Link

Metrics = Callable[[Grain], Mapping[str, tuple[Any, Any]]]


class MetricContract(PacelineError):
    """A metric is not a (sum, weight) pair."""

    hint = "return {'accuracy': (number_correct, number_of_samples)}"

    def __init__(self, name: str, value: Any) -> None:
        super().__init__(f"metric {name!r} is {type(value).__name__}, not a pair (sum, weight)")
        self.name = name


def evaluation_plan(num_samples: int, rule: BatchRule, lengths: Any = None, *, in_order: bool = False) -> Plan:
    """Whole batches in a fixed order: as in the data set, or by length where lengths are known (and not `in_order`)."""
    order = "none" if lengths is None or in_order else "sorted"
    return Plan(num_samples, rule=rule, grains=1, seed=0, lengths=lengths, order=order)


def evaluate(
    metrics: Metrics, loader: Loader, plan: Plan, link: Link, *, limit_batches: int | None = None, seed: int = 0
) -> dict[str, float]:
    """Each metric over the batches that have it, as sum / weight."""
    steps = plan.num_steps if limit_batches is None else min(plan.num_steps, limit_batches)
    world = link.world
    rows: list[tuple[int, int, str]] = []
    values: list[torch.Tensor] = []
    for batch in loader.run(plan, range(world.rank, steps, world.size)):
        for grain in batch.grains:
            seed_everything(key(seed, batch.step))
            for place, (name, pair) in enumerate(_call(metrics, grain).items()):
                if not isinstance(pair, tuple) or len(pair) != 2:
                    raise MetricContract(name, pair)
                rows.append((batch.step, place, name))
                values += [torch.as_tensor(number, device=link.device).detach().double() for number in pair]
    table = torch.stack(values).view(-1, 2).tolist() if values else []  # one transfer from the device
    return _join([(*row, total, weight) for row, (total, weight) in zip(rows, table, strict=True)], link)


def _call(metrics: Metrics, grain: Grain) -> Mapping[str, tuple[Any, Any]]:
    try:
        return metrics(grain)
    except torch.OutOfMemoryError as error:
        raise OutOfMemory(grain.shapes(), len(grain), None, str(error)) from error


def _join(mine: list[tuple[int, int, str, float, float]], link: Link) -> dict[str, float]:
    """Everyone's (batch, place, metric, sum, weight), added in the order of the batches."""
    sums: dict[str, Any] = {}
    for _, _, name, total, weight in sorted(row for rows in link.gather_objects(mine) for row in rows):
        sums[name] = sums.get(name, 0.0) + np.array((total, weight))
    return {name: float(total / weight) if weight else math.nan for name, (total, weight) in sums.items()}
