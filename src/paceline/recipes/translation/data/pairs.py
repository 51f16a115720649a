"""Encoded sentence pairs as a data set, and grains of them."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from paceline.data.strings import Strings
from paceline.recipes.translation.network.scores import Packings
from paceline.recipes.translation.text.vocabulary import BEGIN, END, PAD
from paceline.speed.layers.occurrences import Occurrences
from paceline.speed.layers.packed_attention import Packing
from paceline.train.autotune.shapes import RUNGS


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
        self._ids, self._starts = ids, starts  # row n is ids[starts[n] : starts[n + 1]]

    @classmethod
    def pack(cls, rows: Iterable[Sequence[int] | NDArray[np.int32]]) -> Encoded:
        """Pack rows as they come: no more of them than that are held at once."""
        ids, lengths = array("i"), array("q")
        for row in rows:
            ids.extend(row if isinstance(row, list) else list(row))
            lengths.append(len(row))
        return cls(np.array(ids, np.int32), _starts(np.array(lengths, np.int64)))

    def take(self, rows: NDArray[np.int64]) -> Encoded:
        """Return these rows, in their order."""
        lengths = self.lengths[rows]
        starts = _starts(lengths)
        places = np.repeat(self._starts[:-1][rows] - starts[:-1], lengths) + np.arange(starts[-1])
        return Encoded(self._ids[places], starts)

    def __len__(self) -> int:
        return len(self._starts) - 1

    def __getitem__(self, row: int) -> NDArray[np.int32]:
        return self._ids[self._starts[row] : self._starts[row + 1]]

    @property
    def lengths(self) -> NDArray[np.int64]:
        return np.diff(self._starts)

    def content(self) -> list[memoryview]:
        return [self._ids.data, self._starts.data]


def _starts(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    starts = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=starts[1:])
    return starts


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

    @property
    def fingerprint(self) -> str:
        """Digest of all numbers and their order."""
        digest = xxhash.xxh3_64()
        for column in (self._source, self._target):
            for part in column.content():
                digest.update(part)
        return digest.hexdigest()


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


def collate_packed(pairs: list[Pair]) -> dict[str, Any]:
    """Lay the sentences of a grain one after the other, without padding: (tokens) each, and where each sentence is."""
    sizes = _sizes(pairs)
    return _packed(pairs, [sizes.source, sizes.target], None)


@dataclass(frozen=True)
class PackedLadder:
    """Lays sentences one after the other in few shapes, for CUDA graphs.

    The tokens of both sides, the number of sentences and the longest are padded to rungs. What tokens are added are
    sentences of their own, of padding alone, which add nothing to a loss or a gradient.
    """

    data: Pairs | None = None
    """Pairs that grains are made of, to know shapes ahead."""

    def __call__(self, pairs: list[Pair]) -> dict[str, Any]:
        sizes = _sizes(pairs)
        shape = packed_shape(sizes.source, sizes.target)
        sides = []
        for lengths, total in ((sizes.source, shape.source), (sizes.target, shape.target)):
            fill = np.zeros(shape.sentences - len(lengths), np.int64)
            whole, rest = divmod(total - int(lengths.sum()), shape.longest)
            fill[:whole] = shape.longest
            fill[whole : whole + 1] = rest
            sides.append(np.concatenate([lengths, fill]))
        return _packed(pairs, sides, shape)

    def shape(self, samples: NDArray[np.int64]) -> tuple[PackedShape, float]:
        """See `shapes.KnownShapes`: of a grain of these pairs, and its tokens."""
        assert self.data is not None
        shape = packed_shape(self.data.source_lengths[samples], self.data.target_lengths[samples])
        return shape, float(shape.source + shape.target)


class PackedShape(NamedTuple):
    """Shape of a grain of packed sentences."""

    source: int
    """Tokens, with those that are added."""
    target: int
    sentences: int
    """With those of added tokens, and empty ones."""
    longest: int
    """Tokens that a sentence has at most."""


def packed_shape(source: NDArray[np.int64], target: NDArray[np.int64]) -> PackedShape:
    """Return the shape for sentences of these lengths, marks included: the next rungs of all four numbers."""
    sums = int(source.sum()), int(target.sum())
    totals = _rung(sums[0], 16), _rung(sums[1], 16)
    longest = _rung(int(max(source.max(), target.max())), 1)
    most = max(-(-(total - number) // longest) for total, number in zip(totals, sums, strict=True))
    return PackedShape(*totals, _rung(len(source) + most, 1), longest)


def _rung(number: int, steps: int) -> int:
    """Return the next of `steps` rungs from one power of two to the next; of 16 those are 3 % apart on average."""
    size = max(16, (1 << (max(1, number) - 1).bit_length()) // 2 // steps)
    return -(-number // size) * size


class _Sizes(NamedTuple):
    source: NDArray[np.int64]
    target: NDArray[np.int64]


def _sizes(pairs: list[Pair]) -> _Sizes:
    """Lengths of both sides, with a mark each."""
    source = np.fromiter((len(pair.source) for pair in pairs), np.int64, len(pairs))
    target = np.fromiter((len(pair.target) for pair in pairs), np.int64, len(pairs))
    return _Sizes(source + 1, target + 1)


_BEGIN, _END = np.array([BEGIN], np.int32), np.array([END], np.int32)


def _packed(pairs: list[Pair], lengths: Sequence[NDArray[np.int64]], shape: PackedShape | None) -> dict[str, Any]:
    longest = None if shape is None else shape.longest
    packings = tuple(Packing.of(torch.from_numpy(each), longest) for each in lengths)
    rows = {
        "source": [part for pair in pairs for part in (pair.source, _END)],
        "target": [part for pair in pairs for part in (_BEGIN, pair.target)],
        "truth": [part for pair in pairs for part in (pair.target, _END)],
    }
    tokens = {}
    for name, parts in rows.items():
        tokens[name] = np.full(packings[name != "source"].num_tokens, PAD, np.int64)
        joined = np.concatenate(parts)
        tokens[name][: len(joined)] = joined
    data: dict[str, Any] = {name: torch.from_numpy(ids) for name, ids in tokens.items()}
    in_source, in_target = (Occurrences.of(tokens[name]) for name in ("source", "target"))
    return {**data, "packings": Packings(packings[0], packings[1], in_source, in_target)}


def ladder(data: Pairs, multiple: int) -> Collate:
    """Return a collate function of at most `RUNGS` shapes for each number of pairs."""
    longest = int(data.lengths.max()) // 2
    rung = -(-max(multiple, -(-longest // RUNGS)) // multiple) * multiple
    return Collate(rung, is_square=True)
