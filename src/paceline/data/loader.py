"""The way of a batch, from the plan to the device:

    EpochSteps --requests()--> Request --Reader.read()--> Grain --batches()--> Batch --prefetch()--> Batch on the GPU

The row of requests is endless: after the last step of an epoch comes the first of the next one, so that worker
processes never wait for an epoch to end. The plan decides which samples are read and in which order; the loader decides
how far ahead and by how many processes, which cannot change the result, because every sample's randomness is keyed by
its id.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import chain, islice
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch.utils.data import DataLoader

from paceline.core.errors import PacelineError
from paceline.data.dataset import Collate
from paceline.data.fetch import Fetch, Request, same
from paceline.data.grain import Batch, Grain, map_tensors
from paceline.data.plan import Plan
from paceline.data.thread_reader import ThreadReader
from paceline.observe.clock import Clock
from paceline.world.parent_process import leave_with_parent

CHEAP_READ_S = 0.002
"""A grain that is read faster than this is read by the training process: the hand-over by a worker costs as much."""
MOST_WORKERS = 8
RESIDENT_SHARE = 1 / 16
"""Fraction of a GPU's free memory that a data set of plain tensors may take to live there."""
MOST_COPIED_BYTES = 64 << 20
"""Size up to which a data set is copied to time a read of it."""
STEPS_AHEAD = 8
"""Steps that the host may have launched before the GPU is done with the first of them."""
MOST_THREADS = 4
"""Threads that read packed data by default: one copies 10,000 utterances of 16.7 s per second."""
MOST_BUSY_THREADS = 12
"""Threads by default where reading is more than copying: one draws white noise for some 400 such utterances."""
TINY_READ_S = 0.0001
"""Grains that are read faster than this are read in bursts, while the code that does it is in the CPU's cache."""
BURST = 32


# -- plan -> requests -> grains -> batches -------------------------------------------------------------------------


class EpochSteps(NamedTuple):
    """Some steps of one epoch, of which `rank` out of `size` reads its share."""

    epoch: int
    plan: Plan
    steps: range
    rank: int = 0
    size: int = 1


Announced = deque[tuple[Batch, int]]
"""Batches whose grains have been requested and not all been read, oldest first, each with its number of grains here."""


def requests(epochs: Iterable[EpochSteps], announced: Announced) -> Iterator[Request]:
    """Yield a request per grain, one epoch after the other, and announce the batch that each belongs to."""
    for epoch, plan, steps, rank, size in epochs:
        last, num_requests = steps[-1] if steps else None, 0
        for step in steps:
            share = plan.share(step, rank, size)
            batch = Batch(
                epoch,
                step,
                num_grains=share.num_grains,
                num_samples=share.num_samples,
                count=share.count,
                grains=[],
                is_last=step == last,
                has_next=step != last and step < plan.num_steps,
                own_count=share.own_count,
                samples=share.samples,
                starts=share.starts,
            )
            announced.append((batch, len(share.numbers)))
            num_requests += len(share.numbers)
            for number, samples in zip(share.numbers, share.grains, strict=True):
                yield Request(epoch, number, samples)
        if not num_requests:  # a rank without grains would announce all epochs at once
            return


def batches(grains: Iterator[Grain], announced: Announced) -> Iterator[Batch]:
    """Group grains, which come in the order of their requests, into the announced batches."""
    read: list[Grain] = []
    for grain in grains:
        read.append(grain)
        while announced and len(read) >= announced[0][1]:  # a batch without grains on this rank is complete at once
            batch, num_grains = announced.popleft()
            batch.grains = read[:num_grains]
            del read[:num_grains]
            yield batch
    while announced and announced[0][1] == 0:
        yield announced.popleft()[0]


class BatchRow:
    """Row of batches that goes on from epoch to epoch, handed out one epoch at a time."""

    def __init__(
        self,
        epochs: Iterable[EpochSteps],
        read: Callable[[Iterator[Request]], Iterator[Grain]],
        deliver: Callable[[Iterator[Batch]], Iterator[Batch]] | None = None,
    ) -> None:
        """`deliver` brings batches to where they are used, and may be some of them ahead, in the next epoch too."""
        self._announced: Announced = deque()
        self._ahead: deque[Batch] = deque()
        read_ones = batches(read(requests(epochs, self._announced)), self._announced)
        self._batches = self._noted(read_ones) if deliver is None else deliver(self._noted(read_ones))
        self._is_within_epoch = False

    @property
    def position(self) -> tuple[int, int] | None:
        """(epoch, step) of the next batch, where it is being read already; None within an epoch."""
        if self._is_within_epoch or not (self._ahead or self._announced):
            return None
        batch = self._ahead[0] if self._ahead else self._announced[0][0]
        return batch.epoch, batch.step

    def next_epoch(self) -> Iterator[Batch]:
        """Yield the batches up to the end of the epoch."""
        self._is_within_epoch = True
        for batch in self._batches:
            self._ahead.popleft()
            yield batch
            if batch.is_last:
                break
        self._is_within_epoch = False

    def _noted(self, read_ones: Iterator[Batch]) -> Iterator[Batch]:
        for batch in read_ones:
            self._ahead.append(batch)
            yield batch


class Loader:
    """Reads one data set for a whole run."""

    def __init__(
        self,
        dataset: Any,
        *,
        collate: Collate | None = None,
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
        self._uploads = CudaUploads(self._device, self._fetch.finisher) if self._device.type == "cuda" else None
        self._workers_setting = 0 if self._fetch.is_resident else workers
        self._local_size = local_size
        self._reader: Reader | None = None
        self.workers: int | None = None if self._workers_setting == "auto" else self._workers_setting
        """Worker processes, or threads for packed data on a GPU; None until the first read decides."""

    def run(
        self, plan: Plan, steps: range | None = None, *, epoch: int = 0, rank: int = 0, size: int = 1
    ) -> Iterator[Batch]:
        """Yield the batches of a plan (all, or those of `steps`), on the device; `epoch` keys their randomness."""
        steps = range(plan.num_steps) if steps is None else steps
        return self.row([EpochSteps(epoch, plan, steps, rank, size)]).next_epoch()

    def row(self, epochs: Iterable[EpochSteps]) -> BatchRow:
        """Return the batches of these epochs, on the device; any earlier row ends."""
        uploads, clock = self._uploads, self._clock
        deliver = None if uploads is None else lambda epoch: prefetch(epoch, uploads, clock)
        return BatchRow(self._read_on(epochs), self._read, deliver)

    def read(self, requests: Iterable[Request]) -> Iterator[Grain]:
        """Yield grains on the device, outside of any order of batches; any earlier row ends."""
        for grain in self._read(iter(requests)):
            if self._uploads is None:
                yield grain
            else:
                uploaded = self._uploads.finish(self._uploads.start(grain))
                self._uploads.hand_over(uploaded)
                yield uploaded

    def close(self) -> None:
        """Stop the workers."""
        if self._reader is not None:
            self._reader.close()

    def _read_on(self, epochs: Iterable[EpochSteps]) -> Iterator[EpochSteps]:
        for epoch in epochs:
            yield epoch
            if not self.workers:  # the training process reads when asked: only workers would idle
                return

    def _read(self, requests: Iterator[Request]) -> Iterator[Grain]:
        if self._reader is None:
            on_cpu = self._device.type == "cpu"
            if self._uploads is not None and self._fetch.reads_in_threads and self._workers_setting != 0:
                cores = len(os.sched_getaffinity(0))
                are_busy = self._fetch.threads_are_busy
                self.workers = choose_threads(self._workers_setting, cores, self._local_size, are_busy=are_busy)
                self._reader = ThreadReader(self._fetch, self.workers, self._uploads, self._clock)
                yield from self._reader.read(requests)
                return
            if self.workers is None:
                first = next(requests, None)
                if first is None:
                    return
                requests = chain((first,), requests)
                read_s = 0.0 if self._fetch.is_in_memory else _seconds_to_read(self._fetch, first)
                cores = len(os.sched_getaffinity(0))
                self.workers = choose_workers(self._workers_setting, read_s, cores, self._local_size, on_cpu)
            pin = not on_cpu and not self._fetch.is_resident
            if self.workers:
                self._reader = WorkerReader(self._fetch, self.workers, pin=pin)
            else:
                self._reader = InlineReader(self._fetch, pin=pin, in_bursts=on_cpu)
        yield from self._reader.read(requests)


class CudaUploads:
    """Copies to a GPU, on a stream of their own."""

    def __init__(self, device: torch.device, finish: Callable[[Grain], Grain] | None = None) -> None:
        """`finish`: what the data set leaves to the device; a finished grain stays as it is."""
        self._device, self._stream, self._finish = device, torch.cuda.Stream(device), finish

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """Return page-locked memory."""
        return torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)

    def pinned(self, grain: Grain) -> Grain:
        return grain.pin_memory()

    def start(self, grain: Grain) -> Grain:
        """Start to copy a grain, unless it is there already; return the copy."""
        with torch.cuda.stream(self._stream):
            return grain.to(self._device, non_blocking=True)

    def finish(self, grain: Grain) -> Grain:
        """Start what the data set leaves to the device; return the finished grain."""
        if self._finish is None:
            return grain
        with torch.cuda.stream(self._stream):
            return self._finish(grain)

    def mark(self) -> torch.cuda.Event:
        """Return the end of the copies that were started so far."""
        event = torch.cuda.Event()
        event.record(self._stream)
        return event

    def hand_over(self, grain: Grain) -> None:
        """Let the current stream wait for all that was started, and use this grain."""
        current = torch.cuda.current_stream(self._device)
        current.wait_stream(self._stream)
        # The allocator must not reuse the memory before the step is done with it.
        map_tensors(lambda tensor: tensor.record_stream(current), grain.data)

    def mark_step(self) -> torch.cuda.Event:
        """Return the end of what the current stream has to do so far."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event


def prefetch(batches: Iterator[Batch], uploads: CudaUploads, clock: Clock) -> Iterator[Batch]:
    """Copy each batch to the GPU on a stream of its own, one batch ahead of the step that uses it, also if that is the
    first of the next epoch.

    The host goes on to at most `STEPS_AHEAD` steps before the one that the GPU computes: each holds its batch.
    """
    steps: deque[torch.cuda.Event] = deque()

    def hand_over(batch: Batch) -> Batch:
        for grain in batch.grains:
            uploads.hand_over(grain)
        return batch

    waiting: Batch | None = None
    for batch in batches:
        clock.lap("data")
        batch.grains = [uploads.finish(uploads.start(grain)) for grain in batch.grains]
        handed = None if waiting is None else hand_over(waiting)
        clock.lap("transfer")
        if handed is not None:
            yield handed
            steps.append(uploads.mark_step())
            if len(steps) > STEPS_AHEAD:
                steps.popleft().synchronize()
                clock.lap("compute")
        waiting = batch
    if waiting is not None:
        yield hand_over(waiting)


# -- readers: requests -> grains, in the same order ----------------------------------------------------------------


class Reader(Protocol):
    """Reads grains in the order of their requests."""

    def read(self, requests: Iterator[Request], /) -> Iterator[Grain]:
        """Yield a grain per request; any earlier call ends."""
        ...

    def close(self) -> None:
        """Give back what is held; the next `read` takes it anew."""
        ...


class InlineReader:
    """Reads in the training process, when a grain is asked for."""

    def __init__(self, fetch: Fetch, *, pin: bool, in_bursts: bool) -> None:
        """`in_bursts`: tiny grains may be read ahead, some at once."""
        self._fetch, self._pin, self._in_bursts = fetch, pin, in_bursts

    def read(self, requests: Iterator[Request], /) -> Iterator[Grain]:
        fetch = self._fetch_pinned if self._pin else self._fetch
        read_s = float("inf")
        for request in islice(requests, 1):
            began = time.perf_counter()
            grain = fetch(request)
            read_s = time.perf_counter() - began
            yield grain
        if self._in_bursts and read_s < TINY_READ_S:
            while burst := [fetch(request) for request in islice(requests, BURST)]:
                yield from burst
        for request in requests:
            yield fetch(request)

    def close(self) -> None:
        """Nothing is held."""

    def _fetch_pinned(self, request: Request) -> Grain:
        return self._fetch(request).pin_memory()


class WorkerReader:
    """Reads in worker processes, which are started by the first read and kept for all that follow."""

    def __init__(self, fetch: Fetch, workers: int, *, pin: bool) -> None:
        self._fetch, self._workers, self._pin = fetch, workers, pin
        self._sampler = _RequestSampler()
        self._loader: DataLoader[Any] | None = None
        # Not a local of `read`, whose frame somebody may hold, in a traceback say, when the workers have to go.
        self._grains: Iterator[Any] | None = None
        _readers.add(self)

    def read(self, requests: Iterator[Request], /) -> Iterator[Grain]:
        self._sampler.requests = requests
        if self._loader is None:
            self._loader = DataLoader(
                self._fetch,  # type: ignore[arg-type]
                batch_sampler=self._sampler,  # type: ignore[arg-type]
                collate_fn=same,
                num_workers=self._workers,
                pin_memory=self._pin,
                persistent_workers=True,
                worker_init_fn=_follow_parent,
                generator=torch.Generator(),
            )
        _stop_at_exit()
        earlier = set(multiprocessing.active_children())
        self._grains = iter(self._loader)
        _workers.update(set(multiprocessing.active_children()) - earlier)
        while self._grains is not None and (grain := next(self._grains, None)) is not None:
            if isinstance(grain, PacelineError):
                self.close()
                try:
                    raise grain
                finally:
                    del grain  # a frame that holds its own exception keeps all of this alive
            yield grain

    def close(self) -> None:
        """Stop the workers."""
        self._loader = self._grains = None


class _RequestSampler:
    """The DataLoader's `batch_sampler`: the requests of the current read."""

    requests: Iterator[Request] = iter(())

    def __iter__(self) -> Iterator[Request]:
        return self.requests


_readers: weakref.WeakSet[WorkerReader] = weakref.WeakSet()
_workers: weakref.WeakSet[BaseProcess] = weakref.WeakSet()
_stopping: set[int] = set()
"""Processes that stop all workers at their end; a forked one does not."""


def _stop_at_exit() -> None:
    """Stop all workers before this process waits for them: they ignore the signal by which it would ask them to end, so
    after a run that failed it would wait for ever.

    By a finalizer of multiprocessing, which comes before it waits: what it has started itself (`mp.spawn`) never calls
    functions of atexit.
    """
    if os.getpid() not in _stopping:
        _stopping.add(os.getpid())
        Finalize(None, _close_all, exitpriority=100)


def _close_all() -> None:
    for reader in list(_readers):
        reader.close()
    for worker in list(_workers):  # left over where the garbage collector took a loader's pipes first
        with suppress(RuntimeError, ValueError):  # torch reports the death of a worker; one that is closed needs none
            worker.kill()
            worker.join()


def _follow_parent(number: int) -> None:
    """A signal to the whole process group asks the training process to save; its workers must live until it has.

    And no longer: they end with it, also if it is killed.
    """
    leave_with_parent()
    for ignored in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        signal.signal(ignored, signal.SIG_IGN)


def choose_workers(setting: int | Literal["auto"], read_s: float, cores: int, local_size: int, on_cpu: bool) -> int:
    """Return the number of workers of a rank: none for cheap reads, else this rank's share of the cores."""
    if setting != "auto":
        return setting
    if read_s < CHEAP_READ_S:
        return 0
    share = cores // local_size - (1 if on_cpu else 0)  # on a CPU the training itself needs one
    return max(0 if on_cpu else 1, min(share, MOST_WORKERS))


def choose_threads(setting: int | Literal["auto"], cores: int, local_size: int, *, are_busy: bool) -> int:
    """Return the number of threads of a rank that read packed data; `are_busy`: they do more than copy it."""
    most = MOST_BUSY_THREADS if are_busy else MOST_THREADS
    return max(1, min(most, cores // local_size - 1)) if setting == "auto" else setting


def _seconds_to_read(fetch: Fetch, request: Request) -> float:
    """Time the read of a grain on a copy of the data set: files that it opens must not be shared with the workers.

    0 where there is no copy to be had: data too large to copy is in memory, and data that cannot be copied (open files)
    is best read by one process.
    """
    probe = fetch.copy(MOST_COPIED_BYTES)
    if probe is None:
        return 0.0
    began = time.perf_counter()
    probe(request)
    return time.perf_counter() - began
