"""Keyed randomness: a pure function from what is drawn for to random bits, instead of a generator's state.

The same (seed, step, grain) or (seed, epoch, sample) gives the same numbers on any rank, in any worker and after any
resume, so there is no state to save and nothing to send. The function is the finaliser of splitmix64, in three forms:
`key` for Python integers (`keys` for many at once), `bits` and `uniform` for numpy arrays, and `keys_torch.keyed` for
tensors on any device.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

INCREMENT, FIRST_FACTOR, SECOND_FACTOR = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
"""Constants of splitmix64."""
_MASK = 0xFFFFFFFFFFFFFFFF
_INCREMENT, _FIRST, _SECOND = (np.uint64(constant) for constant in (INCREMENT, FIRST_FACTOR, SECOND_FACTOR))
_SHIFTS = tuple(np.uint64(places) for places in (30, 27, 31, 11))

Words = NDArray[np.uint64]


def key(*numbers: int) -> int:
    """Mix integers into one 63-bit seed (a chain of splitmix64 finalisers)."""
    return _mixed(numbers) >> 1


def keys(numbers: tuple[int, ...], last: NDArray[np.int64]) -> list[int]:
    """Return `key(*numbers, each)` for each of the last numbers."""
    start = np.array([(_mixed(numbers) + INCREMENT) & _MASK], np.uint64)
    seeds: list[int] = (finalise(last.astype(np.uint64) + start) >> np.uint64(1)).tolist()
    return seeds


def _mixed(numbers: tuple[int, ...]) -> int:
    mixed = 0
    for number in numbers:
        mixed = (mixed + number + INCREMENT) & _MASK
        mixed = ((mixed ^ (mixed >> 30)) * FIRST_FACTOR) & _MASK
        mixed = ((mixed ^ (mixed >> 27)) * SECOND_FACTOR) & _MASK
        mixed ^= mixed >> 31
    return mixed


def bits(numbers: tuple[int, ...], counters: NDArray[np.int64]) -> Words:
    """Return 64 random bits per counter, of the stream that `numbers` name."""
    return bits_from(np.array([key(*numbers)], np.uint64), counters)


def bits_from(starts: Words, counters: NDArray[np.int64]) -> Words:
    """Return 64 random bits per counter, of streams that begin at these words; shapes are broadcast."""
    return finalise((counters.astype(np.uint64) + np.uint64(1)) * _INCREMENT + starts)


def uniform(numbers: tuple[int, ...], counters: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return one number in [0, 1) per counter, of 53 bits and thus the same on every machine."""
    return (bits(numbers, counters) >> _SHIFTS[3]).astype(np.float64) * 2.0**-53


def finalise(words: Words) -> Words:
    """Return splitmix64's finaliser of each word: every bit of the input flips about half of the output's."""
    words = (words ^ (words >> _SHIFTS[0])) * _FIRST
    words = (words ^ (words >> _SHIFTS[1])) * _SECOND
    return words ^ (words >> _SHIFTS[2])
