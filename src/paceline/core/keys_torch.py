"""Keyed randomness on a device: numbers that depend on a sample's key alone, not on its batch, rank or generator.

A hash is `keys.key`, element by element, in the wrapping 64-bit integers that every device has: CPU and GPU draw the
same bits. Apart from keys.py, because core imports no torch.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from paceline.core.keys import FIRST_FACTOR, INCREMENT, SECOND_FACTOR


def _signed(word: int) -> int:
    """Return the int64 with the bits of a 64-bit word."""
    return word - (word >> 63 << 64)


_INCREMENT, _FIRST, _SECOND = _signed(INCREMENT), _signed(FIRST_FACTOR), _signed(SECOND_FACTOR)


def keyed(keys: Tensor, *numbers: int | Tensor) -> Tensor:
    """Return `key(key, *numbers)` for every element of the int64 `keys` and `numbers`, broadcast: in [0, 2**63)."""
    mixed = _finalise(keys + _INCREMENT)
    for number in numbers:
        mixed = _finalise(mixed + number + _INCREMENT)
    return _shifted(mixed, 1)


def below(hashes: Tensor, limit: int | Tensor) -> Tensor:
    """Return integers, each of 0, ..., limit - 1 equally likely to one part in 2**32; `limit` is below 2**31."""
    return ((hashes >> 31) * limit) >> 32


def normal(keys: Tensor, number: int, count: int) -> Tensor:
    """Return `count` standard normal float32 numbers for every key: (batch,) -> (batch, count).

    Box and Muller: one hash gives a radius from its upper and an angle from its lower bits, thus two numbers.
    """
    pairs = (count + 1) // 2
    counter = torch.arange(pairs, device=keys.device)
    hashes = keyed(keyed(keys, number)[:, None], counter)
    radius = (hashes >> 31).to(torch.float32).add_(0.5).mul_(2.0**-32).log_().mul_(-2.0).sqrt_()
    angle = (hashes & 0x7FFFFFFF).to(torch.float32).mul_(math.pi * 2.0**-30)
    both = torch.stack([radius * angle.cos(), radius.mul_(angle.sin_())], dim=2)
    return both.flatten(1)[:, :count]


def _finalise(word: Tensor) -> Tensor:
    """Apply splitmix64's finaliser in place."""
    word = word.bitwise_xor_(_shifted(word, 30)).mul_(_FIRST)
    word = word.bitwise_xor_(_shifted(word, 27)).mul_(_SECOND)
    return word.bitwise_xor_(_shifted(word, 31))


def _shifted(word: Tensor, places: int) -> Tensor:
    """Shift right and fill with zeros; `>>` of a negative int64 fills with ones."""
    return (word >> places) & ((1 << (64 - places)) - 1)
