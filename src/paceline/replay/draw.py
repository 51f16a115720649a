"""What is replayed in a step: a pure function of (seed, step), so every rank draws the same without asking."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from paceline.replay.chance import DRAW, bits, uniform

Slots = NDArray[np.int64]


def draw(seed: int, step: int, number: int, num_stored: int, size: int) -> Slots:
    """`size` different slots out of the first `num_stored`, all subsets and orders equally likely; fewer if there are
    fewer. `number` tells the draws of one step apart.

    Time grows with `size` alone: a few slots are drawn with replacement and repetitions left out, which is the same as
    drawing without; many are the head of a shuffle.
    """
    size = min(size, num_stored)
    stream = (seed, DRAW, step, number)
    if 2 * size > num_stored:
        return np.argsort(bits(stream, np.arange(num_stored)), kind="stable")[:size]
    num_tried = size + size // 2 + 8
    while True:
        tried = (uniform(stream, np.arange(num_tried)) * num_stored).astype(np.int64)
        _, first = np.unique(tried, return_index=True)
        if len(first) >= size:
            return tried[np.sort(first)[:size]]
        num_tried *= 2
