"""Admission: which items of a stream a buffer keeps, and in which slot.

An item is known by its global index, its place in the stream counted from 0 over the whole run. Chance is keyed by
(seed, global index), so all ranks decide alike without messages. A slot of -1 means: not kept. The strategies are pure
functions of values that every rank has; `Admission` applies one of them step by step.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from paceline.core.errors import PacelineError
from paceline.core.keys import uniform

if TYPE_CHECKING:
    from paceline.recipes.continual.replay.table import Table  # with torch, which decisions do not need

Strategy = Literal["reservoir", "class-balanced", "loss-aware", "herding"]
Integers = NDArray[np.int64]
Floats = NDArray[np.float64]

ADMISSION, VICTIM = 0x61646D, 0x766963
"""Streams of a seed: decide if an item is admitted, and which one it replaces."""

AHEAD = 4096
"""A reservoir's decisions need no data, and are made for this many items at once."""


class Needed(PacelineError):
    """An argument that the strategy decides by is missing."""

    strategy: str
    name: str
    what: str
    sentence = "{strategy} admission needs `{name}`: {what}"
    hint = "pass `{name}=...` to `observe`, or choose the strategy 'reservoir'"


class Admission:
    """A strategy applied to one step after the other, with what it has to remember."""

    def __init__(self, strategy: Strategy, seed: int, capacity: int) -> None:
        self.strategy, self._seed, self._capacity = strategy, seed, capacity
        self.counts = ClassCounts.none()
        self._decided = (0, 0, np.zeros(0, np.int64))  # of a reservoir: from, to, slots
        self._admitted: list[int] = []  # of those, the global indices that are admitted

    def slots(
        self, first: int, count: int, table: Table, labels: Integers | None, scores: Floats | None
    ) -> Integers | None:
        """Return a slot for each of `count` items from global index `first` on, or -1; None if none is admitted."""
        match self.strategy:
            case "reservoir":
                return self._reservoir(first, count)
            case "class-balanced":
                if labels is None:
                    raise Needed(self.strategy, "labels", "the labels of all items of the step")
                stored_labels = table.label[: table.num_stored]
                slots, self.counts = class_balanced(
                    self._seed, first, labels, stored_labels, self.counts, self._capacity
                )
                return slots
            case "loss-aware":
                if scores is None:
                    raise Needed(self.strategy, "scores", "the negative losses of this rank's items")
                return loss_aware(self._seed, first, scores, table.score[: table.num_stored], self._capacity)
            case "herding":  # decides between stages
                return None

    def _reservoir(self, first: int, count: int) -> Integers | None:
        begin, end, slots = self._decided
        if first < begin or first + count > end:
            begin, end = first, first + max(AHEAD, count)
            slots = reservoir(self._seed, begin, end - begin, self._capacity)
            self._decided = (begin, end, slots)
            self._admitted = (begin + np.flatnonzero(slots >= 0)).tolist()
        place = bisect_left(self._admitted, first)
        if place == len(self._admitted) or self._admitted[place] >= first + count:
            return None
        return slots[first - begin : first - begin + count]


def reservoir(seed: int, first: int, count: int, capacity: int) -> Integers:
    """Return a slot for each of `count` items from global index `first` on (Vitter's algorithm R).

    Item n takes slot n while there are free ones, then a slot drawn from 0..n if that exists: at any time every item
    so far is in the buffer with the same probability.
    """
    index = np.arange(first, first + count)
    drawn = (uniform((seed, ADMISSION), index) * (index + 1)).astype(np.int64)
    return np.where(index < capacity, index, np.where(drawn < capacity, drawn, -1))


@dataclass
class ClassCounts:
    """Memory of class-balanced admission, by class."""

    seen: Integers
    """Number of items of the stream so far."""
    is_full: NDArray[np.bool_]
    """The class has been the largest in a full buffer."""

    @classmethod
    def none(cls) -> ClassCounts:
        return cls(np.zeros(0, np.int64), np.zeros(0, np.bool_))

    def grown(self, num_classes: int) -> ClassCounts:
        """Return a copy with room for `num_classes`."""
        missing = max(0, num_classes - len(self.seen))
        return ClassCounts(np.pad(self.seen, (0, missing)), np.pad(self.is_full, (0, missing)))


def class_balanced(
    seed: int, first: int, labels: Integers, stored: Integers, counts: ClassCounts, capacity: int
) -> tuple[Integers, ClassCounts]:
    """Return a slot for each item of these `labels`; `stored` are the labels of the slots in use.

    Chrysakis & Moens, "Online Continual Learning from Imbalanced Data", 2020: an item of a class that was never the
    largest replaces an item of the largest class; within the others each class keeps a reservoir of its own. Each
    decision changes what the next one sees, hence a loop over the items.
    """
    counts = counts.grown(1 + int(max(labels.max(initial=-1), stored.max(initial=-1))))
    index = np.arange(first, first + len(labels))
    chance = uniform((seed, ADMISSION), index).tolist()
    place = uniform((seed, VICTIM), index).tolist()
    held = np.concatenate([stored, np.full(max(0, min(len(labels), capacity - len(stored))), -1)])
    num_stored = len(stored)
    per_class = np.bincount(stored, minlength=len(counts.seen))
    slots = np.full(len(labels), -1)
    for position, label in enumerate(labels.tolist()):
        counts.seen[label] += 1
        if num_stored < capacity:
            slot = num_stored
            num_stored += 1
        else:
            counts.is_full |= per_class == per_class.max()
            victim = label
            if not counts.is_full[label]:
                victim = int(per_class.argmax())
            elif chance[position] * counts.seen[label] >= per_class[label]:
                continue
            slot = int(np.flatnonzero(held == victim)[int(place[position] * per_class[victim])])
            per_class[victim] -= 1
        per_class[label] += 1
        held[slot] = label
        slots[position] = slot
    return slots, counts


def loss_aware(seed: int, first: int, scores: Floats, stored: Floats, capacity: int) -> Integers:
    """Return a slot for each item, of these `scores`; `stored` are those of the slots in use.

    Loss-aware reservoir sampling (Buzzega et al., "Rethinking Experience Replay", 2020): an item is admitted with a
    reservoir's probability, and replaces an item with a probability that grows with its score, the negative loss: what
    is known well leaves first. Few items are admitted, and the loop is over those.
    """
    index = np.arange(first, first + len(scores))
    is_admitted = uniform((seed, ADMISSION), index) * (index + 1) < capacity
    place = uniform((seed, VICTIM), index)
    held = np.concatenate([stored, np.zeros(max(0, min(len(scores), capacity - len(stored))))])
    num_stored = len(stored)
    slots = np.full(len(scores), -1)
    for position in np.flatnonzero(is_admitted).tolist():
        if num_stored < capacity:
            slot = num_stored
            num_stored += 1
        else:
            slot = _weighted(held, float(place[position]))
        held[slot] = scores[position]
        slots[position] = slot
    return slots


def _weighted(scores: Floats, chance: float) -> int:
    """Return a place drawn in proportion to the scores above the lowest one."""
    weights = scores - scores.min()
    if not weights.any():
        return int(chance * len(scores))
    total = np.cumsum(weights)
    return min(int(np.searchsorted(total, chance * total[-1], side="right")), len(scores) - 1)


def herd(features: Floats, num_chosen: int) -> Integers:
    """Return items in the order in which they bring the mean of the chosen nearest to the mean of all (Welling's
    herding, as iCaRL uses it). `features` are (items, dimensions); each item is chosen at most once."""
    lengths = np.linalg.norm(features, axis=1, keepdims=True)
    features = features / np.where(lengths > 0, lengths, 1.0)
    goal = features.mean(0)
    chosen = np.zeros(min(num_chosen, len(features)), np.int64)
    total = np.zeros_like(goal)
    is_free = np.ones(len(features), np.bool_)
    squares = np.einsum("nd,nd->n", features, features)
    for number in range(len(chosen)):
        # |goal - (total + f) / n|^2 without what is the same for all f
        missing = goal * (number + 1) - total
        distance = squares - 2 * features @ missing
        chosen[number] = np.where(is_free, distance, np.inf).argmin()
        is_free[chosen[number]] = False
        total += features[chosen[number]]
    return chosen


def quotas(num_held: Integers, capacity: int) -> Integers:
    """Return the number of items that each class may keep: equal shares, and what small classes leave goes to the
    others, one each in turn, lower classes first."""
    shares = np.zeros_like(num_held)
    left = capacity
    while left > 0 and (shares < num_held).any():
        open_classes = np.flatnonzero(shares < num_held)
        share = max(1, left // len(open_classes))
        for number in open_classes.tolist():
            more = int(min(share, num_held[number] - shares[number], left))
            shares[number] += more
            left -= more
    return shares


def last_of_each(slots: Integers) -> Integers:
    """Return the positions of admitted items that are still there at the end of the step: a slot's last one wins."""
    positions = np.flatnonzero(slots >= 0)
    if len(positions) < 2:
        return positions
    _, back = np.unique(slots[positions][::-1], return_index=True)
    return positions[np.sort(len(positions) - 1 - back)]
