"""One grain read from a map-style data set, with every sample's randomness keyed by its id."""

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
from paceline.core.keys import key
from paceline.data.collate import stack_collate
from paceline.data.grain import Grain


class Request(NamedTuple):
    """Which samples of which epoch make which grain."""

    epoch: int
    number: int
    samples: NDArray[np.int64]


class Fetch:
    """Reads and collates grains; the same in the main process and in a worker, picklable for both."""

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any] | None, seed: int) -> None:
        self._dataset = dataset
        self._collate = collate or stack_collate
        self._seed = seed
        # Plain values in memory draw no random numbers; tensors need no call per sample either.
        self._columns = dataset.tensors if type(dataset) is TensorDataset and collate is None else None
        self._is_list = type(dataset) in (list, tuple)
        # A data set may read a whole grain at once, as this collate would make it; it says None where it cannot.
        self._reads_grains = hasattr(dataset, "read_grain")
        self.is_in_memory = self._is_list or self._columns is not None
        """Reading costs next to nothing."""
        self.is_resident = False
        """The whole data set lies on the device, and grains are gathered there."""

    def move_to(self, device: torch.device, max_bytes: float) -> None:
        """Put tensors in memory onto the device for good, if they all fit: then no sample crosses the bus again."""
        if self._columns is None or sum(column.nbytes for column in self._columns) > max_bytes:
            return
        self._columns = tuple(column.to(device) for column in self._columns)
        self.is_resident = True

    def copy(self, most_bytes: int) -> Fetch | None:
        """The same with a data set of its own, None where that cannot be pickled or is too large.

        A data set that opens and closes within one read says so (`reads_leave_nothing_open`): it needs no copy.
        """
        if getattr(self._dataset, "reads_leave_nothing_open", False):
            return self
        buffer = _Bounded(most_bytes)
        try:
            pickle.dump(self._dataset, buffer, protocol=pickle.HIGHEST_PROTOCOL)
            return Fetch(pickle.loads(buffer.getbuffer()), self._collate, self._seed)
        except Exception:  # whatever a data set's own pickling raises
            return None

    def __call__(self, request: Request) -> Grain:
        return Grain(self._read(request), request.number, request.samples)

    def _read(self, request: Request) -> Any:
        if self._columns is not None:
            index = torch.from_numpy(request.samples)
            if self.is_resident:
                index = index.pin_memory().to(self._columns[0].device, non_blocking=True)
            return tuple(column.index_select(0, index) for column in self._columns)
        samples = request.samples.tolist()
        if self._reads_grains:
            grain = self._dataset.read_grain(
                request.samples, [key(self._seed, request.epoch, sample) for sample in samples], self._collate
            )
            if grain is not None:
                return grain
        if self._is_list:
            return self._collate([self._dataset[sample] for sample in samples])
        if hasattr(self._dataset, "__getitems__"):
            seed_everything(key(self._seed, request.epoch, samples[0]))
            return self._collate(self._dataset.__getitems__(samples))
        read = []
        for sample in samples:
            seed_everything(key(self._seed, request.epoch, sample))
            try:
                read.append(self._dataset[sample])
            except Exception as error:
                if hasattr(error, "add_note"):  # Python 3.11
                    error.add_note(f"while reading sample {sample} of the data set")
                raise
        return self._collate(read)

    # torch's DataLoader asks for a "batch" of indices and collates it; here the request is the batch.
    def __getitems__(self, request: Request) -> Grain | PacelineError:
        try:
            return self(request)
        except PacelineError as error:  # raised again by the training process: torch would make a traceback of it
            return error


class _Bounded(io.BytesIO):
    def __init__(self, most_bytes: int) -> None:
        super().__init__()
        self._most_bytes = most_bytes

    def write(self, data: Any) -> int:
        if self.tell() + memoryview(data).nbytes > self._most_bytes:
            raise MemoryError
        return super().write(data)


def seed_everything(value: int) -> None:
    """Seed the generators a data set may draw from (torch, random, numpy)."""
    torch.default_generator.manual_seed(value)
    random.seed(value)
    np.random.seed(value & 0xFFFFFFFF)


def same(grain: Any) -> Any:
    return grain
