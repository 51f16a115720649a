"""Profile of a run's steps for its journal: sampled steps, and sizes of the model. `paceline predict` reads it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from paceline.data.plan import Plan, RankPlan
from paceline.observe.records import Profile
from paceline.parallel.sharded.blocks import CannotShard, Sharding
from paceline.parallel.summed import BUCKET_BYTES, grouped
from paceline.train.prepare import Prepared

NUM_EPOCHS = 4
"""Epochs of a launch whose records have a profile."""
MAX_ROWS = 1024
"""Maximum number of steps of all ranks together in one profile."""


def sizes(prepared: Prepared) -> Profile:
    """Return a profile with the sizes of a model: buckets, blocks, and what averaging would send."""
    model = prepared.model
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = grouped(trained, BUCKET_BYTES)
    state = sum(
        value.numel()
        for entries in prepared.optimizer.state.values()
        for name, value in entries.items()
        if isinstance(value, torch.Tensor) and value.is_floating_point() and name != "step"
    )
    persistent = model.state_dict().keys()
    if prepared.shards is not None:  # pieces of the state of a whole model
        state *= prepared.shards.place[1]
    return Profile(
        buckets=[sum(parameter.nbytes for _, parameter in group) for group in groups],
        blocks=_blocks(model),
        tensors=len(trained),
        weights=sum(parameter.numel() for parameter in trained),
        moving=0 if prepared.average is None else sum(tensor.numel() for tensor in prepared.average.tensors.values()),
        buffers=sum(
            buffer.numel()
            for name, buffer in model.named_buffers()
            if name in persistent and buffer.is_floating_point()
        ),
        state=state,
        itemsize=prepared.updated[0].element_size(),
    )


def _blocks(model: nn.Module) -> list[int]:
    """Return the bytes of each block of a model that would be cut, in the model's order; the rest comes last."""
    try:
        names = Sharding().units(model)
    except CannotShard:
        return []
    inner_first = sorted(names, key=lambda name: -name.count("."))
    totals = dict.fromkeys([*names, ""], 0)
    for name, parameter in model.named_parameters():
        home = next((block for block in inner_first if name.startswith(f"{block}.")), "")
        totals[home] += parameter.nbytes
    return list(totals.values())


def costs(plan: Plan, steps: Sequence[int]) -> list[list[float]]:
    """Return the costs of all grains of these steps; nothing where each rank has a plan of its own."""
    if isinstance(plan, RankPlan):
        return []
    shapes = [plan.shapes(step) for step in steps if step < plan.num_steps]
    return [[samples * (length or 1.0) for samples, length in step] for step in shapes]


def thinned(steps: Sequence[Sequence[Sequence[float]]]) -> list[list[list[float]]]:
    """Return the sampled steps of all ranks, few enough for a journal, in microseconds' precision."""
    count = max(4, MAX_ROWS // max(1, len(steps)))
    stride = max(1, -(-max(map(len, steps), default=0) // count))
    return [[[int(row[0]), *(round(value, 7) for value in row[1:])] for row in rank[::stride]] for rank in steps]
