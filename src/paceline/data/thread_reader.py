"""Reading by threads of the training process, for data whose read is a copy of memory (packed data).

Copying releases Python's lock, so threads read while the training process goes on; nothing is pickled or handed over
between processes. For a GPU each grain is copied into a slot of page-locked memory, which is filled anew once its
upload is done: the memory is bounded by the number of slots.

    thread: take the next request, wait for its slot's upload, copy rows into it --in order--> upload --> finish

The plan, too, is asked by the threads: the training process finds a grain ready and goes on. What a data set leaves to
the device (`FinishesGrains`) is started right behind the upload, on the same stream.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from queue import SimpleQueue
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray

from paceline.data.fetch import Fetch, Request
from paceline.data.grain import Grain
from paceline.observe.clock import Clock

SPARE_SLOTS = 4
"""Slots beside one per thread, for grains that are read and have not been asked for. With four threads they are as many
as the steps that the host launches in one go after it has waited for the device (`loader.STEPS_AHEAD`)."""
_ALIGNMENT = 64


class Done(Protocol):
    """The end of something that a device does, such as a `torch.cuda.Event`."""

    def synchronize(self) -> None:
        """Wait for it."""


class Uploads(Protocol):
    """Copies of grains to a device."""

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """Return memory from which an upload is fast, (bytes,) uint8."""

    def pinned(self, grain: Grain) -> Grain:
        """Return a grain with all tensors in such memory; called by threads."""

    def start(self, grain: Grain) -> Grain:
        """Start to copy a grain; return the copy."""

    def mark(self) -> Done:
        """Return the end of the copies that were started so far."""

    def finish(self, grain: Grain) -> Grain:
        """Start what the data set leaves to the device; return the finished grain."""


class Largest:
    """Bytes of the largest grain that some slots have held: each that grows makes room for it at once.

    Page-locking memory stops the GPU for tenths of a second; slots that grew one by one, whenever the longest of the
    data came to them, would do that for many epochs.
    """

    num_bytes = 0

    def note(self, num_bytes: int) -> None:
        self.num_bytes = max(self.num_bytes, num_bytes)


class Slot:
    """Memory for the arrays of one grain; it grows as needed and is used again."""

    def __init__(self, allocate: Callable[[int], torch.Tensor] | None, largest: Largest | None = None) -> None:
        """Without `allocate` every array is a new one; `largest` is that of all slots beside it."""
        self._allocate, self._largest = allocate, largest or Largest()
        self._bytes = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._used = self._wanted = 0
        self.upload: Done | None = None
        """The upload of its last grain."""

    def clear(self) -> None:
        """Wait until the last grain is not needed any more."""
        if self.upload is not None:
            self.upload.synchronize()
        self._largest.note(self._wanted)
        self.upload, self._used, self._wanted = None, 0, 0

    def free(self) -> None:
        """Give the memory back."""
        self.clear()
        self._bytes = torch.empty(0, dtype=torch.uint8, device="cpu")

    def room(self, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        """Return an array that nothing has been written to.

        Of the first grain only the first array lies in the slot; of later ones all do, up to what was wanted before.
        """
        kind = np.dtype(dtype)
        num_bytes = kind.itemsize * int(np.prod(shape, dtype=np.int64))
        end = self._used + num_bytes
        needed = max(end, self._largest.num_bytes)
        if needed > len(self._bytes) and self._allocate is not None and not self._wanted:
            self._bytes = self._allocate(1 << (needed - 1).bit_length())  # which torch takes for it anyway
        self._wanted = _aligned(self._wanted) + num_bytes
        self._largest.note(self._wanted)
        if end > len(self._bytes):
            return np.empty(shape, kind)
        array: NDArray[Any] = self._bytes[self._used : end].numpy().view(kind).reshape(shape)
        self._used = _aligned(end)
        return array


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


class _Taken(NamedTuple):
    """A request that a thread has taken: the grain comes, in this slot."""

    request: Request
    grain: Future[Grain]
    slot: Slot


class _Row:
    """The requests of one `read`: threads take them one after the other."""

    def __init__(self, requests: Iterator[Request]) -> None:
        self._requests, self._lock, self._is_over = requests, threading.Lock(), False
        self.taken: SimpleQueue[_Taken | Exception | None] = SimpleQueue()
        """In the order of the requests; at the end None, or what was raised instead of a request."""

    def take(self, slot: Slot) -> _Taken | None:
        """Return the next request, to be read into `slot`; None at the end."""
        with self._lock:
            if self._is_over:
                return None
            try:
                taken = _Taken(next(self._requests), Future(), slot)
            except StopIteration:
                self._end(None)
                return None
            except Exception as error:  # of the plan, or of data that cannot be planned
                self._end(error)
                return None
            self.taken.put(taken)
            return taken

    def stop(self) -> None:
        """Let threads take nothing more."""
        with self._lock:
            self._is_over = True

    def _end(self, error: Exception | None) -> None:
        self._is_over = True
        self.taken.put(error)


class ThreadReader:
    """Reads in threads, which are started by the first read and kept for all that follow."""

    def __init__(self, fetch: Fetch, threads: int, uploads: Uploads | None = None, clock: Clock | None = None) -> None:
        """With `uploads` grains come on the device; without, each is in memory of its own."""
        self._fetch, self._threads, self._uploads, self._clock = fetch, threads, uploads, clock or Clock()
        allocate = None if uploads is None else uploads.allocate
        largest = Largest()
        self._slots = [Slot(allocate, largest) for _ in range(threads + SPARE_SLOTS)]
        self._executor: ThreadPoolExecutor | None = None
        self._row: _Row | None = None
        self._jobs: dict[Slot, Future[None]] = {}

    def read(self, requests: Iterator[Request], /) -> Iterator[Grain]:
        """Yield a grain per request; `requests` is asked by the threads, one at a time, and ahead."""
        self._forget()
        row = self._row = _Row(requests)
        executor = self._executor = self._executor or ThreadPoolExecutor(self._threads, "paceline-reader")

        def fill(slot: Slot) -> None:
            self._jobs[slot] = executor.submit(self._fill_next, row, slot)

        for slot in self._slots:
            fill(slot)
        while row is self._row:
            taken = row.taken.get()
            if taken is None:
                return
            try:
                if isinstance(taken, Exception):
                    raise taken
                grain = taken.grain.result()
            except BaseException:
                self.close()
                raise
            if self._uploads is not None:
                self._clock.lap("data")
                grain = self._uploads.start(grain)
                taken.slot.upload = self._uploads.mark()
                grain = self._uploads.finish(grain)
            fill(taken.slot)
            if self._uploads is not None:
                self._clock.lap("transfer")
            yield grain

    def close(self) -> None:
        """Stop the threads, and give their memory back."""
        self._forget()
        for slot in self._slots:
            slot.free()
        executor, self._executor = self._executor, None
        if executor is not None:
            executor.shutdown()

    def _forget(self) -> None:
        """Drop what an earlier read has asked for; it ends."""
        row, self._row = self._row, None
        if row is not None:
            row.stop()
        wait(self._jobs.values())
        self._jobs.clear()

    def _fill_next(self, row: _Row, slot: Slot) -> None:
        """Read the next grain of a row, where there is one."""
        taken = row.take(slot)
        if taken is None:
            return
        try:
            taken.grain.set_result(self._fill(slot, taken.request))
        except BaseException as error:
            taken.grain.set_exception(error)

    def _fill(self, slot: Slot, request: Request) -> Grain:
        slot.clear()
        grain = self._fetch.read_into(request, slot.room)
        return grain if self._uploads is None else self._uploads.pinned(grain)
