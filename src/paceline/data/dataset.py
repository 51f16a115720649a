"""Interface of a data set: the methods it must have, and those it may offer beyond that.

A map-style data set has `__len__` and `__getitem__`, an iterable one `__iter__`. Everything else is optional: each
protocol below is one thing that a data set may offer, and `DatasetTraits` is the only place where a data set is asked
for them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast, runtime_checkable

import numpy as np
import xxhash
from numpy.typing import ArrayLike, NDArray
from torch.utils.data import IterableDataset

Collate = Callable[[list[Any]], Any]
"""Makes the data of one grain of a list of samples."""


class MapDataset(Protocol):
    """Samples by index: a torch `Dataset`, a list, an array."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


class StreamDataset(Protocol):
    """Samples as they come, of unknown number; `__iter__` gives a fresh iterator each time."""

    def __iter__(self) -> Iterator[Any]: ...


class HasLengths(Protocol):
    """Cost of each sample (seconds, frames, tokens), for batches of similar lengths and a fair split over ranks."""

    @property
    def lengths(self) -> ArrayLike: ...


class HasCounts(Protocol):
    """Weight of each sample in the denominator of the loss, where it is not 1 (tokens, frames)."""

    @property
    def counts(self) -> ArrayLike: ...


class HasTotalLength(Protocol):
    """Length of all samples as they were recorded, where `lengths` are upper bounds (augmentation that stretches)."""

    @property
    def total_length(self) -> float: ...


class HasFingerprint(Protocol):
    """Digest of the content, compared between ranks and when a run is resumed."""

    @property
    def fingerprint(self) -> str: ...


class HasNames(Protocol):
    """Name of each sample in the output of `paceline infer`."""

    @property
    def names(self) -> Sequence[str]: ...


class HasLines(Protocol):
    """True for lines of text: `paceline infer` writes their predictions as lines, without numbers or names."""

    @property
    def are_lines(self) -> bool: ...


class HasTags(Protocol):
    """Name of each sample in a packed file."""

    @property
    def tags(self) -> Sequence[str]: ...


class IsPacked(Protocol):
    """True for data that is packed already: a run that waits for it is not told to pack it."""

    @property
    def is_packed(self) -> bool: ...


class LeavesNothingOpen(Protocol):
    """True if a read opens and closes all its files: the loader may time a read without copying the data set."""

    @property
    def reads_leave_nothing_open(self) -> bool: ...


class ReadsSamples(Protocol):
    """Several samples in one call, as torch's own loader knows it."""

    def __getitems__(self, samples: list[int], /) -> list[Any]: ...


class ReadsGrains(Protocol):
    """A whole grain in one call: the data that `collate` would make of these samples, or None to read them one by one.

    `seeds` has one seed per sample; whatever is random in a sample must be drawn from its seed alone.
    """

    def read_grain(self, samples: NDArray[np.int64], seeds: Sequence[int], collate: Collate, /) -> Any: ...


class Room(Protocol):
    """Gives arrays that nothing has been written to: `numpy.empty`, or a place in memory that is used again."""

    def __call__(self, shape: tuple[int, ...], dtype: Any, /) -> NDArray[Any]: ...


class ReadsInThreads(Protocol):
    """A whole grain in one call that several threads may make at once: its cost is copying, no state is shared.

    Worth it for arrays in memory-mapped files. Large arrays are taken from `room`.
    """

    def reads_in_threads(self, collate: Collate, /) -> bool:
        """Return True if all grains can be read so, with this collate function."""
        ...

    def read_grain_into(
        self, samples: NDArray[np.int64], seeds: Sequence[int], collate: Collate, room: Room, /
    ) -> Any: ...


class BusyThreads(Protocol):
    """True if threads that read do more than copy (decode, draw noise): `workers: auto` then starts more of them."""

    @property
    def threads_are_busy(self) -> bool: ...


class FinishesGrains(Protocol):
    """A part of the work on a grain that is left to the GPU it is used on, such as augmentation of a whole batch."""

    def finish_grain(self, data: Any, /) -> Any:
        """Return the data of a grain that lies on the GPU, finished; data that is finished already stays as it is.

        Called by the training process on the stream of uploads: it must not wait for the device.
        """
        ...


class Shards(Protocol):
    """An iterable data set that gives each rank a part of its own; also as Hugging Face has it, with the arguments
    `num_shards` and `index`, where the number of its shards is a multiple of that of the ranks."""

    def shard(self, rank: int, size: int, /) -> Iterable[Any]: ...


@runtime_checkable
class Stateful(Protocol):
    """An iterable data set, or its iterator, that knows where it is: a resumed run does not read the same again.

    `load_state_dict` is followed by `__iter__`, which goes on there; the next `__iter__` starts anew.
    """

    def state_dict(self) -> Mapping[str, Any]:
        """Return where it is, as plain values and tensors; called after every step's samples."""
        ...

    def load_state_dict(self, state: Any, /) -> None: ...


@runtime_checkable
class KnowsEpochs(Protocol):
    """An iterable data set with another order in every epoch, as Hugging Face and torch's samplers have it."""

    def set_epoch(self, epoch: int, /) -> None: ...


@dataclass(frozen=True)
class DatasetTraits:
    """Typed view of what a data set offers; None (or False) where it does not.

    Nothing is read before it is asked for, since a data set may compute these on demand.
    """

    dataset: Any

    @property
    def is_map_style(self) -> bool:
        return hasattr(self.dataset, "__len__") and hasattr(self.dataset, "__getitem__")

    @property
    def is_stream(self) -> bool:
        """True for an iterable of unknown length."""
        dataset = self.dataset
        return isinstance(dataset, IterableDataset) or (
            hasattr(dataset, "__iter__") and not hasattr(dataset, "__getitem__")
        )

    @property
    def lengths(self) -> NDArray[Any] | None:
        return self._column("lengths")

    @property
    def counts(self) -> NDArray[Any] | None:
        return self._column("counts")

    @property
    def total_length(self) -> float | None:
        total = getattr(self.dataset, "total_length", None)
        return None if total is None else float(total)

    @property
    def fingerprint(self) -> str | None:
        value = getattr(self.dataset, "fingerprint", None)
        return value if isinstance(value, str) else None

    @property
    def names(self) -> Sequence[str] | None:
        return cast("Sequence[str] | None", getattr(self.dataset, "names", None))

    @property
    def are_lines(self) -> bool:
        return bool(getattr(self.dataset, "are_lines", False))

    @property
    def tags(self) -> Sequence[str] | None:
        return cast("Sequence[str] | None", getattr(self.dataset, "tags", None))

    @property
    def is_packed(self) -> bool:
        return bool(getattr(self.dataset, "is_packed", False))

    @property
    def reads_leave_nothing_open(self) -> bool:
        return bool(getattr(self.dataset, "reads_leave_nothing_open", False))

    @property
    def sample_reader(self) -> ReadsSamples | None:
        return cast(ReadsSamples, self.dataset) if hasattr(self.dataset, "__getitems__") else None

    @property
    def grain_reader(self) -> ReadsGrains | None:
        return cast(ReadsGrains, self.dataset) if hasattr(self.dataset, "read_grain") else None

    def thread_reader(self, collate: Collate) -> ReadsInThreads | None:
        """Return the data set if threads may read it, with this collate function."""
        if not hasattr(self.dataset, "read_grain_into"):
            return None
        reader = cast(ReadsInThreads, self.dataset)
        return reader if reader.reads_in_threads(collate) else None

    @property
    def threads_are_busy(self) -> bool:
        return bool(getattr(self.dataset, "threads_are_busy", False))

    @property
    def grain_finisher(self) -> FinishesGrains | None:
        return cast(FinishesGrains, self.dataset) if hasattr(self.dataset, "finish_grain") else None

    def is_cut_for(self, size: int) -> bool:
        """Return True if each of so many ranks reads a part of its own, else all read everything and keep their own
        grains. Shards of Hugging Face's kind are dealt out if that can be done evenly, and only to several ranks."""
        if not hasattr(self.dataset, "shard"):
            return False
        return not self._has_numbered_shards or (size > 1 and self.dataset.num_shards % size == 0)

    def part(self, rank: int, size: int) -> Iterable[Any]:
        """Return what a rank reads."""
        if not self.is_cut_for(size):
            return cast("Iterable[Any]", self.dataset)
        if self._has_numbered_shards:
            return cast("Iterable[Any]", self.dataset.shard(num_shards=size, index=rank))
        return cast(Shards, self.dataset).shard(rank, size)

    @property
    def _has_numbered_shards(self) -> bool:
        """True for `shard(num_shards, index)`, False for `shard(rank, size)`."""
        return {"num_shards", "index"} <= inspect.signature(self.dataset.shard).parameters.keys()

    def _column(self, name: str) -> NDArray[Any] | None:
        values = getattr(self.dataset, name, None)
        return None if values is None else np.asarray(values)


def fingerprint(dataset: MapDataset, lengths: NDArray[Any] | None, counts: NDArray[Any] | None) -> str:
    """Return a digest of all that decides the order of a data set, and of its own `fingerprint`."""
    digest = xxhash.xxh3_64(len(dataset).to_bytes(8, "little"))
    for column in (lengths, counts):
        if column is not None:
            digest.update(np.ascontiguousarray(column).view(np.uint8).data)
    content = DatasetTraits(dataset).fingerprint
    if content is not None:
        digest.update(content.encode())
    return digest.hexdigest()
