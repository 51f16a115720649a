"""A global batch and its grains, the micro-batches that never depend on the number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, KeysView, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.core.errors import WrongType
from paceline.core.sum_tree import Starts
from paceline.core.tree import map_leaves
from paceline.world.values import sendable


def map_tensors(change: Callable[[torch.Tensor], Any], data: Any) -> Any:
    """Apply `change` to every tensor in nested tuples, lists, dictionaries and dataclasses."""
    return map_leaves(change, data, torch.Tensor)


@sendable
class Grain:
    """One collated micro-batch, the unit that the model sees.

    `grain.x` and `grain["x"]` read a dictionary's entries, and `model(**grain)` hands them over by name; `x, y = grain`
    unpacks a tuple, whose first two entries are also `grain.x` and `grain.y`. `samples` are the ids of its samples
    in the data set.
    """

    __slots__ = ("data", "number", "samples")

    def __init__(self, data: Any, number: int, samples: NDArray[np.int64]) -> None:
        self.data = data
        self.number = number  # among the grains of the global batch
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, key: Any) -> Any:
        return self.data[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.data)

    def keys(self) -> KeysView[str]:
        """Return the names of a dictionary's entries."""
        if not isinstance(self.data, Mapping):
            raise WrongType(
                f"the grain's data ({_describe(self.data)}) is not a dictionary, so its entries have no names",
                hint="unpack it, `x, y = grain`, or let the data set (or `collate`) return dictionaries",
            )
        return self.data.keys()

    @property
    def x(self) -> Any:
        return self.data[0] if isinstance(self.data, (tuple, list)) else self.__getattr__("x")

    @property
    def y(self) -> Any:
        return self.data[1] if isinstance(self.data, (tuple, list)) else self.__getattr__("y")

    def __getattr__(self, name: str) -> Any:
        data = object.__getattribute__(self, "data")
        if isinstance(data, Mapping) and name in data:
            return data[name]
        if not isinstance(data, dict) and hasattr(data, name):
            return getattr(data, name)
        raise AttributeError(f"the grain's data ({_describe(data)}) has no {name!r}")

    def __reduce__(self) -> tuple[Any, ...]:
        return Grain, (self.data, self.number, self.samples)

    def pin_memory(self) -> Grain:
        return Grain(map_tensors(torch.Tensor.pin_memory, self.data), self.number, self.samples)

    def to(self, device: torch.device, *, non_blocking: bool = False) -> Grain:
        moved = map_tensors(lambda tensor: tensor.to(device, non_blocking=non_blocking), self.data)
        return Grain(moved, self.number, self.samples)

    def shapes(self) -> str:
        """Return the shapes inside, for messages."""
        return _describe(self.data)


def _describe(data: Any) -> str:
    if isinstance(data, torch.Tensor):
        return f"{str(data.dtype).removeprefix('torch.')}{list(data.shape)}"
    if isinstance(data, Mapping):
        return ", ".join(f"{name}: {_describe(value)}" for name, value in data.items())
    if isinstance(data, tuple | list):
        return ", ".join(_describe(value) for value in data)
    return type(data).__name__


@dataclass(slots=True)
class Batch:
    """This rank's part of one global batch."""

    epoch: int
    """Of the stage, from 0: an index, as those of steps and samples. What is logged counts epochs from 1."""
    step: int
    """Within the epoch, from 0."""
    num_grains: int
    """Over all ranks."""
    num_samples: int
    """Over all ranks."""
    count: float
    """Denominator of the loss over all ranks, known before the first backward."""
    grains: list[Grain]
    """This rank's, by ascending number."""
    is_last: bool = False
    """True if no rank has data after this one, as far as this rank can tell: of shards of unknown length it cannot."""
    has_next: bool = True
    """True if this rank has data after this one."""
    own_count: float = 0.0
    """This rank's part of `count`: the denominator of a step of its own (`reduce: param`)."""
    samples: NDArray[np.int64] | None = None
    """Ids of the whole global batch, grain after grain where no lengths decide; None for data of unknown length."""
    knows_others: bool = True
    """False if every rank reads a stream of its own, and may have no grain where `num_grains` counts one for it."""
    starts: Starts | None = None
    """First grain of each rank, and the number of grains, where ranks hold blocks of grains; all ranks have the same.
    None if ranks know only their own grains, or hold any."""
