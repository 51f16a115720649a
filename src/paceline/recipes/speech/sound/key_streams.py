"""Streams of random numbers that the model draws for an utterance in training, beside its key."""

from __future__ import annotations

from enum import IntEnum, unique


@unique
class KeyStream(IntEnum):
    """One number per purpose; part of what makes a run bitwise repeatable, so they never change."""

    DITHER = 1
    FREQ_MASKS = 2
    TIME_MASKS = 3
    RECT_FREQ = 4
    RECT_TIME = 5
    VIEWS = 6
