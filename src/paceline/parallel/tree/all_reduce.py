"""Sums over ranks that are added in the order of the tree (`core/sum_tree.py`), while the backward pass is running.

Every rank has one or more partial sums of a buffer. They are cut into as many pieces as there are ranks; each rank gets
its piece of all partial sums (all-to-all), adds them as the tree says, and gives the sum to all (all-gather): the bytes
of a ring where each rank has one partial sum. Where only two ranks have something, the library's all-reduce does:
a + b = b + a, and zeros change nothing.

On the CPU both hops are messages between two ranks. All receives are posted before the first send: gloo tells a peer
that it is ready to receive in the stream that carries its own data, so that a late receive waits behind a whole piece.
The second hop begins when the first is done, for which a thread waits while the backward pass runs. Sums arrive where
the partial sums are sent from: whoever sends a sum has got all of them. On a GPU everything is queued on a stream of
its own, and nothing waits.
"""

from __future__ import annotations

import atexit
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from queue import SimpleQueue
from threading import Lock, Thread
from time import perf_counter
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.core.sum_tree import Layout
from paceline.parallel.wire import all_gather_flat, goes_by_host
from paceline.world.failure.flight_recorder import trail

_ROWS, _SUMS, _NEVER = 1, 2, 3
"""Tags of the two hops, and of what nobody sends. Messages of one tag between two ranks keep their order."""
_SLICE = 32_704
"""Numbers that are added at a time beside a backward pass of several threads: few enough for torch to stay in one."""
_PATIENCE = timedelta(minutes=30)
_FAREWELL_S = 2.0
"""Seconds that a process which ends in the middle of sums waits for their threads, at most."""


class _Beside(NamedTuple):
    """Tasks of a thread beside the backward pass, and the group that it waits in."""

    tasks: SimpleQueue[Callable[[], None] | None]
    group: dist.ProcessGroup


_threads: weakref.WeakKeyDictionary[Thread, _Beside] = weakref.WeakKeyDictionary()


@dataclass
class _Flight:
    """A sum under way on the CPU."""

    result: Tensor
    """Where the sum is wanted."""
    layout: Layout
    rows: list[Tensor]
    """This rank's piece of all partial sums, its own in the memory that they are sent from."""
    total: Tensor
    """The sum; it is `result` itself where that is in main memory."""
    room: Tensor
    """Memory of the rows of others."""
    arriving: list[dist.Work]
    """Rows of others, in the first hop."""
    sums: list[dist.Work]
    """Pieces of the sum, in the second hop."""
    sends: list[dist.Work]


class TreeAllReduce:
    """Sums of flat buffers over the ranks of a group, in one order; several may be under way.

    Every rank must start the same sums in the same order, with the same layouts. Lengths must be multiples of the
    number of ranks (`pad`).
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, timeout: timedelta = _PATIENCE) -> None:
        """`timeout` is that of the group. Others may sum in the same group between `finish` and the next `start`."""
        self._group, self._device, self._timeout = group, device, timeout
        self.size, self.rank = group.size(), group.rank()
        self._others = [(self.rank + step) % self.size for step in range(1, self.size)]
        self._by_host = goes_by_host(group, device)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" and not self._by_host else None
        self._plain: list[dist.Work] = []
        self._flights: list[_Flight] = []
        self._first_hops: deque[_Flight] = deque()
        self._lock = Lock()
        """Held by the thread that lets a sum go on to its second hop."""
        self._error: Exception | None = None
        self._tasks: SimpleQueue[Callable[[], None] | None] | None = None
        """Of the thread beside the backward pass."""
        self._has_news = False
        """True if a sum was started since that thread was woken."""
        self.order_s = 0.0
        """Seconds of the host that the order has taken: additions here, and waits for more than one sum per rank."""
        self._rooms: dict[torch.dtype, list[Tensor]] = {}

    def pad(self, length: int) -> int:
        """Return the next length that can be cut into a piece per rank."""
        return -(-length // self.size) * self.size

    def start(self, result: Tensor, partials: Sequence[Tensor], layout: Layout) -> None:
        """Send this rank's partial sums, each of the length of `result`, which becomes the sum of all ranks'.

        They must stay until `finish`, and may be changed.
        """
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
        """Let second hops begin as soon as their first is done, without waiting: for use while this thread is busy."""
        if not self._has_news:
            return
        self._has_news = False
        if self._tasks is None:
            self._tasks = SimpleQueue()
            # It does not know this object, which ends it.
            thread = Thread(target=_work_off, args=(self._tasks,), name="sums", daemon=True)
            _threads[thread] = _Beside(self._tasks, self._group)
            thread.start()
            weakref.finalize(self, self._tasks.put, None)
        self._tasks.put(self._go_on_beside)

    def finish(self) -> None:
        """Wait for all sums; on a GPU only the current stream does. After an error nothing more is waited for: it is
        raised, and no sum counts."""
        began, share = perf_counter(), 0.0
        if self._flights:
            rows = self._flights[-1].layout.rows
            share = 1.0 - len(rows) / sum(rows)
        self._has_news = False
        while self._go_on():
            pass
        flights, self._flights = self._flights, []
        plain, self._plain = self._plain, []
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        for work in plain:
            work.wait()
        for flight in flights:
            for work in (*flight.sums, *flight.sends):
                work.wait(self._timeout)
            if flight.total is not flight.result:
                flight.result.copy_(flight.total)
        self.order_s += share * (perf_counter() - began)
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def _send(self, result: Tensor, partials: Sequence[Tensor], layout: Layout) -> None:
        sent = pieces(partials, self.size)
        sent = (sent.cpu() if self._by_host else sent).view(self.size, -1)  # (ranks, rows * piece)
        piece, num_others = result.numel() // self.size, sum(layout.rows) - len(partials)
        room = self._room(num_others * piece, sent)
        lengths = [rows * piece if rank != self.rank else 0 for rank, rows in enumerate(layout.rows)]
        parts = list(room[: num_others * piece].split(lengths))
        parts[self.rank] = sent[self.rank]
        total = torch.empty(result.shape, dtype=sent.dtype, device="cpu") if self._by_host else result
        arriving = [self._group.recv([parts[other]], other, _ROWS) for other in self._others]
        slots = total.view(self.size, piece)
        sums = [self._group.recv([slots[other]], other, _SUMS) for other in self._others]
        sends = [self._group.send([sent[other]], other, _ROWS) for other in self._others]
        rows = [row for part in parts for row in part.view(-1, piece)]
        flight = _Flight(result, layout, rows, total, room, arriving, sums, sends)
        self._flights.append(flight)
        self._first_hops.append(flight)
        self._has_news = True

    def _go_on(self, at_once: int | None = None) -> bool:
        """Wait for the first hop of the next sum, add its rows, `at_once` numbers at a time, and begin the second."""
        with self._lock:
            if self._error is not None:  # of a sum before these: nobody waits for what will not come
                self._first_hops.clear()
            if not self._first_hops:
                return False
            flight = self._first_hops.popleft()
            try:
                for work in flight.arriving:
                    work.wait(self._timeout)
                began = perf_counter()
                own = flight.total.view(self.size, -1)[self.rank]
                _add_to(own, flight.rows, flight.layout, at_once or len(own))
                self.order_s += perf_counter() - began
                flight.sends += [self._group.send([own], other, _SUMS) for other in self._others]
            except Exception as error:  # of whichever thread: `finish` raises it
                self._error = error
                self._first_hops.clear()
                return False
            return True

    def _go_on_beside(self) -> None:
        at_once = _SLICE if torch.get_num_threads() > 1 else None
        while self._go_on(at_once):
            pass

    def _queue(self, stream: torch.cuda.Stream, result: Tensor, partials: Sequence[Tensor], layout: Layout) -> None:
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            sent = pieces(partials, self.size)
            rows, piece = sum(layout.rows), result.numel() // self.size
            received = torch.empty(rows, piece, dtype=sent.dtype, device=sent.device)
            exchange(received, sent, layout, len(partials), self._group, self._timeout)
            (row,) = add_rows(received, layout)
            all_gather_flat(result, row, group=self._group)

    def _room(self, length: int, like: Tensor) -> Tensor:
        """Return memory to receive in. It is kept: touching fresh memory takes longer than the sum."""
        rooms = self._rooms.setdefault(like.dtype, [])
        in_use = {id(flight.room) for flight in self._flights}
        free = [room for room in rooms if id(room) not in in_use]
        fitting = [room for room in free if room.numel() >= length]
        if fitting:
            return min(fitting, key=Tensor.numel)
        for room in free[:1]:  # too small: one that fits takes its place
            rooms[:] = [each for each in rooms if each is not room]
        rooms.append(torch.empty(length, dtype=like.dtype, device=like.device))
        return rooms[-1]


@atexit.register
def _let_threads_end() -> None:
    """End threads that wait for a peer: one that comes back while Python is being torn down would abort the process.

    gloo has nothing to end a wait with. A receive that runs out of time breaks all of its group's connections, and with
    them every wait; the process is leaving, and its peers will see that anyway.
    """
    for thread, beside in list(_threads.items()):
        beside.tasks.put(None)
        thread.join(_FAREWELL_S / 20)
        if thread.is_alive():
            other = (beside.group.rank() + 1) % beside.group.size()
            with suppress(RuntimeError):
                beside.group.recv([torch.empty(1, dtype=torch.float32, device="cpu")], other, _NEVER).wait(
                    timedelta(milliseconds=1)
                )
            thread.join(_FAREWELL_S)


def _work_off(tasks: SimpleQueue[Callable[[], None] | None]) -> None:
    """Do what is asked for, one after the other, until it is None."""
    while (task := tasks.get()) is not None:
        task()
        del task  # it holds the one who asked


def _add_to(out: Tensor, rows: Sequence[Tensor], layout: Layout, at_once: int) -> None:
    """Add rows in the order of the tree, into `out`, which may be one of them; all of them may be changed."""
    *before, (last_to, last_source) = layout.adds
    for first in range(0, len(out), at_once):
        each = [row[first : first + at_once] for row in rows]
        for to, source in before:
            each[to].add_(each[source])
        torch.add(each[last_to], each[last_source], out=out[first : first + at_once])


def add_rows(rows: Tensor, layout: Layout) -> list[Tensor]:
    """Add rows, (rows, length), in the order of the tree; they are changed. Return those that are left."""
    each = rows.unbind()
    for to, source in layout.adds:
        each[to].add_(each[source])
    return [each[root] for root in layout.roots]


def exchange(
    received: Tensor, sent: Tensor, layout: Layout, num_sent: int, group: dist.ProcessGroup, timeout: timedelta
) -> None:
    """Give every rank its piece of all rows: `received` is (rows, piece), `sent` is what `pieces` made."""
    piece, rank, is_even = received.shape[1], group.rank(), max(layout.rows) == 1
    if received.is_cuda:
        dist.all_to_all_single(
            received.view(-1),
            sent,
            None if is_even else [rows * piece for rows in layout.rows],
            None if is_even else [num_sent * piece] * group.size(),
            group=group,
        )
        return
    parts, outgoing = received.view(-1).split([rows * piece for rows in layout.rows]), sent.view(group.size(), -1)
    others = [(rank + step) % group.size() for step in range(1, group.size())] if piece else []
    works = [group.recv([parts[other]], other, _ROWS) for other in others]
    works += [group.send([outgoing[other]], other, _ROWS) for other in others]
    parts[rank].copy_(outgoing[rank])
    for work in works:
        work.wait(timeout)


def pieces(partials: Sequence[Tensor], size: int) -> Tensor:
    """Return what each rank gets, one after the other: its piece of every partial sum."""
    if len(partials) == 1:
        return partials[0]
    return torch.stack([partial.view(size, -1) for partial in partials], dim=1).view(-1)
