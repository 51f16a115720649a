"""Slots that a step replays: a pure function of (seed, step), so every rank draws the same without messages."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from paceline.core.keys import bits_from, key

Slots = NDArray[np.int64]

DRAW = 0x647261
"""Stream of a seed."""

DRAWN_AHEAD = 64
"""Steps whose draws are made at once."""


class Drawer:
    """Draws step by step; while the buffer is full, those of the next `DRAWN_AHEAD` steps are made at once."""

    def __init__(self, seed: int, num_full: int | None) -> None:
        self._seed = seed
        self._num_full = num_full
        """Number of items at which the buffer stops growing; None if it may shrink again."""
        self._drawn: dict[int, tuple[tuple[int, int], int, Slots]] = {}  # by number: (stored, size), first step, slots

    def slots(self, step: int, number: int, num_stored: int, size: int) -> Slots:
        """Return `size` different slots out of the first `num_stored`; `number` tells the draws of a step apart."""
        drawn_for, first, drawn = self._drawn.get(number, ((0, 0), 0, np.zeros((0, 0), np.int64)))
        if drawn_for != (num_stored, size) or not first <= step < first + len(drawn):
            steps = range(step, step + (DRAWN_AHEAD if num_stored == self._num_full else 1))
            first, drawn = step, draws(self._seed, steps, number, num_stored, size)
            self._drawn[number] = ((num_stored, size), first, drawn)
        slots: Slots = drawn[step - first]
        return slots


def draws(seed: int, steps: range, number: int, num_stored: int, size: int) -> Slots:
    """Return the draws of several steps, (steps, size), each as if drawn alone: `size` different slots out of the first
    `num_stored`, all subsets and orders equally likely; fewer if there are fewer.

    Time grows with `size`, not with `num_stored`: a few slots are drawn with replacement and repetitions left out,
    which is the same as drawing without; many are the head of a shuffle.
    """
    size = min(size, num_stored)
    starts = np.array([key(seed, DRAW, step, number) for step in steps], np.uint64)
    if 2 * size > num_stored:
        order = np.argsort(bits_from(starts[:, None], np.arange(num_stored)), axis=1, kind="stable")
        return order[:, :size]
    chosen = np.empty((len(steps), size), np.int64)
    left, num_tried = np.arange(len(steps)), size + size // 2 + 8
    while len(left):
        # 53 random bits times the number of slots, rounded down.
        words = bits_from(starts[left, None], np.arange(num_tried)) >> np.uint64(11)
        tried = (words.astype(np.float64) * (2.0**-53 * num_stored)).astype(np.int64)
        is_first = _is_first(tried)
        place = np.cumsum(is_first, axis=1)  # of each slot among the different ones, from 1
        is_enough = place[:, -1] >= size
        is_chosen = is_first & (place <= size) & is_enough[:, None]
        chosen[left[is_enough]] = tried[is_chosen].reshape(-1, size)
        left, num_tried = left[~is_enough], 2 * num_tried
    return chosen


def _is_first(numbers: Slots) -> NDArray[np.bool_]:
    """Mark the first occurrence of each number along each row."""
    order = np.argsort(numbers, axis=1, kind="stable")
    ascending = np.take_along_axis(numbers, order, 1)
    is_new = np.ones(numbers.shape, np.bool_)
    is_new[:, 1:] = ascending[:, 1:] != ascending[:, :-1]
    marks = np.empty(numbers.shape, np.bool_)
    np.put_along_axis(marks, order, is_new, 1)
    return marks
