"""Random numbers by counter: the n-th number of a stream is a function of (seed, stream, n), the same on every rank.

Whoever draws by the global index of an item, or by the number of a step, needs no generator state and no messages.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from paceline.core.keys import key

ADMISSION, VICTIM, DRAW = 0x61646D, 0x766963, 0x647261
"""Streams of one seed: whether an item is admitted, which one it replaces, what is replayed."""

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)
_SHIFTS = tuple(np.uint64(shift) for shift in (30, 27, 31, 11))

Words = NDArray[np.uint64]


def bits(numbers: tuple[int, ...], counters: NDArray[np.int64]) -> Words:
    """64 random bits for each counter, of the stream that `numbers` name (splitmix64, arithmetic modulo 2**64)."""
    return from_start(np.array([key(*numbers)], np.uint64), counters)


def from_start(starts: Words, counters: NDArray[np.int64]) -> Words:
    """The same, for streams that begin at these words; shapes are broadcast."""
    return scramble((counters.astype(np.uint64) + np.uint64(1)) * _GOLDEN + starts)


def scramble(words: Words) -> Words:
    """The finaliser of splitmix64: every bit of the input moves about half of the output's."""
    words = (words ^ (words >> _SHIFTS[0])) * _FIRST
    words = (words ^ (words >> _SHIFTS[1])) * _SECOND
    return words ^ (words >> _SHIFTS[2])


def uniform(numbers: tuple[int, ...], counters: NDArray[np.int64]) -> NDArray[np.float64]:
    """Numbers in [0, 1), of 53 bits, so that they are the same on every machine."""
    return (bits(numbers, counters) >> _SHIFTS[3]).astype(np.float64) * 2.0**-53
