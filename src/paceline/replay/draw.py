"""What is replayed in a step: a pure function of (seed, step), so every rank draws the same without asking."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from paceline.core.keys import key
from paceline.replay.chance import DRAW, from_start

Slots = NDArray[np.int64]


def draw(seed: int, step: int, number: int, num_stored: int, size: int) -> Slots:
    """`size` different slots out of the first `num_stored`, all subsets and orders equally likely; fewer if there are
    fewer. `number` tells the draws of one step apart."""
    one: Slots = draws(seed, range(step, step + 1), number, num_stored, size)[0]
    return one


def draws(seed: int, steps: range, number: int, num_stored: int, size: int) -> Slots:
    """The draws of several steps, (steps, size): each the same as alone, together little dearer than one.

    Time grows with `size`, not with `num_stored`: a few slots are drawn with replacement and repetitions left out,
    which is the same as drawing without; many are the head of a shuffle.
    """
    size = min(size, num_stored)
    starts = np.array([key(seed, DRAW, step, number) for step in steps], np.uint64)
    if 2 * size > num_stored:
        order = np.argsort(from_start(starts[:, None], np.arange(num_stored)), axis=1, kind="stable")
        return order[:, :size]
    chosen = np.empty((len(steps), size), np.int64)
    left, num_tried = np.arange(len(steps)), size + size // 2 + 8
    while len(left):
        # 53 random bits times the number of slots, rounded down.
        words = from_start(starts[left, None], np.arange(num_tried)) >> np.uint64(11)
        tried = (words.astype(np.float64) * (2.0**-53 * num_stored)).astype(np.int64)
        is_first = _is_first(tried)
        place = np.cumsum(is_first, axis=1)  # of each slot among the different ones, from 1
        is_enough = place[:, -1] >= size
        is_chosen = is_first & (place <= size) & is_enough[:, None]
        chosen[left[is_enough]] = tried[is_chosen].reshape(-1, size)
        left, num_tried = left[~is_enough], 2 * num_tried
    return chosen


def _is_first(numbers: Slots) -> NDArray[np.bool_]:
    """Along each row, whether a number has not come before."""
    order = np.argsort(numbers, axis=1, kind="stable")
    ascending = np.take_along_axis(numbers, order, 1)
    is_new = np.ones(numbers.shape, np.bool_)
    is_new[:, 1:] = ascending[:, 1:] != ascending[:, :-1]
    found = np.empty(numbers.shape, np.bool_)
    np.put_along_axis(found, order, is_new, 1)
    return found
