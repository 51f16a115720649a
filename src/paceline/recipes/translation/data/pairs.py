"""Encoded sentence pairs as a data set, and grains of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from paceline.data.dataset import Room
from paceline.data.grain import map_tensors
from paceline.data.strings import Strings
from paceline.recipes.translation.text.vocabulary import BEGIN, END, PAD
from paceline.train.autotune.shapes import RUNGS

ALIGNMENT = 64
"""Bytes that a tensor begins at a multiple of."""


class Pair(NamedTuple):
    """One sample, before it is padded."""

    source: NDArray[np.int32]
    target: NDArray[np.int32]
    """Both without marks."""
    text: str | None = None
    """The source as it was read, where it is needed to show it."""
    reference: str | None = None
    """The target as it was read, where hypotheses are compared with it."""


class Encoded:
    """Many rows of numbers in two arrays: no Python object per row, so that workers share one copy."""

    def __init__(self, ids: NDArray[np.int32], starts: NDArray[np.int64]) -> None:
        self.ids, self.starts = ids, starts  # row n is ids[starts[n] : starts[n + 1]]

    @classmethod
    def pack(cls, rows: Iterable[Sequence[int] | NDArray[np.int32]]) -> Encoded:
        """Pack rows as they come: no more of them than that are held at once."""
        ids, lengths = array("i"), array("q")
        for row in rows:
            ids.extend(row if isinstance(row, list) else list(row))
            lengths.append(len(row))
        return cls(np.array(ids, np.int32), _starts(np.array(lengths, np.int64)))

    @classmethod
    def join(cls, rows: Sequence[NDArray[np.int32]]) -> Encoded:
        """Join rows that are in memory."""
        return cls(np.concatenate(rows), _starts(np.fromiter(map(len, rows), np.int64, len(rows))))

    def take(self, rows: NDArray[np.int64]) -> Encoded:
        """Return these rows, in their order."""
        begins = self.starts[rows]
        lengths = self.starts[1:][rows] - begins
        starts = _starts(lengths)
        places = np.repeat(begins - starts[:-1], lengths)
        places += np.arange(starts[-1])
        return Encoded(self.ids[places], starts)

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, row: int) -> NDArray[np.int32]:
        return self.ids[self.starts[row] : self.starts[row + 1]]

    @property
    def lengths(self) -> NDArray[np.int64]:
        return np.diff(self.starts)

    def content(self) -> list[memoryview]:
        return [self.ids.data, self.starts.data]


def _starts(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    starts = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=starts[1:])
    return starts


class CollatesRows(ABC):
    """A collate function that makes a grain of rows of numbers, without an object per pair."""

    @abstractmethod
    def rows(self, source: Encoded, target: Encoded) -> dict[str, Any]:
        """Return what it makes of these pairs, in tensors alone; rows are without marks."""


class Pairs:
    """Sentence pairs in numbers, all in memory.

    `lengths` are padded tokens: twice the longer side, in multiples of `multiple`, with the mark at its end. A batch of
    `n` pairs whose longest is `l` has no more than `n * l` tokens, source and target and padding together.
    """

    reads_leave_nothing_open = True
    is_packed = True  # a run that waits for this data is not advised to pack it: it is in memory

    def __init__(
        self,
        source: Encoded,
        target: Encoded,
        texts: Strings | None = None,
        references: Strings | None = None,
        *,
        multiple: int = 1,
    ) -> None:
        self._source, self._target = source, target
        self._texts, self._references = texts, references
        longer = np.maximum(source.lengths, target.lengths) + 1
        self.lengths: NDArray[np.int64] = 2 * (-(-longer // multiple) * multiple)
        self.source_lengths: NDArray[np.int64] = source.lengths + 1
        self.target_lengths: NDArray[np.int64] = target.lengths + 1
        """Tokens of each side, with a mark."""
        self.counts: NDArray[np.int64] = self.target_lengths
        """Target tokens, with the end: the denominator of the loss."""
        self.total_length = float(source.lengths.sum() + target.lengths.sum() + 2 * len(source))
        """Tokens of source and target, without padding."""

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: int) -> Pair:
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        index %= len(self)
        return Pair(
            self._source[index],
            self._target[index],
            None if self._texts is None else self._texts[index],
            None if self._references is None else self._references[index],
        )

    def read_grain(self, samples: NDArray[np.int64], seeds: Sequence[int], collate: Any) -> Any:
        """Return what `collate` makes of these pairs: there is nothing random in them."""
        if isinstance(collate, CollatesRows):
            return collate.rows(self._source.take(samples), self._target.take(samples))
        return collate([self[sample] for sample in samples.tolist()])

    def reads_in_threads(self, collate: Any) -> bool:
        return isinstance(collate, CollatesRows)

    def read_grain_into(
        self, samples: NDArray[np.int64], seeds: Sequence[int], collate: CollatesRows, room: Room
    ) -> Any:
        """Return what `collate` makes of these pairs, all of it in one array of `room`."""
        return _in_one(self.read_grain(samples, seeds, collate), room)

    @property
    def fingerprint(self) -> str:
        """Digest of all numbers and their order."""
        digest = xxhash.xxh3_64()
        for column in (self._source, self._target):
            for part in column.content():
                digest.update(part)
        return digest.hexdigest()


def _in_one(data: Any, room: Room) -> Any:
    """Return the same tensors, one behind the other in memory."""
    num_bytes: list[int] = []
    map_tensors(lambda tensor: num_bytes.append(tensor.nbytes), data)
    ends = np.cumsum([-(-each // ALIGNMENT) * ALIGNMENT for each in num_bytes])
    memory = room((int(ends[-1]),), np.uint8)
    begins = iter([0, *ends[:-1].tolist()])

    def placed(tensor: torch.Tensor) -> torch.Tensor:
        values = tensor.numpy()
        begin = next(begins)
        place = memory[begin : begin + values.nbytes].view(values.dtype).reshape(values.shape)
        np.copyto(place, values)
        return torch.from_numpy(place)

    return map_tensors(placed, data)


class Lines(Pairs):
    """Sentences to translate; predictions are lines, in their order."""

    are_lines = True


@dataclass(frozen=True)
class Collate:
    """Pads both sides of a grain to its longest, or to a rung of a ladder: `source`, `target` (begins with the mark)
    and `truth` (what follows each token of `target`)."""

    rung: int = 1
    """Tokens are padded to a multiple of this."""
    is_square: bool = False
    """Both sides are padded to one width, so that a grain's shape is known from its longest side."""

    def __call__(self, pairs: list[Pair]) -> dict[str, Any]:
        source_width = self._width(max(len(pair.source) for pair in pairs))
        target_width = self._width(max(len(pair.target) for pair in pairs))
        if self.is_square:
            source_width = target_width = max(source_width, target_width)
        source = np.full((len(pairs), source_width), PAD, np.int64)
        target = np.full((len(pairs), target_width), PAD, np.int64)
        truth = np.full((len(pairs), target_width), PAD, np.int64)
        for row, pair in enumerate(pairs):
            source[row, : len(pair.source)] = pair.source
            source[row, len(pair.source)] = END
            target[row, 0] = BEGIN
            target[row, 1 : len(pair.target) + 1] = pair.target
            truth[row, : len(pair.target)] = pair.target
            truth[row, len(pair.target)] = END
        data: dict[str, Any] = {
            "source": torch.from_numpy(source),
            "target": torch.from_numpy(target),
            "truth": torch.from_numpy(truth),
        }
        if pairs[0].text is not None:
            data["text"] = [pair.text for pair in pairs]
        if pairs[0].reference is not None:
            data["reference"] = [pair.reference for pair in pairs]
        return data

    def padded(self, length: float) -> float:
        """See `shapes.Padding`: of a pair of this length, as `Pairs.lengths` counts it."""
        return 2.0 * self._width(int(length) // 2 - 1)

    def _width(self, num_tokens: int) -> int:
        """Width for so many tokens and a mark."""
        return -(-(num_tokens + 1) // self.rung) * self.rung


def ladder(data: Pairs, multiple: int) -> Collate:
    """Return a collate function of at most `RUNGS` shapes for each number of pairs."""
    longest = int(data.lengths.max()) // 2
    rung = -(-max(multiple, -(-longest // RUNGS)) // multiple) * multiple
    return Collate(rung, is_square=True)
