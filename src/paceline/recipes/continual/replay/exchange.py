"""Payload between ranks: who has which item of a step, who holds it in the buffer, and how rows get where they are due.

A step's items and draws are cut evenly into as many pieces as its batch has grains, as a plan without lengths cuts its
batches, so pieces do not depend on the number of ranks; only their ranks do. Every rank knows beforehand how many rows
go where, so sizes are never sent.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from paceline.core.even import even_sizes
from paceline.recipes.continual.replay.table import Integers, Layout, Table, slots_digest
from paceline.world.failure.flight_recorder import trail
from paceline.world.link import Link

Pieces = tuple[int, ...]
"""Rank of each grain of a step."""


@dataclass(frozen=True)
class Cut:
    """Positions of one step, or of one draw, on the ranks."""

    ranks: Integers
    """Rank of each position."""
    counts: tuple[int, ...]
    """Number of positions of each rank."""
    local: Integers
    """This rank's positions, ascending."""
    sizes: tuple[int, ...]
    """Size of each of this rank's pieces."""


@lru_cache(maxsize=64)
def cut(num_positions: int, pieces: Pieces, rank: int, num_ranks: int) -> Cut:
    """Cut positions 0..n-1 into these pieces, as seen by one rank."""
    sizes = even_sizes(num_positions, len(pieces))
    ranks = np.repeat(np.array(pieces, np.int64), sizes)
    counts = np.bincount(ranks, minlength=num_ranks).tolist()
    local_sizes = tuple(size for size, owner in zip(sizes, pieces, strict=True) if owner == rank)
    return Cut(ranks, tuple(counts), np.flatnonzero(ranks == rank), local_sizes)


class Arrival:
    """Rows on their way; `wait()` returns them, in `order` if they come in another. It keeps the tensors alive."""

    def __init__(
        self,
        rows: torch.Tensor,
        sent: torch.Tensor | None = None,
        work: dist.Work | None = None,
        order: torch.Tensor | None = None,
    ) -> None:
        self._rows, self._sent, self._work, self._order = rows, sent, work, order

    def wait(self) -> torch.Tensor:
        if self._work is not None:
            self._work.wait()
            self._work = None
        return self._rows if self._order is None else self._rows.index_select(0, self._order)


@dataclass(frozen=True)
class Admitted:
    """Items of one step that go into the buffer."""

    positions: Integers
    """Among the items of the step."""
    slots: Integers
    index: Integers
    """Global index of each."""
    labels: Integers | None
    scores: NDArray[np.float64] | None


class Placement(ABC):
    """Ranks that hold the payload of an item, and its way to the ranks that need it."""

    travels: ClassVar[bool]
    """Rows of a draw come from other ranks, so that it is worth sending them ahead."""

    def __init__(self, layout: Layout, capacity: int, link: Link) -> None:
        self._link, self._rank, self._num_ranks = link, link.world.rank, link.world.size
        self.table = Table(layout, capacity, self._rows_at_start(capacity), link.device)

    @abstractmethod
    def _rows_at_start(self, capacity: int) -> int:
        """Return the number of rows of payload to allocate at once."""

    @abstractmethod
    def _is_held(self, owners: Integers) -> NDArray[np.bool_]:
        """Mark the items that this rank holds, out of items of these owners."""

    @abstractmethod
    def store(self, items: Mapping[str, torch.Tensor], here: Cut, admitted: Admitted) -> None:
        """Put items of a step into the table; `items` are this rank's."""

    @abstractmethod
    def settle(self) -> None:
        """Wait for stored payload that is still under way."""

    @abstractmethod
    def fetch(self, slots: Integers, one_draw: Cut, draws: int) -> Arrival:
        """Bring each rank its share of these slots, which are `draws` draws one after the other."""

    @abstractmethod
    def collect(self, slots: Integers) -> torch.Tensor | None:
        """Return the rows of these slots on the first rank."""

    @abstractmethod
    def digest(self, exact_only: bool) -> int:
        """Return the digest of the whole buffer; all ranks must call it."""

    @abstractmethod
    def fingerprint(self) -> int:
        """Return a number that is the same on all ranks unless their buffers have diverged."""

    def load(
        self, index: Integers, label: Integers, score: NDArray[np.float64], items: Mapping[str, torch.Tensor]
    ) -> None:
        """Fill an empty table with the items of a checkpoint, dealt to the ranks in turn."""
        slots = np.arange(len(index))
        owners = slots % self._num_ranks
        is_held = self._is_held(owners)
        rows = self.table.put(slots, index, owners, is_held, label, score)
        chosen = torch.from_numpy(slots[is_held])
        self.table.write(rows, self.table.layout.pack(items, chosen, self._link.device))

    def _pack(self, items: Mapping[str, torch.Tensor], here: Cut, local_positions: Integers) -> torch.Tensor:
        layout = self.table.layout
        layout.check(items, len(here.local))
        chosen = np.searchsorted(here.local, local_positions)
        return layout.pack(items, torch.from_numpy(chosen), self._link.device)


class _Landing(NamedTuple):
    """Admitted payload that is on its way to all ranks."""

    rows: Integers
    """Rows of the table for it."""
    owners: Integers
    numbers: Integers
    """Of each item among those of its owner."""
    arrival: Arrival


class Replicated(Placement):
    """Every rank holds everything: the few items that a step admits go to all."""

    travels = False
    _landing: _Landing | None = None

    def _rows_at_start(self, capacity: int) -> int:
        return capacity

    def _is_held(self, owners: Integers) -> NDArray[np.bool_]:
        return np.ones(len(owners), np.bool_)

    def store(self, items: Mapping[str, torch.Tensor], here: Cut, admitted: Admitted) -> None:
        owners = here.ranks[admitted.positions]
        payload = self._pack(items, here, admitted.positions[owners == self._rank])
        rows = self.table.put(
            admitted.slots, admitted.index, owners, self._is_held(owners), admitted.labels, admitted.scores
        )
        if self._num_ranks == 1:
            self.table.write(rows, payload)
            return
        counts = np.bincount(owners, minlength=self._num_ranks).tolist()
        numbers = np.zeros(len(owners), np.int64)
        for rank in range(self._num_ranks):
            numbers[owners == rank] = np.arange(counts[rank])
        self._landing = _Landing(rows, owners, numbers, to_all(self._link, payload, counts))

    def settle(self) -> None:
        if self._landing is not None:
            landing, self._landing = self._landing, None
            on_device = self.table.on_device
            payload = landing.arrival.wait()
            self.table.write(landing.rows, payload[on_device(landing.owners), on_device(landing.numbers)])

    def fetch(self, slots: Integers, one_draw: Cut, draws: int) -> Arrival:
        if self._num_ranks > 1:
            slots = slots.reshape(draws, -1)[:, one_draw.local].reshape(-1)
        return Arrival(self.table.read(slots))

    def collect(self, slots: Integers) -> torch.Tensor | None:
        return self.table.read(slots)

    def digest(self, exact_only: bool) -> int:
        return self.table.digest(exact_only)

    def fingerprint(self) -> int:
        return self.table.digest(exact_only=False)


class Sharded(Placement):
    """An item stays on the rank that saw it: what a step replays goes to the ranks that need it, sent ahead while the
    step before is still computing."""

    travels = True

    def _rows_at_start(self, capacity: int) -> int:
        return 0

    def _is_held(self, owners: Integers) -> NDArray[np.bool_]:
        is_held: NDArray[np.bool_] = owners == self._rank
        return is_held

    def store(self, items: Mapping[str, torch.Tensor], here: Cut, admitted: Admitted) -> None:
        owners = here.ranks[admitted.positions]
        is_held = self._is_held(owners)
        payload = self._pack(items, here, admitted.positions[is_held])
        rows = self.table.put(admitted.slots, admitted.index, owners, is_held, admitted.labels, admitted.scores)
        self.table.write(rows, payload)

    def settle(self) -> None:
        """Nothing is under way: stored payload does not travel."""

    def fetch(self, slots: Integers, one_draw: Cut, draws: int) -> Arrival:
        return self._send(slots, np.tile(one_draw.ranks, draws))

    def collect(self, slots: Integers) -> torch.Tensor | None:
        rows = self._send(slots, np.zeros_like(slots)).wait()
        return None if self._rank else rows

    def digest(self, exact_only: bool) -> int:
        return sum(words_of_all(self._link, self.table.digest(exact_only))) % 2**64

    def fingerprint(self) -> int:
        table = self.table
        slots = np.arange(table.num_stored)
        return slots_digest(slots, table.index[slots], table.owner[slots].astype(np.uint64))

    def _send(self, slots: Integers, receivers: Integers) -> Arrival:
        """Send each of these slots to a rank; all ranks know all of them."""
        owners = self.table.owner[slots]
        sent = np.flatnonzero(owners == self._rank)
        sent = sent[np.argsort(receivers[sent], kind="stable")]
        sources = owners[receivers == self._rank]
        order = np.empty(len(sources), np.int64)  # rows arrive by owner
        order[np.argsort(sources, kind="stable")] = np.arange(len(sources))
        return to_each(
            self.table.read(slots[sent]),
            np.bincount(receivers[sent], minlength=self._num_ranks).tolist(),
            np.bincount(sources, minlength=self._num_ranks).tolist(),
            self.table.on_device(order),
        )


def to_all(link: Link, rows: torch.Tensor, counts: Sequence[int]) -> Arrival:
    """Send every rank's rows to every rank, as (ranks, most rows of one rank, bytes); `counts[r]` of rank r's are
    real."""
    most = max(counts)
    sent = rows
    if len(rows) < most:
        sent = rows.new_zeros((most, rows.shape[1]))
        sent[: len(rows)] = rows
    received = rows.new_empty((link.world.size, most, rows.shape[1]))
    # By this name in every torch; the one that takes a single tensor was renamed in 2.13.
    trail.note("all_gather of samples", sent)
    work = dist.all_gather(list(received.unbind()), sent, async_op=True)
    return Arrival(received, sent, work)


def to_each(rows: torch.Tensor, send: Sequence[int], receive: Sequence[int], order: torch.Tensor) -> Arrival:
    """Send `send[r]` of these rows, one after the other, to rank r; `receive[r]` come from rank r and are put in
    order."""
    received = rows.new_empty((sum(receive), rows.shape[1]))
    trail.note("exchange of samples")
    work = dist.all_to_all_single(received, rows, list(receive), list(send), async_op=True)
    return Arrival(received, rows, work, order)


def numbers_of_all(link: Link, local: torch.Tensor, counts: Sequence[int]) -> list[torch.Tensor]:
    """Return every rank's numbers (rows of float64), by rank, on the host."""
    if link.world.size == 1:
        return [local]
    shape = local.shape[1:]
    rows = local.detach().to("cpu", torch.float64).reshape(len(local), math.prod(shape))
    gathered = to_all(link, rows, counts).wait()
    return [gathered[rank, :count].view(count, *shape) for rank, count in enumerate(counts)]


def words_of_all(link: Link, word: int) -> list[int]:
    """Return every rank's 64-bit number, by rank."""
    if link.world.size == 1:
        return [word]
    local = torch.tensor([word - 2**64 if word >= 2**63 else word], device="cpu")
    gathered = torch.empty(link.world.size, dtype=torch.int64, device="cpu")
    trail.note("all_gather", local)
    dist.all_gather(list(gathered.split(1)), local)
    return [value % 2**64 for value in gathered.tolist()]
