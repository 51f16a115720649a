"""Sums over ranks that are added in the order of the tree (`core/sum_tree.py`), while the backward pass is running.

Every rank has one or more partial sums of a buffer. They are cut into as many pieces as there are ranks; each rank gets
its piece of all partial sums (all-to-all), adds them as the tree says, and gives the sum to all (all-gather): the bytes
of a ring where each rank has one partial sum. Where only two ranks have something, the library's all-reduce does:
a + b = b + a, and zeros change nothing.

On the CPU the second hop begins when the first is done, which somebody has to notice: `poll` now and then. The two hops
use two process groups, because each rank notices it at another time, and operations of one group must come in the same
order on all ranks. On a GPU everything is queued on a stream of its own, and nothing waits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from time import perf_counter

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.core.sum_tree import Layout
from paceline.parallel.wire import all_gather_flat, goes_by_host
from paceline.world import group_sockets
from paceline.world.failure.flight_recorder import trail


@dataclass
class _Flight:
    """A sum under way on the CPU."""

    result: Tensor
    """Where the sum is wanted."""
    layout: Layout
    received: Tensor
    """(rows, piece)"""
    room: Tensor
    """Memory of `received`."""
    work: dist.Work
    total: Tensor | None = None
    """The gathered sum, in the second hop; it is `result` itself where that is in main memory."""


class TreeSum:
    """Sums of flat buffers over the ranks of a group, in one order; several may be under way.

    Every rank must start the same sums in the same order, with the same layouts. Lengths must be multiples of the
    number of ranks (`pad`).
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, timeout: timedelta | None = None) -> None:
        """`group` may be used by others between `finish` and the next `start`; a second one is made when needed."""
        self._group, self._device, self._timeout = group, device, timeout
        self._second: dist.ProcessGroup | None = None
        self.size = group.size()
        self._by_host = goes_by_host(group, device)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" and not self._by_host else None
        self._plain: list[dist.Work] = []
        self._first_hops: deque[_Flight] = deque()
        self._second_hops: list[_Flight] = []
        self.order_s = 0.0
        """Seconds of the host that the order has taken: additions here, and waits for more than one sum per rank."""
        self._rooms: dict[torch.dtype, list[Tensor]] = {}

    def pad(self, length: int) -> int:
        """Return the next length that can be cut into a piece per rank."""
        return -(-length // self.size) * self.size

    def prepare(self, layout: Layout) -> None:
        """Get ready for sums of this layout, before the first of a step. All ranks must call it."""
        if self._second is None and self._stream is None and self.size > 1 and not layout.is_plain:
            ranks = dist.get_process_group_ranks(self._group)
            with group_sockets.noted():
                self._second = dist.new_group(ranks, timeout=self._timeout, backend="gloo" if self._by_host else None)

    def start(self, result: Tensor, partials: Sequence[Tensor], layout: Layout) -> None:
        """Send this rank's partial sums, each of the length of `result`, which becomes the sum of all ranks'."""
        if self.size == 1:
            assert len(partials) == 1, "one rank has the whole tree"
            return
        trail.note("sum of gradients", result)
        if layout.is_plain:
            work = dist.all_reduce(result, group=self._group, async_op=True)
            assert work is not None
            self._plain.append(work)
        elif self._stream is not None:
            self._queue(self._stream, result, partials, layout)
        else:
            self._send(result, partials, layout)

    def poll(self) -> None:
        """Begin second hops whose first is done, without waiting."""
        while self._first_hops and self._first_hops[0].work.is_completed():
            self._gather(self._first_hops.popleft())

    def finish(self) -> None:
        """Wait for all sums; on a GPU only the current stream does."""
        began, share = perf_counter(), 0.0
        if self._first_hops:
            rows = self._first_hops[-1].layout.rows
            share = 1.0 - len(rows) / sum(rows)
        while self._first_hops:
            self._gather(self._first_hops.popleft())
        for work in self._plain:
            work.wait()
        self._plain.clear()
        for flight in self._second_hops:
            flight.work.wait()
            if flight.total is not flight.result and flight.total is not None:
                flight.result.copy_(flight.total)
        self._second_hops.clear()
        self.order_s += share * (perf_counter() - began)
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def _send(self, result: Tensor, partials: Sequence[Tensor], layout: Layout) -> None:
        sent = pieces(partials, self.size)
        sent = sent.cpu() if self._by_host else sent
        piece, num_rows = result.numel() // self.size, sum(layout.rows)
        room = self._room(num_rows * piece, sent)
        received = room[: num_rows * piece].view(num_rows, piece)
        work = exchange(received, sent, layout, len(partials), self._group, async_op=True)
        assert work is not None
        self._first_hops.append(_Flight(result, layout, received, room, work))

    def _gather(self, flight: _Flight) -> None:
        assert self._second is not None, "prepare"
        flight.work.wait()
        began = perf_counter()
        (row,) = add_rows(flight.received, flight.layout)
        self.order_s += perf_counter() - began
        flight.total = flight.result
        if self._by_host:
            flight.total = torch.empty(flight.result.shape, dtype=row.dtype, device="cpu")
        work = all_gather_flat(flight.total, row, group=self._second, async_op=True)
        assert work is not None
        flight.work = work
        self._second_hops.append(flight)

    def _queue(self, stream: torch.cuda.Stream, result: Tensor, partials: Sequence[Tensor], layout: Layout) -> None:
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            sent = pieces(partials, self.size)
            rows, piece = sum(layout.rows), result.numel() // self.size
            received = torch.empty(rows, piece, dtype=sent.dtype, device=sent.device)
            exchange(received, sent, layout, len(partials), self._group)
            (row,) = add_rows(received, layout)
            all_gather_flat(result, row, group=self._group)

    def _room(self, length: int, like: Tensor) -> Tensor:
        """Return memory to receive in. It is kept: touching fresh memory takes longer than the sum."""
        rooms = self._rooms.setdefault(like.dtype, [])
        in_use = {id(flight.room) for flight in (*self._first_hops, *self._second_hops)}
        free = [room for room in rooms if id(room) not in in_use]
        fitting = [room for room in free if room.numel() >= length]
        if fitting:
            return min(fitting, key=Tensor.numel)
        for room in free[:1]:  # too small: one that fits takes its place
            rooms[:] = [each for each in rooms if each is not room]
        rooms.append(torch.empty(length, dtype=like.dtype, device=like.device))
        return rooms[-1]


def add_rows(rows: Tensor, layout: Layout) -> list[Tensor]:
    """Add rows, (rows, length), in the order of the tree; they are changed. Return those that are left."""
    each = rows.unbind()
    for to, source in layout.adds:
        each[to].add_(each[source])
    return [each[root] for root in layout.roots]


def exchange(
    received: Tensor, sent: Tensor, layout: Layout, num_sent: int, group: dist.ProcessGroup, *, async_op: bool = False
) -> dist.Work | None:
    """Give every rank its piece of all rows: `received` is (rows, piece), `sent` is what `pieces` made."""
    piece, is_even = received.shape[1], max(layout.rows) == 1
    work: dist.Work | None = dist.all_to_all_single(
        received.view(-1),
        sent,
        None if is_even else [rows * piece for rows in layout.rows],
        None if is_even else [num_sent * piece] * group.size(),
        group=group,
        async_op=async_op,
    )
    return work


def pieces(partials: Sequence[Tensor], size: int) -> Tensor:
    """Return what each rank gets, one after the other: its piece of every partial sum."""
    if len(partials) == 1:
        return partials[0]
    return torch.stack([partial.view(size, -1) for partial in partials], dim=1).view(-1)
