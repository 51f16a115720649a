"""The newest state of a run in the memory of every rank, so that those that survive another's death go on from it.

It has what a checkpoint has, is complete on each rank, and is taken between two steps that all ranks have done. So a
step that was never finished needs no undoing: whatever it has changed (weights, batch-norm shares, replay buffers,
counters of a task) is left behind with the objects that it was done with.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.train.checkpoint.reader import Checkpoint
from paceline.train.checkpoint.snapshot import Snapshot, refill
from paceline.world.link import Link

COST = 0.005
"""Share of the training time that copies may take."""
LONGEST_S = 30.0
"""Longest time between two copies, however much they cost."""
TASK = "task"


def steps_between(copy_s: float, step_s: float) -> int:
    """Return after how many steps to copy again, so that copies of `copy_s` take `COST` of the time of steps."""
    steps = math.ceil(copy_s / (COST * max(step_s, 1e-6)))
    return max(1, min(steps, math.ceil(LONGEST_S / max(step_s, 1e-6))))


class MemoryState:
    """Copy of a run's state. `step` is None while there is none."""

    def __init__(self) -> None:
        self.step: int | None = None
        self._snapshots: dict[str, Snapshot] = {}
        self._state: dict[str, Any] = {}

    def take(self, step: int, parts: Mapping[str, Mapping[str, Tensor]], state: Mapping[str, Any]) -> None:
        """Copy everything. Nothing in here waits for another rank, so that it is done, or not begun."""
        self.step = None
        refill(self._snapshots, parts)
        self._state, self.step = copy.deepcopy(dict(state)), step

    def forget(self) -> None:
        self.step, self._snapshots, self._state = None, {}, {}

    def share(self, link: Link, holders: tuple[int, ...]) -> None:
        """Give every rank the copy of the first holder, unless all have it. All ranks must call it."""
        if len(holders) in (0, link.world.size):
            return
        source = holders[0]
        is_source = link.world.rank == source
        layout = {part: _layout(snapshot.tensors) for part, snapshot in self._snapshots.items()} if is_source else {}
        step, state, layout = link.broadcast_object((self.step, self._state, layout), src=source)
        keeps = link.world.rank in holders
        snapshots = self._snapshots if keeps else {part: Snapshot(part, _empty(each)) for part, each in layout.items()}
        for part in layout:
            link.broadcast(snapshots[part].image, src=source)
        self._snapshots, self._state, self.step = snapshots, state, step

    def checkpoint(self) -> Checkpoint | None:
        """Return the copy as what a run resumes from; None if there is none."""
        if self.step is None:
            return None
        parts: dict[str, Mapping[str, Tensor]] = {name: each.tensors for name, each in self._snapshots.items()}
        if TASK in parts:  # a task may go on with the very tensors that it is given
            parts[TASK] = {name: tensor.clone() for name, tensor in parts[TASK].items()}
        return Checkpoint(self.step, parts, copy.deepcopy(self._state), None, Path("memory"))


@torch.no_grad()
def same_on_all(link: Link, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the first rank's named tensors, in main memory, on every rank. All ranks must call it."""
    if link.world.size == 1:
        return dict(tensors)
    own = {name: tensor.detach().to("cpu").contiguous() for name, tensor in tensors.items()} if link.is_first else {}
    layout = link.broadcast_object(_layout(own))
    if not link.is_first:
        own = _empty(layout)
    for tensor in own.values():
        if tensor.numel():
            link.broadcast(tensor)
    return own


def _layout(tensors: Mapping[str, Tensor]) -> dict[str, tuple[tuple[int, ...], str]]:
    return {name: (tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")) for name, tensor in tensors.items()}


def _empty(layout: Mapping[str, tuple[tuple[int, ...], str]]) -> dict[str, Tensor]:
    return {
        name: torch.empty(tuple(shape), dtype=getattr(torch, dtype), device="cpu")
        for name, (shape, dtype) in layout.items()
    }
