"""The newest state of a run in the memory of every rank, so that those that survive another's death go on from it.

It has what a checkpoint has, is complete on each rank, and is taken between two steps that all ranks have done. So a
step that was never finished needs no undoing: whatever it has changed (weights, batch-norm shares, replay buffers,
counters of a task) is left behind with the objects that it was done with.
"""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from paceline.config.settings import TrainConfig
from paceline.core.run_folder import METRICS, RUNNING, RunBusy, RunFolder, read_record, status_now
from paceline.train.checkpoint.format import listed, step_of
from paceline.train.checkpoint.reader import Checkpoint
from paceline.train.checkpoint.snapshot import Snapshot, refill
from paceline.train.checkpoint.writer import Checkpointer
from paceline.world.link import Link
from paceline.world.store import poll

COST = 0.005
"""Share of the training time that copies may take."""
LONGEST_S = 30.0
"""Longest time between two copies, however much they cost."""
TASK = "task"
# How long a process that saves alone waits for others that do the same.
_LOCK_S = 5.0
WATCHED_S = 20.0
"""Longer than those that go on after a loss are without the lock of their run."""


def steps_between(copy_s: float, step_s: float) -> int:
    """Return after how many steps to copy again, so that copies of `copy_s` take `COST` of the time of steps."""
    steps = math.ceil(copy_s / (COST * max(step_s, 1e-6)))
    return max(1, min(steps, math.ceil(LONGEST_S / max(step_s, 1e-6))))


class Copies(Protocol):
    """The state of a run in memory: whole on each rank (`MemoryState`), or in pieces (`MirroredState`)."""

    in_pieces: ClassVar[bool]

    @property
    def step(self) -> int | None:
        """Steps that the newest copy has done; None while there is none."""
        ...

    def take(
        self, link: Link, step: int, parts: Mapping[str, Mapping[str, Tensor]], state: Mapping[str, Any]
    ) -> None: ...

    def forget(self) -> None: ...

    def share(self, link: Link, holders: tuple[int, ...]) -> None: ...

    def checkpoint(self) -> Checkpoint | None: ...


class MemoryState:
    """Copy of a run's state. `step` is None while there is none."""

    in_pieces: ClassVar[bool] = False

    def __init__(self) -> None:
        self.step: int | None = None
        self._snapshots: dict[str, Snapshot] = {}
        self._state: dict[str, Any] = {}

    def take(self, link: Link, step: int, parts: Mapping[str, Mapping[str, Tensor]], state: Mapping[str, Any]) -> None:
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
        layout = {part: layout_of(snapshot.tensors) for part, snapshot in self._snapshots.items()} if is_source else {}
        step, state, layout = link.broadcast_object((self.step, self._state, layout), src=source)
        keeps = link.world.rank in holders
        snapshots = self._snapshots if keeps else {part: Snapshot(part, empty(each)) for part, each in layout.items()}
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


def save_alone(memory: Copies, config: TrainConfig, *, is_certain: bool) -> int | None:
    """End a run as stopped where no other rank can be asked: write the copy of this process, if it is newer than the
    newest checkpoint, and return the number of steps that are saved.

    Without `is_certain` it may be this process that is cut off: then the folder is watched for a while, as others who
    go on would hold its lock or write to it. None: there is nothing to save, another process has done so, or others
    train on, whose folder it is.
    """
    if config.out is None or not RunFolder(config.out).is_run:
        return None
    if not is_certain and is_in_use(config.out, WATCHED_S):
        return None
    run = RunFolder(config.out)
    if not poll(lambda: _is_locked(run), _LOCK_S):
        return None
    try:
        newest = max((step_of(path) for path in listed(run.checkpoints)), default=-1)
        copied, record = memory.checkpoint(), read_record(run.folder)
        is_newer = copied is not None and copied.step > newest
        if copied is not None and is_newer:
            writer = Checkpointer(
                run.checkpoints,
                keep_last=config.keep_last,
                keep_best=config.keep_best,
                mode=config.monitor_mode,
                background=False,
            )
            writer.save(copied.step, copied.parts, copied.state)
            writer.close()
            newest = copied.step
        if newest < 0 or (record.status == "stopped" and not is_newer):
            return None
        run.write(replace(record, status="stopped"))
        return newest
    finally:
        run.unlock()


def is_in_use(folder: Path, watched_s: float) -> bool:
    """Return True if within so many seconds somebody holds the lock of a run, or writes to its journal."""
    before = _written(folder)
    return poll(lambda: status_now(folder, RUNNING) == RUNNING or _written(folder) != before, watched_s)


def _written(folder: Path) -> int:
    try:
        return os.stat(folder / METRICS).st_size
    except OSError:
        return 0


def _is_locked(run: RunFolder) -> bool:
    """Lock the folder of a run; return False while another process has it."""
    try:
        run.lock()
    except RunBusy:
        return False
    return True


@torch.no_grad()
def same_on_all(link: Link, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the first rank's named tensors, in main memory, on every rank. All ranks must call it."""
    if link.world.size == 1:
        return dict(tensors)
    own = {name: tensor.detach().to("cpu").contiguous() for name, tensor in tensors.items()} if link.is_first else {}
    layout = link.broadcast_object(layout_of(own))
    if not link.is_first:
        own = empty(layout)
    for tensor in own.values():
        if tensor.numel():
            link.broadcast(tensor)
    return own


Layout = Mapping[str, tuple[tuple[int, ...], str]]
"""Shape and dtype of tensors by name."""


def layout_of(tensors: Mapping[str, Tensor]) -> dict[str, tuple[tuple[int, ...], str]]:
    """Return what a rank must know to make room for these tensors."""
    return {name: (tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")) for name, tensor in tensors.items()}


def empty(layout: Layout) -> dict[str, Tensor]:
    """Return tensors of this layout, in main memory."""
    return {
        name: torch.empty(tuple(shape), dtype=getattr(torch, dtype), device="cpu")
        for name, (shape, dtype) in layout.items()
    }
