"""The pieces of a sharded model in memory, each on two ranks, so that survivors of a death go on from them.

Every rank copies its own pieces and those of another rank, on another machine where there is one (`--mirror`). A copy
counts when all ranks have theirs; until then the one before is kept. After a death each piece is still on one rank or
two, unless both have died: then there is only the newest checkpoint.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

from paceline.train.checkpoint import pieces
from paceline.train.checkpoint.memory import TASK, Layout, empty, layout_of
from paceline.train.checkpoint.reader import Checkpoint
from paceline.train.checkpoint.snapshot import Snapshot, refill
from paceline.world.link import Link

Snapshots = dict[str, Snapshot]
"""Parts of one rank, or its pieces of them."""


def partner_shift(hosts: Sequence[str]) -> int:
    """Return how many ranks further a rank's pieces are kept: on the next machine, if all have as many ranks."""
    largest = max(Counter(hosts).values())
    return largest if largest < len(hosts) else 1


@dataclass(frozen=True)
class Holding:
    """What a rank has in memory of one copy."""

    step: int
    size: int
    """Ranks that the copy is of."""
    owners: tuple[int, ...]
    """Ranks, of those of the copy, whose pieces it has."""


def choose(holdings: Sequence[Sequence[Holding]]) -> tuple[int, dict[int, int]] | None:
    """Return the newest copy that is complete: its step, and for each rank of the copy who has its pieces now."""
    steps = sorted({held.step for each in holdings for held in each}, reverse=True)
    for step in steps:
        sources: dict[int, int] = {}
        size = 0
        for rank, each in enumerate(holdings):
            for held in (held for held in each if held.step == step):
                size = held.size
                for owner in held.owners:
                    sources.setdefault(owner, rank)
        if len(sources) == size:
            return step, sources
    return None


@dataclass
class _Copy:
    """One copy, as far as this rank has it."""

    step: int
    size: int
    state: dict[str, Any]
    owners: dict[int, Snapshots] = field(default_factory=dict)


class MirroredState:
    """Copies of a sharded run's state; the same interface as `MemoryState`."""

    in_pieces: ClassVar[bool] = True

    def __init__(self) -> None:
        self._copies: list[_Copy] = []
        """The one that counts, and before it the one that is being taken; newest first."""

    @property
    def step(self) -> int | None:
        return self._copies[0].step if self._copies else None

    def forget(self) -> None:
        self._copies = []

    def take(self, link: Link, step: int, parts: Mapping[str, Mapping[str, Tensor]], state: Mapping[str, Any]) -> None:
        """Copy this rank's pieces, here and to the rank that keeps them, too. All ranks must call it."""
        size, rank, shift = link.world.size, link.world.rank, partner_shift(link.hosts)
        spare = self._copies.pop() if len(self._copies) > 1 and self._copies[-1].size == size else _Copy(0, size, {})
        own, before = spare.owners.get(rank, {}), (rank - shift) % size
        refill(own, parts)
        if size == 1:  # somebody waits to join
            self._copies = [_Copy(step, size, copy.deepcopy(dict(state)), {rank: own})]
            return
        layouts = link.gather_objects({part: layout_of(snapshot.tensors) for part, snapshot in own.items()})
        others = _fitting(spare.owners.get(before, {}), layouts[before])
        sent = [own[part].image for part in sorted(own)]
        link.exchange(sent, (rank + shift) % size, [others[part].image for part in sorted(others)], before)
        self._copies.insert(0, _Copy(step, size, copy.deepcopy(dict(state)), {rank: own, before: others}))
        link.barrier()  # whoever comes out of it knows that all have theirs
        del self._copies[2:]
        self._copies[1:] = [each for each in self._copies[1:] if len(each.owners) <= 2]  # a gathered one is large

    def share(self, link: Link, holders: tuple[int, ...]) -> None:
        """Give every rank all pieces of the newest copy that is complete; forget all if none is. All ranks call it."""
        if not holders:
            return
        mine = [Holding(each.step, each.size, tuple(each.owners)) for each in self._copies]
        everyones = [list(map(_holding, each)) for each in link.gather_objects([astuple(held) for held in mine])]
        chosen = choose(everyones)
        if chosen is None:
            self.forget()
            return
        step, sources = chosen
        here = next((each for each in self._copies if each.step == step), None)
        first = sources[0]
        values = (here.size, here.state) if here is not None and link.world.rank == first else (0, {})
        size, state = link.broadcast_object(values, src=first)
        whole = _Copy(step, size, state)
        for owner in range(size):
            snapshots = {} if here is None else here.owners.get(owner, {})
            whole.owners[owner] = _broadcast(link, snapshots, sources[owner])
        self._copies = [whole]

    def checkpoint(self) -> Checkpoint | None:
        """Return the copy as what a run resumes from, after `share`; None if there is none."""
        if not self._copies:
            return None
        newest = self._copies[0]
        parts: dict[str, Mapping[str, Tensor]] = {}
        for snapshots in newest.owners.values():
            parts |= {name: each.tensors for name, each in snapshots.items()}
        if pieces.missing(list(parts)):
            return None
        whole = pieces.join(parts)
        if TASK in whole:  # a task may go on with the very tensors that it is given
            whole[TASK] = {name: tensor.clone() for name, tensor in whole[TASK].items()}
        return Checkpoint(newest.step, whole, copy.deepcopy(newest.state), None, Path("memory"))


def _holding(entry: Sequence[Any]) -> Holding:
    step, size, owners = entry
    return Holding(step, size, tuple(owners))


def _fitting(snapshots: Snapshots, layouts: Mapping[str, Layout]) -> Snapshots:
    """Return buffers for parts of these layouts: those that are there, if they fit."""
    fitting: Snapshots = {}
    for part, layout in layouts.items():
        before = snapshots.get(part)
        is_same = before is not None and layout_of(before.tensors) == {
            name: (tuple(shape), dtype) for name, (shape, dtype) in layout.items()
        }
        fitting[part] = before if before is not None and is_same else Snapshot(part, empty(layout))
    return fitting


def _broadcast(link: Link, snapshots: Snapshots, source: int) -> Snapshots:
    """Return the pieces that `source` has, on every rank."""
    layouts = {part: layout_of(each.tensors) for part, each in snapshots.items()} if link.world.rank == source else {}
    layouts = link.broadcast_object(layouts, src=source)
    received = snapshots if link.world.rank == source else _fitting({}, layouts)
    for part in layouts:
        link.broadcast(received[part].image, src=source)
    return received
