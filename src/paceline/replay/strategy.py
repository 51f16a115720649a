"""Admission over a whole stream: a strategy by name, with what it has to remember from step to step."""

from __future__ import annotations

from bisect import bisect_left
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from paceline.replay import admission
from paceline.replay.errors import Needed
from paceline.replay.slots import NOWHERE, SlotTable

Strategy = Literal["reservoir", "class-balanced", "loss-aware", "herding"]
Integers = NDArray[np.int64]

AHEAD = 4096
"""A reservoir's decisions need no data, and are taken for so many items at once."""


class Admission:
    """Decides for the items of one step after the other."""

    def __init__(self, strategy: Strategy, seed: int, capacity: int) -> None:
        self.strategy, self._seed, self._capacity = strategy, seed, capacity
        self.counts = admission.ClassCounts.none()
        self._decided = (0, 0, np.zeros(0, np.int64))  # of a reservoir: from, to, slots
        self._admitted: list[int] = []  # of those, the global indices that are admitted

    def slots(
        self, first: int, count: int, table: SlotTable, labels: Integers | None, scores: NDArray[np.float64] | None
    ) -> Integers | None:
        """A slot for each of `count` items from global index `first` on, or -1; None if none is admitted."""
        match self.strategy:
            case "reservoir":
                return self._reservoir(first, count)
            case "class-balanced":
                if labels is None:
                    raise Needed(self.strategy, "labels", "the labels of all items of the step")
                held = table.label[: table.num_stored]
                slots, self.counts = admission.class_balanced(
                    self._seed, first, labels, held, self.counts, self._capacity
                )
                return slots
            case "loss-aware":
                if scores is None:
                    raise Needed(self.strategy, "scores", "the negative losses of this rank's items")
                held_scores = table.score[: table.num_stored]
                return admission.loss_aware(self._seed, first, scores, held_scores, self._capacity)
            case "herding":  # decides between stages
                return None

    def _reservoir(self, first: int, count: int) -> Integers | None:
        begin, end, slots = self._decided
        if first < begin or first + count > end:
            begin, end = first, first + max(AHEAD, count)
            slots = admission.reservoir(self._seed, begin, end - begin, self._capacity)
            self._decided = (begin, end, slots)
            self._admitted = (begin + np.flatnonzero(slots != NOWHERE)).tolist()
        place = bisect_left(self._admitted, first)
        if place == len(self._admitted) or self._admitted[place] >= first + count:
            return None
        return slots[first - begin : first - begin + count]
