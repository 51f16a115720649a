"""A value that changes while a stage trains, as users type it: `64@1000` is 64 from step 1000 on, `64@e3` from epoch 3.

Steps count from 0 as in the logs, within the stage; epochs from 1. What a value is at a step is a pure function.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

_POINT = re.compile(r"(none|\d+(?:\.\d*)?(?:[eE]\+?\d+)?)@(e?)(\d+)")


@dataclass(frozen=True)
class ChangePoint:
    """A value, and the step or epoch from which on it holds."""

    value: float | None
    """None: no limit."""
    step: int = 0
    epoch: int = 0
    """Counted from 0; one of `step` and `epoch` is 0."""

    @classmethod
    def parse(cls, text: str) -> ChangePoint:
        match = _POINT.fullmatch(text.strip())
        if match is None:
            raise ValueError(f"{text!r} is no value and place: type `64@1000` (from step 1000 on) or `64@e3` (epoch 3)")
        value = None if match[1] == "none" else float(match[1])
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"{text!r}: the value must be above 0")
        place = int(match[3])
        if not match[2]:
            return cls(value, step=place)
        if place < 1:
            raise ValueError(f"{text!r}: epochs count from 1")
        return cls(value, epoch=place - 1)

    def holds(self, epoch: int, step: int) -> bool:
        """Return True from this place on; `step` counts from the begin of the stage."""
        return step >= self.step and epoch >= self.epoch


def parse_all(texts: Sequence[str]) -> list[ChangePoint]:
    """Return the points, whose steps, and whose epochs, must rise."""
    points = [ChangePoint.parse(text) for text in texts]
    for of_epochs in (False, True):
        places = [
            (point.epoch, text) if of_epochs else (point.step, text)
            for point, text in zip(points, texts, strict=True)
            if ("@e" in text) == of_epochs
        ]
        for (before, _), (after, text) in pairwise(places):
            if after <= before:
                raise ValueError(f"{text!r} comes after a later place: write them in their order")
    return points


def value_at(points: Sequence[ChangePoint], base: float | None, epoch: int, step: int) -> float | None:
    """Return the value of the last of the points that holds at a step, `base` where none does."""
    return next((point.value for point in reversed(points) if point.holds(epoch, step)), base)
