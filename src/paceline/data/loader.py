"""Grains on the device before the step asks for them: reading, workers, pinning and prefetch.

What is read is the plan's decision; the loader only decides how far ahead and by how many processes, which cannot
change the result because every sample's randomness is keyed by its id.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import signal
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import chain, islice
from multiprocessing.process import BaseProcess
from typing import Any, Literal

import torch
from torch.utils.data import DataLoader

from paceline.core.errors import PacelineError
from paceline.data.ahead import Ahead, Seat, Then, Turn
from paceline.data.fetch import Fetch, Request, same
from paceline.data.grain import Batch, Grain, map_tensors
from paceline.data.plan import Plan
from paceline.observe.clock import Clock

CHEAP_READ_S = 0.002
"""A grain read faster than this is read by the training process itself: a worker's hand-over would cost as much."""
MOST_WORKERS = 8
RESIDENT_SHARE = 1 / 16
"""Of a GPU's free memory, what a data set of plain tensors may take to live there."""
MOST_COPIED_BYTES = 64 << 20
"""A data set is copied, to time a read of it, up to this size."""
TINY_READ_S = 0.0001
"""Grains read faster than this are small: a burst of them is read at once, while the code that does it is in cache."""
BURST = 32


_loaders: weakref.WeakSet[Loader] = weakref.WeakSet()
_workers: weakref.WeakSet[BaseProcess] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """The interpreter waits for processes that are still there, and asks them to end by the signal that workers ignore:
    after a run that failed it would wait for ever."""
    for loader in list(_loaders):
        loader.close()
    for worker in list(_workers):  # left over where a loader was found by the garbage collector, its pipes first
        with suppress(RuntimeError, ValueError):  # torch tells of a worker's death; one that is closed needs none
            worker.kill()
            worker.join()


def choose_workers(asked: int | Literal["auto"], read_s: float, cores: int, local_size: int, on_cpu: bool) -> int:
    """Loader processes per rank: none for cheap reads, else this rank's share of the cores."""
    if asked != "auto":
        return asked
    if read_s < CHEAP_READ_S:
        return 0
    mine = cores // local_size - (1 if on_cpu else 0)  # on a CPU the training itself needs one
    return max(0 if on_cpu else 1, min(mine, MOST_WORKERS))


class Loader:
    """Reads one data set for a whole run; workers are started once and kept."""

    def __init__(
        self,
        dataset: Any,
        *,
        collate: Callable[[list[Any]], Any] | None = None,
        seed: int = 0,
        device: torch.device | None = None,
        workers: int | Literal["auto"] = "auto",
        local_size: int = 1,
        clock: Clock | None = None,
    ) -> None:
        self._clock = clock or Clock()
        self._fetch = Fetch(dataset, collate, seed)
        self._device = device or torch.device("cpu")
        if self._device.type == "cuda":
            free_bytes, _ = torch.cuda.mem_get_info(self._device)
            self._fetch.move_to(self._device, RESIDENT_SHARE * free_bytes / local_size)
        self._asked = 0 if self._fetch.is_resident else workers
        self._local_size = local_size
        self._turns = _Turns()
        self._reader: DataLoader[Any] | None = None
        self._reading: Iterator[Any] | None = None
        self._ahead: tuple[Ahead, Iterator[Grain]] | None = None  # where workers have read on
        _loaders.add(self)
        self._read_s = float("inf")  # of the last grain that was timed
        self.workers: int | None = None if self._asked == "auto" else self._asked

    def run(
        self,
        plan: Plan,
        steps: range | None = None,
        *,
        epoch: int = 0,
        seat: Seat | None = None,
        then: Then | None = None,
    ) -> Iterator[Batch]:
        """Batches of a plan (all, or those of `steps`), on the device. `epoch` keys the samples' randomness.

        Steps past this plan's end (another rank's plan is longer) are batches without grains. `then` says what is
        likely to be asked for next, so that workers can read on; to ask for something else is no mistake.
        """
        turn = Turn(plan, range(plan.num_steps) if steps is None else steps, epoch, seat or Seat())
        batches = self._in_bursts(self._batches(turn, then))
        return batches if self._device.type == "cpu" else prefetch(batches, self._device, self._clock)

    def read(self, requests: Iterable[Request]) -> Iterator[Grain]:
        """Grains on the device, outside of any plan's order: to try something out before the first step."""
        self._ahead = None
        for grain in self._grains(iter(requests)):
            yield grain.to(self._device, non_blocking=True)

    def close(self) -> None:
        """Stop the workers."""
        self._reader = self._reading = self._ahead = None

    def _in_bursts(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        first = next(batches, None)
        if first is None:
            return
        yield first
        if self._read_s < TINY_READ_S and self._device.type == "cpu":
            while burst := list(islice(batches, BURST)):
                yield from burst
        yield from batches

    def _batches(self, turn: Turn, then: Then | None) -> Iterator[Batch]:
        kept, self._ahead = self._ahead, None
        if kept is not None and kept[0].next is not None and kept[0].next.is_same(turn):
            ahead, grains = kept
        else:
            # Whoever reads for itself reads when asked: only workers would idle.
            ahead = Ahead(turn, lambda done: then(done) if then is not None and self.workers else None)
            grains = self._grains(ahead.requests())
        own = ahead.next
        assert own is not None
        yield from ahead.batches(own, grains)
        if ahead.next is not None and self._reading is not None:
            self._ahead = (ahead, grains)

    def _grains(self, requests: Iterator[Request]) -> Iterator[Grain]:
        on_cpu = self._device.type == "cpu"
        pin = not on_cpu and not self._fetch.is_resident
        if not self.workers:
            first = next(requests, None)
            if first is None:
                return
            if self.workers is None:
                read_s = 0.0 if self._fetch.is_in_memory else _seconds_to_read(self._fetch, first)
                cores = len(os.sched_getaffinity(0))
                self.workers = choose_workers(self._asked, read_s, cores, self._local_size, on_cpu)
            requests = chain([first], requests)
        if self.workers == 0:
            for request in islice(requests, 1):
                began = time.perf_counter()
                grain = self._fetch(request)
                self._read_s = time.perf_counter() - began
                yield grain.pin_memory() if pin else grain
            for request in requests:
                grain = self._fetch(request)
                yield grain.pin_memory() if pin else grain
            return
        self._turns.requests = requests
        if self._reader is None:
            self._reader = DataLoader(
                self._fetch,  # type: ignore[arg-type]
                batch_sampler=self._turns,  # type: ignore[arg-type]
                collate_fn=same,
                num_workers=self.workers,
                pin_memory=pin,
                persistent_workers=True,
                worker_init_fn=_leave_signals_to_the_parent,
                generator=torch.Generator(),
            )
        others = set(multiprocessing.active_children())
        # Not a local of this generator, which somebody may hold, in a traceback say, when the workers have to go.
        self._reading = iter(self._reader)
        _workers.update(set(multiprocessing.active_children()) - others)
        while self._reading is not None and (read := next(self._reading, None)) is not None:
            if isinstance(read, PacelineError):
                self.close()
                try:
                    raise read
                finally:
                    del read  # a frame that holds its own exception keeps all of this alive
            yield read


def _seconds_to_read(fetch: Fetch, request: Request) -> float:
    """How long a grain takes to read, measured on a copy: what a read opens must not be shared with the workers.

    0 where there is no copy to be had: data too large to copy is in memory, and what cannot be copied (open files)
    is best read by one process.
    """
    probe = fetch.copy(MOST_COPIED_BYTES)
    if probe is None:
        return 0.0
    began = time.perf_counter()
    probe(request)
    return time.perf_counter() - began


def _leave_signals_to_the_parent(number: int) -> None:
    """A signal to the whole process group asks the training process to save; its workers must live until it has."""
    for asked in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        signal.signal(asked, signal.SIG_IGN)


class _Turns:
    """What the DataLoader asks for its next indices; another run of requests may be put in for the next epoch."""

    requests: Iterator[Request] = iter(())

    def __iter__(self) -> Iterator[Request]:
        return self.requests


def prefetch(batches: Iterator[Batch], device: torch.device, clock: Clock) -> Iterator[Batch]:
    """Copy each batch on a stream of its own, one batch ahead of the step that uses it."""
    stream = torch.cuda.Stream(device)

    def upload(batch: Batch) -> Batch:
        with torch.cuda.stream(stream):
            batch.grains = [grain.to(device, non_blocking=True) for grain in batch.grains]
        return batch

    def hand_over(batch: Batch) -> Batch:
        current = torch.cuda.current_stream(device)
        current.wait_stream(stream)
        for grain in batch.grains:  # the allocator must not reuse the memory before the step is done with it
            map_tensors(lambda tensor: tensor.record_stream(current), grain.data)
        return batch

    waiting: Batch | None = None
    for batch in batches:
        clock.lap("data")
        uploaded = upload(batch)
        handed = None if waiting is None else hand_over(waiting)
        clock.lap("transfer")
        if handed is not None:
            yield handed
        waiting = uploaded
    if waiting is not None:
        yield hand_over(waiting)
