"""Rows that replay buffers send between ranks, and their seconds on a link.

A buffer's decisions are functions of (seed, item) and (seed, step), so what travels is not estimated but decided once
more, for any number of ranks:

    replicated    all-gather of the rows that a step admits, as many from each rank as the one with most has; most
                  steps admit none once the buffer is full, and send nothing
    sharded       all-to-all of the rows that the next step draws, from the ranks that hold them

Both begin after the last forward of a step, and travel while its last backward runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from paceline.core.even import even_sizes
from paceline.data.partition import assign
from paceline.lab.predict import cost
from paceline.lab.predict.calibration import starts_of
from paceline.lab.predict.cost import Place, Ranks
from paceline.recipes.continual.replay.admission import last_of_each, reservoir
from paceline.recipes.continual.replay.draw import draws

NUM_SAMPLED = 128
"""Steps of a run whose rows are counted."""
MOST_ITEMS = 1 << 22
"""Items of a stream that are followed; after them hardly any is admitted."""
AT_ONCE = 1 << 18
NUMBER_BYTES = 8
"""Of a score, and of the word by which ranks compare their buffers."""


@dataclass(frozen=True)
class Buffer:
    """Sizes of a replay buffer, as a journal has them."""

    capacity: int
    row_bytes: int
    mode: str
    strategy: str
    size: int
    """Items of a draw, over all ranks."""
    draws: int
    check_every: int
    seed: int


class Rows(NamedTuple):
    """Rows that one step sends."""

    gathered: int
    """That the rank with most has admitted: each sends so many to all. None, no gather."""
    sources: Ranks
    """Of each row of the next step's draws: rank that holds it. Empty, no exchange."""
    receivers: Ranks

    def bytes_sent(self, row_bytes: int, num_ranks: int) -> float:
        """Return the bytes that a rank sends to others, mean over the ranks."""
        exchanged = int((self.sources != self.receivers).sum()) / num_ranks
        return row_bytes * ((num_ranks - 1) * self.gathered + exchanged)


class Replayed(NamedTuple):
    """Seconds of a step that buffers take, mean over steps."""

    travel_s: float
    """On the link, beside the last backward."""
    blocking_s: float
    """That all ranks wait for: scores, comparisons, and draws that were not sent ahead."""


def buffers(noted: Sequence[Mapping[str, Any]] | None) -> list[Buffer]:
    """Return the buffers of a profile; what cannot be read is left out."""
    names = [each.name for each in fields(Buffer)]
    kinds = {name: str if name in ("mode", "strategy") else int for name in names}
    return [
        Buffer(**{name: each[name] for name in names})
        for each in noted or ()
        if all(isinstance(each.get(name), kind) for name, kind in kinds.items())
    ]


def assumed(buffer: Buffer) -> str:
    """Say in words what its rows are counted by."""
    if buffer.strategy == "reservoir":
        return "sends the rows that it will decide on"
    if buffer.strategy == "loss-aware":
        return "admits as many rows as it will; which of them they replace follows from losses, and is taken for chance"
    if buffer.strategy == "herding":
        return "sends rows of draws as a reservoir does; what it sends between two stages is left out"
    return "admits rows as a reservoir does: which it admits follows from labels"


def grain_owners(batch: int, grains: int, num_ranks: int, *, in_blocks: bool) -> tuple[int, ...]:
    """Return the rank of each grain of a step."""
    sizes = [float(size) for size in even_sizes(batch, grains)]
    if in_blocks:
        starts = starts_of(sizes, num_ranks)
        return tuple(rank for rank in range(num_ranks) for _ in range(starts[rank], starts[rank + 1]))
    ranks = {number: rank for rank, numbers in enumerate(assign(sizes, num_ranks)) for number in numbers}
    return tuple(ranks[number] for number in range(len(sizes)))


class Stream:
    """Decisions of a buffer, step by step: `pieces` are the ranks of a step's grains, as in `ReplayBuffer`."""

    def __init__(self, buffer: Buffer, batch: int, pieces: Sequence[int]) -> None:
        self._buffer, self._batch, self._pieces = buffer, batch, np.array(pieces, np.int64)
        self._ranks = self._cut(batch)
        self._owner = np.zeros(buffer.capacity, np.int64)
        self.num_seen = self.num_steps = 0

    def _cut(self, num_positions: int) -> Ranks:
        """Return the rank of each of these positions."""
        return np.repeat(self._pieces, even_sizes(num_positions, len(self._pieces)))

    def skip(self, num_steps: int) -> None:
        """Go on by so many steps; only who holds what is followed."""
        buffer, left = self._buffer, num_steps * self._batch
        while left:
            count = min(left, AT_ONCE)
            slots = reservoir(buffer.seed, self.num_seen, count, buffer.capacity)
            kept = np.flatnonzero(slots >= 0)
            # Of several items for one slot the last one stays.
            self._owner[slots[kept]] = self._ranks[(self.num_seen + kept) % self._batch]
            self.num_seen, left = self.num_seen + count, left - count
        self.num_steps += num_steps

    def step(self) -> Rows:
        """Return what a step sends: the items that it admits, or what the next one draws."""
        buffer, none = self._buffer, np.zeros(0, np.int64)
        slots = reservoir(buffer.seed, self.num_seen, self._batch, buffer.capacity)
        positions = last_of_each(slots)
        owners = self._ranks[positions]
        self._owner[slots[positions]] = owners
        self.num_seen, self.num_steps = self.num_seen + self._batch, self.num_steps + 1
        if buffer.mode != "sharded":
            admits = len(owners) > 0 and buffer.strategy != "herding"
            return Rows(int(np.bincount(owners).max()) if admits else 0, none, none)
        num_stored = min(self.num_seen, buffer.capacity)
        size = min(buffer.size, num_stored)
        if size < len(self._pieces) or not buffer.draws:
            return Rows(0, none, none)
        now = range(self.num_steps, self.num_steps + 1)
        drawn = [draws(buffer.seed, now, number, num_stored, size)[0] for number in range(buffer.draws)]
        return Rows(0, self._owner[np.concatenate(drawn)], np.tile(self._cut(size), buffer.draws))


@lru_cache(maxsize=64)
def sampled(buffer: Buffer, batch: int, pieces: tuple[int, ...], num_steps: int) -> tuple[Rows, ...]:
    """Return the rows of steps that are spread evenly over a run."""
    num_steps = max(1, min(num_steps, MOST_ITEMS // batch))
    stream, rows = Stream(buffer, batch, pieces), []
    for step in np.linspace(0, num_steps - 1, min(num_steps, NUM_SAMPLED)).astype(int).tolist():
        stream.skip(step - stream.num_steps)
        rows.append(stream.step())
    return tuple(rows)


def seconds(buffer: Buffer, place: Place, batch: int, grains: int, num_steps: int, *, in_blocks: bool) -> Replayed:
    """Return the seconds of a step of a run of so many steps."""
    if place.ranks == 1:
        return Replayed(0.0, 0.0)
    pieces = grain_owners(batch, grains, place.ranks, in_blocks=in_blocks)
    travel_s = []
    for rows in sampled(buffer, batch, pieces, num_steps):
        gather_s = cost.all_gather(place, place.ranks * rows.gathered * buffer.row_bytes) if rows.gathered else 0.0
        is_sent = len(rows.sources) > 0
        exchange_s = cost.exchange(place, rows.sources, rows.receivers, buffer.row_bytes) if is_sent else 0.0
        travel_s.append(gather_s + exchange_s)
    blocking_s = 0.0
    if buffer.check_every:
        blocking_s += cost.all_gather(place, place.ranks * NUMBER_BYTES) / buffer.check_every
    if buffer.strategy == "loss-aware":
        most = sum(
            int(np.bincount(np.repeat(pieces, even_sizes(count, len(pieces)))).max())
            for count in (batch, min(buffer.size, buffer.capacity))
        )
        blocking_s += cost.all_gather(place, place.ranks * most * NUMBER_BYTES)
    return Replayed(sum(travel_s) / len(travel_s), blocking_s)
