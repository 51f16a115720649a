"""Random numbers on the device that depend on a sample's key alone: not on its batch, its rank or a generator's state.

A hash is `paceline.core.keys.key`, element by element, in the wrapping 64-bit integers that every device has: CPU and
GPU draw the same bits.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def _signed(word: int) -> int:
    """A 64-bit word as the int64 of the same bits."""
    return word - (word >> 63 << 64)


_STEP = _signed(0x9E3779B97F4A7C15)
_FIRST = _signed(0xBF58476D1CE4E5B9)
_SECOND = _signed(0x94D049BB133111EB)


def keyed(keys: Tensor, *numbers: int | Tensor) -> Tensor:
    """`key(key, *numbers)` for every element of the int64 `keys` and `numbers`, broadcast: hashes in [0, 2**63)."""
    mixed = _finalise(keys + _STEP)
    for number in numbers:
        mixed = _finalise(mixed + number + _STEP)
    return _shifted(mixed, 1)


def below(hashes: Tensor, limit: int | Tensor) -> Tensor:
    """Whole numbers, each of 0, ..., limit - 1 equally likely to one part in 2**32; `limit` is below 2**31."""
    return ((hashes >> 31) * limit) >> 32


def normal(keys: Tensor, number: int, count: int) -> Tensor:
    """`count` standard normal float32 numbers for every key: (batch,) -> (batch, count).

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
    """splitmix64's last part, on a tensor that may be overwritten."""
    word = word.bitwise_xor_(_shifted(word, 30)).mul_(_FIRST)
    word = word.bitwise_xor_(_shifted(word, 27)).mul_(_SECOND)
    return word.bitwise_xor_(_shifted(word, 31))


def _shifted(word: Tensor, places: int) -> Tensor:
    """Shift right and fill with zeros; `>>` of a negative int64 fills with ones."""
    return (word >> places) & ((1 << (64 - places)) - 1)
