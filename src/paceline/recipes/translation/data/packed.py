"""Grains of sentences that lie one after the other, as they are or in few shapes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.recipes.translation.data.pairs import CollatesRows, Encoded, Pair, Pairs
from paceline.recipes.translation.network.scores import Packings
from paceline.recipes.translation.text.vocabulary import BEGIN, END, PAD
from paceline.speed.layers.occurrences import Occurrences
from paceline.speed.layers.packed_attention import Packing

MOST_SHAPES = 32
"""Shapes of a ladder that is fitted to a run, each a CUDA graph."""
TOKEN_STEPS, SENTENCE_STEPS = 64, 4
"""Rungs from one power of two to the next, of which fitted shapes are made."""
MOST_COMPARED = 1024
"""Distinct shapes that a ladder is fitted to; where there are more, rungs are farther apart."""
ROW_COST = 1 / 16
"""Cost of a place in rows of the longest length, which attention looks at, in tokens."""
SPARE, SPARE_OF_ALL = 1 / 8, 1 / 32
"""Part by which grains may exceed the largest of their length that a ladder was fitted to, and the largest of all."""

Numbers = NDArray[np.int64]


class PackedShape(NamedTuple):
    """Shape of a grain of packed sentences."""

    source: int
    """Tokens, with those that are added."""
    target: int
    sentences: int
    """With those of added tokens, and empty ones."""
    longest: int
    """Tokens that a sentence has at most."""

    def holds(self, needs: Needs) -> bool:
        """Return True if such sentences fit in, with as many of padding as fill it."""
        missing = max(self.source - needs.source, self.target - needs.target)
        return (
            needs.source <= self.source
            and needs.target <= self.target
            and needs.longest <= self.longest
            and needs.sentences - -missing // self.longest <= self.sentences
        )


class Needs(NamedTuple):
    """Sentences of a grain: tokens of both sides, with marks, their number and the longest."""

    source: int
    target: int
    sentences: int
    longest: int

    @classmethod
    def of(cls, source: Numbers, target: Numbers) -> Needs:
        """Return those of sentences of these lengths, marks included."""
        return cls(int(source.sum()), int(target.sum()), len(source), int(max(source.max(), target.max())))


@dataclass(frozen=True)
class CollatePacked(CollatesRows):
    """Lays the sentences of a grain one after the other, without padding: (tokens) each, and where each sentence is."""

    def __call__(self, pairs: list[Pair]) -> dict[str, Any]:
        return self.rows(*_joined(pairs))

    def rows(self, source: Encoded, target: Encoded) -> dict[str, Any]:
        """See `pairs.CollatesRows`."""
        return _laid(source, target, None)


@dataclass(frozen=True)
class PackedLadder(CollatesRows):
    """Lays sentences one after the other in few shapes, for CUDA graphs.

    The tokens of both sides, the number of sentences and the longest are padded to the least costly of `shapes` that
    holds them, else to rungs. What tokens are added are sentences of their own, of padding alone, which add nothing to
    a loss or a gradient.
    """

    data: Pairs | None = None
    """Pairs that grains are made of, to know shapes ahead."""
    shapes: tuple[PackedShape, ...] = ()
    """By ascending cost."""

    def __call__(self, pairs: list[Pair]) -> dict[str, Any]:
        return self.rows(*_joined(pairs))

    def rows(self, source: Encoded, target: Encoded) -> dict[str, Any]:
        """See `pairs.CollatesRows`."""
        return _laid(source, target, self._shape(Needs.of(source.lengths + 1, target.lengths + 1)))

    def shape(self, samples: Numbers) -> tuple[PackedShape, float]:
        """See `shapes.KnownShapes`: of a grain of these pairs, and its tokens."""
        assert self.data is not None
        shape = self._shape(Needs.of(self.data.source_lengths[samples], self.data.target_lengths[samples]))
        return shape, float(shape.source + shape.target)

    def fitted(self, grains: Iterable[Numbers]) -> PackedLadder:
        """See `shapes.FitsShapes`."""
        assert self.data is not None
        source, target = self.data.source_lengths, self.data.target_lengths
        needs = np.array([Needs.of(source[samples], target[samples]) for samples in grains], np.int64)
        return replace(self, shapes=fitted_shapes(needs)) if len(needs) else self

    def _shape(self, needs: Needs) -> PackedShape:
        return next((shape for shape in self.shapes if shape.holds(needs)), None) or _free_shape(needs)


def fitted_shapes(needs: Numbers, most: int = MOST_SHAPES) -> tuple[PackedShape, ...]:
    """Return at most so many shapes that hold all of these grains, (grains, 4), with little padding.

    Of all shapes those two become one, again and again, that add least to the cost of the epoch. The largest of each
    length gets room to spare, so that it holds grains that nobody has looked at, too.
    """
    sizes, shape_of = _distinct(needs)
    times = np.bincount(shape_of).astype(np.float64)
    costs = _cost(sizes) * times
    added = np.stack([_added(number, sizes, times, costs) for number in range(len(sizes))])
    for _ in range(len(sizes) - most):
        one, other = divmod(int(added.argmin()), len(sizes))
        sizes[one] = np.maximum(sizes[one], sizes[other])
        times[one] += times[other]
        costs[one] = _cost(sizes[one]) * times[one]
        times[other] = 0
        shape_of[shape_of == other] = one
        added[other] = added[:, other] = np.inf
        added[one] = added[:, one] = _added(one, sizes, times, costs)
    shapes = {number: _shape_for(needs[shape_of == number], sizes[number]) for number in np.flatnonzero(times).tolist()}
    most_tokens = needs[:, :2].max(0) * (1 + SPARE_OF_ALL)
    for longest in {shape.longest for shape in shapes.values()}:
        group = [number for number, shape in shapes.items() if shape.longest == longest]
        largest = max(group, key=lambda number: _cost(sizes[number]))
        grains = needs[np.isin(shape_of, group)]
        room = np.minimum(grains[:, :2].max(0) * (1 + SPARE), most_tokens).astype(np.int64)
        shapes[largest] = _shape_for(grains, np.array([*_rungs(room, TOKEN_STEPS), 0, longest]), SPARE)
    return tuple(sorted(set(shapes.values()), key=lambda shape: (float(_cost(np.array(shape))), shape)))


def _distinct(needs: Numbers) -> tuple[Numbers, Numbers]:
    """Return the shapes of grains, rounded up to rungs, and which of them each grain has."""
    steps = TOKEN_STEPS
    while True:
        rungs = (steps, steps, SENTENCE_STEPS, 1)
        rounded = np.stack([_rungs(column, each) for column, each in zip(needs.T, rungs, strict=True)], 1)
        sizes, shape_of = np.unique(rounded, axis=0, return_inverse=True)
        if len(sizes) <= MOST_COMPARED or steps == 1:
            return sizes, shape_of.reshape(-1)
        steps //= 2


def _cost(sizes: Numbers) -> NDArray[np.float64]:
    """Return the cost of shapes, (..., 4), in tokens."""
    costs: NDArray[np.float64] = sizes[..., 0] + sizes[..., 1] + ROW_COST * sizes[..., 2] * sizes[..., 3]
    return costs


def _added(number: int, sizes: Numbers, times: NDArray[np.float64], costs: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return what it adds to the cost of all grains to make one shape of this and each other that is left."""
    together: NDArray[np.float64]
    together = _cost(np.maximum(sizes[number], sizes)) * (times[number] + times) - costs[number] - costs
    together[times == 0] = np.inf
    together[number] = np.inf
    return together


def _shape_for(needs: Numbers, size: Numbers, spare: float = 0.0) -> PackedShape:
    """Return the shape of this size with as many sentences as any of these grains takes, with those that fill it."""
    source, target, _, longest = (int(number) for number in size)
    missing = np.maximum(source - needs[:, 0], target - needs[:, 1])
    sentences = int(((needs[:, 2] * (1 + spare)).astype(np.int64) - -missing // longest).max())
    return PackedShape(source, target, int(_rungs(np.array(sentences), SENTENCE_STEPS)), longest)


def _free_shape(needs: Needs) -> PackedShape:
    """Return the next rungs of all four numbers."""
    source, target, longest = (
        int(_rungs(np.array(number), steps))
        for number, steps in ((needs.source, 16), (needs.target, 16), (needs.longest, 1))
    )
    missing = max(source - needs.source, target - needs.target)
    return PackedShape(source, target, int(_rungs(np.array(needs.sentences - -missing // longest), 1)), longest)


def _rungs(numbers: Numbers, steps: int) -> Numbers:
    """Return the next of `steps` rungs from one power of two to the next; of 16 those are 3 % apart on average."""
    _, exponents = np.frexp(np.maximum(1, numbers) - 1)  # 2 ** exponents is the next power of two
    sizes = np.maximum(16, (1 << exponents.astype(np.int64)) // 2 // steps)
    rungs: Numbers = -(-numbers // sizes) * sizes
    return rungs


def _joined(pairs: list[Pair]) -> tuple[Encoded, Encoded]:
    return Encoded.join([pair.source for pair in pairs]), Encoded.join([pair.target for pair in pairs])


def _laid(source: Encoded, target: Encoded, shape: PackedShape | None) -> dict[str, Any]:
    """Return a grain of these rows, in a shape that holds them, or just as large as they are."""
    if shape is None:
        in_rows, out_rows = (Packing.of(torch.from_numpy(rows.lengths + 1)) for rows in (source, target))
    else:
        in_rows, out_rows = _filled(source, shape.source, shape), _filled(target, shape.target, shape)
    tokens = {
        "source": _marked(source, in_rows.num_tokens, END, is_first=False),
        "target": _marked(target, out_rows.num_tokens, BEGIN, is_first=True),
        "truth": _marked(target, out_rows.num_tokens, END, is_first=False),
    }
    in_source, in_target = (Occurrences.of(tokens[name]) for name in ("source", "target"))
    data: dict[str, Any] = {name: torch.from_numpy(ids) for name, ids in tokens.items()}
    return {**data, "packings": Packings(in_rows, out_rows, in_source, in_target)}


def _filled(rows: Encoded, total: int, shape: PackedShape) -> Packing:
    """Return the places of rows with a mark each, and behind them those of sentences that fill a shape."""
    lengths = np.zeros(shape.sentences, np.int64)
    lengths[: len(rows)] = rows.lengths + 1
    whole, rest = divmod(total - int(lengths.sum()), shape.longest)
    lengths[len(rows) : len(rows) + whole] = shape.longest
    lengths[len(rows) + whole : len(rows) + whole + 1] = rest
    return Packing.of(torch.from_numpy(lengths), shape.longest)


def _marked(rows: Encoded, total: int, mark: int, *, is_first: bool) -> Numbers:
    """Return (total) tokens: rows with a mark before or behind each, then padding."""
    tokens = np.full(total, PAD, np.int64)
    is_token = np.ones(len(rows.ids) + len(rows), np.bool_)
    marks = (rows.starts[:-1] if is_first else rows.starts[1:]) + np.arange(len(rows))
    is_token[marks] = False
    marked = tokens[: len(is_token)]
    marked[is_token] = rows.ids
    marked[marks] = mark
    return tokens
