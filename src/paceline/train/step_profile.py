"""Profile of a run's steps, which `paceline predict` is calibrated on: when gradients are complete, and sizes.

Times of whole steps are the clock's. Here some backwards of a launch are watched for the moments at which the buckets
of gradients are complete, on any number of ranks, and the model is measured. After these steps nothing is left of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from paceline.data.grain import Grain
from paceline.data.plan import Plan, RankPlan
from paceline.observe.records import Profile
from paceline.parallel.sharded.blocks import CannotShard, Sharding
from paceline.parallel.summed import BUCKET_BYTES, grouped
from paceline.recipes.continual.replay.buffer import ReplayBuffer
from paceline.train.grains import GrainPass, Loss
from paceline.train.prepare import Prepared

FIRST_WATCHED, NUM_WATCHED = 3, 8
"""Steps of a launch whose last backward is watched."""
NUM_EPOCHS = 4
"""Epochs of a launch whose records have a profile."""
MOST_ROWS = 1024
"""Steps of all ranks together in one profile."""


class BackwardWatch:
    """Moments at which the gradients of each bucket are complete in a backward, on the CPU."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        groups = grouped(parameters, BUCKET_BYTES)
        self._began_s = 0.0
        self._last_s = [0.0] * len(groups)
        self._rows: list[list[float]] = []
        self._hooks: list[RemovableHandle] = [
            parameter.register_post_accumulate_grad_hook(self._hook(number))
            for number, group in enumerate(groups)
            for _, parameter in group
        ]

    def _hook(self, bucket: int) -> Callable[[torch.Tensor], None]:
        def accumulated(_: torch.Tensor) -> None:
            self._last_s[bucket] = perf_counter()

        return accumulated

    def begin(self) -> None:
        """Start the watch, before the last backward of a step."""
        self._began_s = perf_counter()
        self._last_s = [self._began_s] * len(self._last_s)

    def end(self) -> None:
        """Keep what was seen; a bucket without gradients is complete at the end."""
        now = perf_counter()
        ready = [now if last == self._began_s else last for last in self._last_s]
        self._rows.append([now - self._began_s, *(moment - self._began_s for moment in ready)])

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def medians(self) -> list[float]:
        """Return the seconds of a backward, and those until each bucket is complete; empty if none was seen."""
        return [round(float(value), 7) for value in np.median(self._rows, axis=0)] if self._rows else []


class WatchedPass:
    """Grain pass whose last backward of each step is timed by a `BackwardWatch`."""

    def __init__(self, grains: GrainPass, watch: BackwardWatch) -> None:
        self.grains, self.watch = grains, watch
        self.doing = grains.doing
        self._num_left = 0

    def begin_step(self, divisor: float, num_grains: int) -> None:
        self._num_left = num_grains
        self.grains.begin_step(divisor, num_grains)

    def forward(self, loss: Loss, grain: Grain) -> tuple[torch.Tensor, Any, Any]:
        return self.grains.forward(loss, grain)

    def backward(self, total: torch.Tensor) -> None:
        self._num_left -= 1
        if self._num_left:
            self.grains.backward(total)
            return
        self.watch.begin()
        self.grains.backward(total)
        self.watch.end()


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


def replay_buffers(task: object) -> list[dict[str, Any]]:
    """Return the sizes of the replay buffers that a task has as attributes."""
    return [value.sizes() for value in getattr(task, "__dict__", {}).values() if isinstance(value, ReplayBuffer)]


def costs(plan: Plan, steps: Sequence[int]) -> list[list[float]]:
    """Return the costs of all grains of these steps; nothing where each rank has a plan of its own."""
    if isinstance(plan, RankPlan):
        return []
    shapes = [plan.shapes(step) for step in steps if step < plan.num_steps]
    return [[samples * (length or 1.0) for samples, length in step] for step in shapes]


def thinned(steps: Sequence[Sequence[Sequence[float]]]) -> list[list[list[float]]]:
    """Return the sampled steps of all ranks, few enough for a journal, in microseconds' precision."""
    most = max(4, MOST_ROWS // max(1, len(steps)))
    stride = max(1, -(-max(map(len, steps), default=0) // most))
    return [[[int(row[0]), *(round(value, 7) for value in row[1:])] for row in rank[::stride]] for rank in steps]
