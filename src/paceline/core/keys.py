"""Randomness is keyed, never carried: a pure function from what is being drawn for to a seed.

The same (seed, step, grain) or (seed, epoch, sample) gives the same numbers on any rank, in any worker and after any
resume, so there is no generator state to save.
"""

from __future__ import annotations

_MASK = 0xFFFFFFFFFFFFFFFF


def key(*numbers: int) -> int:
    """Mix integers into one 63-bit seed (a chain of splitmix64 finalisers)."""
    mixed = 0
    for number in numbers:
        mixed = (mixed + number + 0x9E3779B97F4A7C15) & _MASK
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
        mixed ^= mixed >> 31
    return mixed >> 1
