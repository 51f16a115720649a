"""How rows travel between ranks. Everyone knows beforehand how many go where, so sizes are never sent."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist

from paceline.world.failure.flight_recorder import trail
from paceline.world.link import Link


class Arrival:
    """Rows on their way; `wait()` gives them, in `order` if they come in another. The tensors involved are kept."""

    def __init__(
        self, rows: torch.Tensor, sent: torch.Tensor, work: dist.Work | None, order: torch.Tensor | None = None
    ) -> None:
        self._rows, self._sent, self._work, self._order = rows, sent, work, order

    def wait(self) -> torch.Tensor:
        if self._work is not None:
            self._work.wait()
            self._work = None
        return self._rows if self._order is None else self._rows.index_select(0, self._order)


def to_all(link: Link, rows: torch.Tensor, counts: Sequence[int]) -> Arrival:
    """Everyone's rows on every rank, as (ranks, most rows of one rank, bytes); `counts[r]` of rank r's are real."""
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
    """`send[r]` of these rows, one after the other, to rank r; `receive[r]` come from rank r, and are put in order."""
    received = rows.new_empty((sum(receive), rows.shape[1]))
    trail.note("exchange of samples")
    work = dist.all_to_all_single(received, rows, list(receive), list(send), async_op=True)
    return Arrival(received, rows, work, order)


def numbers_of_all(link: Link, mine: torch.Tensor, counts: Sequence[int]) -> list[torch.Tensor]:
    """Everyone's numbers (rows of float64), by rank, on the host."""
    if link.world.size == 1:
        return [mine]
    shape = mine.shape[1:]
    rows = mine.detach().to("cpu", torch.float64).reshape(len(mine), math.prod(shape))
    gathered = to_all(link, rows, counts).wait()
    return [gathered[rank, :count].view(count, *shape) for rank, count in enumerate(counts)]


def words_of_all(link: Link, word: int) -> list[int]:
    """Everyone's 64-bit number, by rank."""
    if link.world.size == 1:
        return [word]
    mine = torch.tensor([word - 2**64 if word >= 2**63 else word])
    everyone = torch.empty(link.world.size, dtype=torch.int64)
    trail.note("all_gather", mine)
    dist.all_gather(list(everyone.split(1)), mine)
    return [value % 2**64 for value in everyone.tolist()]
