"""Evaluation of a data set whose result does not depend on the number of ranks.

A set is cut into fixed whole batches; each runs on exactly one rank, none is padded or repeated. What they give is put
together in batch order (`metrics.py`), sums in float64, so every world size gives the same number.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from paceline.core.errors import PacelineError
from paceline.core.keys import key
from paceline.data.dataset import DatasetTraits
from paceline.data.fetch import seed_everything
from paceline.data.grain import Grain
from paceline.data.loader import Loader
from paceline.data.plan import BatchRule, Plan
from paceline.train.loss import OutOfMemory
from paceline.train.metrics import Collected
from paceline.world.link import Link

Metrics = Callable[[Grain], Mapping[str, Any]]
"""Metrics of one batch by name: see `Task.metrics`."""


class NotASet(PacelineError):
    """A data set that cannot be cut into fixed batches."""

    what: str
    why: str
    sentence = "{what} {why}"
    hint = "give a data set with __len__ and __getitem__ and at least one sample, or leave it out of `val_data`"


def check_set(data: Any, what: str) -> None:
    """Raise `NotASet` unless the data can be cut into batches; `what` names it in messages."""
    if not DatasetTraits(data).is_map_style:
        why = f"is a {type(data).__name__}, of which nobody knows the length"
        raise NotASet(what, why)
    if len(data) == 0:
        raise NotASet(what, "is empty")


def evaluation_plan(num_samples: int, rule: BatchRule, lengths: Any = None, *, in_order: bool = False) -> Plan:
    """Whole batches in a fixed order: as in the data set, or by length where lengths are known (and not `in_order`)."""
    order = "none" if lengths is None or in_order else "sorted"
    return Plan(num_samples, rule=rule, grains=1, seed=0, lengths=lengths, order=order)


def evaluate(
    metrics: Metrics, loader: Loader, plan: Plan, link: Link, *, limit_batches: int | None = None, seed: int = 0
) -> dict[str, float]:
    """Return each metric over the batches that have it. All ranks must call it."""
    steps = plan.num_steps if limit_batches is None else min(plan.num_steps, limit_batches)
    world = link.world
    collected = Collected()
    for batch in loader.run(plan, range(world.rank, steps, world.size)):
        for grain in batch.grains:
            seed_everything(key(seed, batch.step))
            collected.add(batch.step, _call(metrics, grain), link.device)
    return collected.results(link)


def _call(metrics: Metrics, grain: Grain) -> Mapping[str, Any]:
    try:
        return metrics(grain)
    except torch.OutOfMemoryError as error:
        raise OutOfMemory(grain.shapes(), len(grain), None, str(error)) from error
