"""Reading by threads of the training process, for data whose read is a copy of memory (packed data).

Copying releases Python's lock, so threads read while the training process goes on; nothing is pickled or handed over
between processes. For a GPU each grain is copied into a slot of page-locked memory, which is filled anew once its
upload is done: the memory is bounded by the number of slots.

    requests --next free slot--> thread: wait for the slot's upload, copy rows into it --in order--> upload --> finish

What a data set leaves to the device (`FinishesGrains`) is started right behind the upload, on the same stream.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray

from paceline.data.fetch import Fetch, Request
from paceline.data.grain import Grain
from paceline.observe.clock import Clock

SPARE_SLOTS = 2
"""Slots beside one per thread: for grains that are read and have not been asked for."""
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


class ThreadReader:
    """Reads in threads, which are started by the first read and kept for all that follow."""

    def __init__(self, fetch: Fetch, threads: int, uploads: Uploads | None = None, clock: Clock | None = None) -> None:
        """With `uploads` grains come on the device; without, each is in memory of its own."""
        self._fetch, self._threads, self._uploads, self._clock = fetch, threads, uploads, clock or Clock()
        allocate = None if uploads is None else uploads.allocate
        largest = Largest()
        self._slots = [Slot(allocate, largest) for _ in range(threads + SPARE_SLOTS)]
        self._executor: ThreadPoolExecutor | None = None
        self._reading: deque[tuple[Future[Grain], Slot]] = deque()
        self._turn = 0

    def read(self, requests: Iterator[Request], /) -> Iterator[Grain]:
        self._forget()
        turn = self._turn
        if self._executor is None:
            self._executor = ThreadPoolExecutor(self._threads, "paceline-reader")
        free = deque(self._slots)
        while turn == self._turn:
            while free and (request := next(requests, None)) is not None:
                slot = free.popleft()
                self._reading.append((self._executor.submit(self._fill, slot, request), slot))
            if not self._reading:
                return
            future, slot = self._reading.popleft()
            try:
                grain = future.result()
            except BaseException:
                self.close()
                raise
            if self._uploads is not None:
                self._clock.lap("data")
                grain = self._uploads.start(grain)
                slot.upload = self._uploads.mark()
                grain = self._uploads.finish(grain)
                self._clock.lap("transfer")
            free.append(slot)
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
        self._turn += 1
        for future, _ in self._reading:
            future.cancel()
        wait([future for future, _ in self._reading])
        self._reading.clear()

    def _fill(self, slot: Slot, request: Request) -> Grain:
        slot.clear()
        grain = self._fetch.read_into(request, slot.room)
        return grain if self._uploads is None else self._uploads.pinned(grain)
