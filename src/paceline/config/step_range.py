"""A range of steps as users type it: `20:25` is steps 20 to 24, counted from 0 as in the logs."""

from __future__ import annotations

import re
from dataclasses import dataclass

_RANGE = re.compile(r"(\d+)(?::(\d+))?")


@dataclass(frozen=True)
class StepRange:
    """Steps from `first` up to, but not with, `end`."""

    first: int
    end: int

    @classmethod
    def parse(cls, text: str) -> StepRange:
        match = _RANGE.fullmatch(text.strip())
        if match is None:
            raise ValueError(f"{text!r} is no range of steps: type `20:25` for steps 20 to 24, or `auto`")
        first = int(match[1])
        end = first + 1 if match[2] is None else int(match[2])
        if end <= first:
            raise ValueError(f"{text!r} has no step in it: the end must be larger than the begin, as in `20:25`")
        return cls(first, end)

    @property
    def steps(self) -> range:
        return range(self.first, self.end)
