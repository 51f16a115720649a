"""Reading one grain of a map-style data set, with every sample's randomness keyed by its id."""

from __future__ import annotations

import io
import pickle
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import TensorDataset

from paceline.core.errors import PacelineError
from paceline.core.keys import key, keys
from paceline.data.collate import stack_collate
from paceline.data.dataset import Collate, DatasetTraits, Room
from paceline.data.grain import Grain


class Request(NamedTuple):
    """One grain to read: its number among the grains of its step, and its samples, whose randomness `epoch` keys."""

    epoch: int
    number: int
    samples: NDArray[np.int64]


class Fetch:
    """Reads and collates grains, in the training process or in a worker."""

    def __init__(self, dataset: Any, collate: Collate | None, seed: int) -> None:
        self._dataset = dataset
        self._collate = collate or stack_collate
        self._seed = seed
        self._traits = traits = DatasetTraits(dataset)
        self._grain_reader, self._sample_reader = traits.grain_reader, traits.sample_reader
        self._thread_reader = traits.thread_reader(self._collate)
        # Plain values in memory draw no random numbers; tensors need no call per sample either.
        self._columns = dataset.tensors if type(dataset) is TensorDataset and collate is None else None
        self._is_list = type(dataset) in (list, tuple)
        self.is_in_memory = self._is_list or self._columns is not None
        """True if reading costs next to nothing."""
        self.is_resident = False
        """True if the whole data set lies on the device, where grains are gathered."""

    def move_to(self, device: torch.device, max_bytes: float) -> None:
        """Move tensors in memory to the device for good, if they all fit: then no sample crosses the bus again."""
        if self._columns is None or sum(column.nbytes for column in self._columns) > max_bytes:
            return
        self._columns = tuple(column.to(device) for column in self._columns)
        self.is_resident = True

    def copy(self, most_bytes: int) -> Fetch | None:
        """Return the same with a copy of the data set; None where that cannot be pickled or is too large.

        A data set whose reads leave nothing open needs no copy.
        """
        if self._traits.reads_leave_nothing_open:
            return self
        buffer = _BoundedBuffer(most_bytes)
        try:
            pickle.dump(self._dataset, buffer, protocol=pickle.HIGHEST_PROTOCOL)
            return Fetch(pickle.loads(buffer.getbuffer()), self._collate, self._seed)
        except Exception:  # whatever a data set's own pickling raises
            return None

    @property
    def reads_in_threads(self) -> bool:
        """True if several threads may call `read_into` at once."""
        return self._thread_reader is not None

    @property
    def threads_are_busy(self) -> bool:
        """True if reading by threads is more than copying."""
        return self._traits.threads_are_busy

    @property
    def finisher(self) -> Callable[[Grain], Grain] | None:
        """Does what the data set leaves to the device, on a grain that is there; a finished grain stays as it is."""
        finisher = self._traits.grain_finisher
        if finisher is None:
            return None
        return lambda grain: Grain(finisher.finish_grain(grain.data), grain.number, grain.samples)

    def read_into(self, request: Request, room: Room) -> Grain:
        """Read a grain, with its large arrays in `room`; only where `reads_in_threads`."""
        assert self._thread_reader is not None
        samples = request.samples
        data = self._thread_reader.read_grain_into(
            samples, keys((self._seed, request.epoch), samples), self._collate, room
        )
        return Grain(data, request.number, samples)

    def __call__(self, request: Request) -> Grain:
        return Grain(self._read(request), request.number, request.samples)

    def _read(self, request: Request) -> Any:
        if self._columns is not None:
            return self._gather(self._columns, request.samples)
        samples = request.samples.tolist()
        if self._grain_reader is not None:
            seeds = keys((self._seed, request.epoch), request.samples)
            data = self._grain_reader.read_grain(request.samples, seeds, self._collate)
            if data is not None:
                return data
        if self._is_list:
            return self._collate([self._dataset[sample] for sample in samples])
        if self._sample_reader is not None:
            seed_everything(key(self._seed, request.epoch, samples[0]))
            return self._collate(self._sample_reader.__getitems__(samples))
        return self._collate([self._read_sample(request.epoch, sample) for sample in samples])

    def _gather(self, columns: tuple[torch.Tensor, ...], samples: NDArray[np.int64]) -> tuple[torch.Tensor, ...]:
        index = torch.from_numpy(samples)
        if self.is_resident:
            index = index.pin_memory().to(columns[0].device, non_blocking=True)
        return tuple(column.index_select(0, index) for column in columns)

    def _read_sample(self, epoch: int, sample: int) -> Any:
        seed_everything(key(self._seed, epoch, sample))
        try:
            return self._dataset[sample]
        except Exception as error:
            if hasattr(error, "add_note"):  # Python 3.11
                error.add_note(f"while reading sample {sample} of the data set")
            raise

    # torch's DataLoader asks for a "batch" of indices and collates it; here the request is the batch.
    def __getitems__(self, request: Request) -> Grain | PacelineError:
        try:
            return self(request)
        except PacelineError as error:  # raised again by the training process: torch would make a traceback of it
            return error


class _BoundedBuffer(io.BytesIO):
    """Buffer in memory that refuses to grow beyond a size."""

    def __init__(self, most_bytes: int) -> None:
        super().__init__()
        self._most_bytes = most_bytes

    def write(self, data: Any) -> int:
        if self.tell() + memoryview(data).nbytes > self._most_bytes:
            raise MemoryError
        return super().write(data)


def seed_everything(value: int) -> None:
    """Seed the generators that a data set may draw from (torch, random, numpy)."""
    torch.default_generator.manual_seed(value)
    random.seed(value)
    np.random.seed(value & 0xFFFFFFFF)


def same(grain: Any) -> Any:
    """Return the grain as it is: the DataLoader's `collate_fn`, since `Fetch` has collated it."""
    return grain
