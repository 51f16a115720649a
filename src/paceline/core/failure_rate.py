"""Failures of machines as users state them: `4/1000nd` is 4 per 1,000 node-days, `2.3-6.5/1000nd` a range. Pure.

Published rates: 2.34 and 6.50 per 1,000 node-days on two clusters of one operator (Kokolis et al. 2024), 3.8 in the
pre-training of Llama 3; jobs of 128 nodes were seen to fail more often than the fit over all sizes, 23.7.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace

from paceline.core.errors import PacelineError

PUBLISHED = "2.3-6.5/1000nd"
SMALL_NODES = 128
SMALL_HIGH = 23.7e-3
"""Per node-day: 7.9 hours between failures on 128 nodes."""
SPREAD = math.sqrt(6.5 / 2.34)
"""Factor by which a cluster may be better or worse than a rate that was stated as one number."""
_NUMBER = r"(?:\d+(?:\.\d*)?|\.\d+)(?:e[+-]?\d+)?"
_RATE = re.compile(rf"\s*({_NUMBER})(?:\s*-\s*({_NUMBER}))?\s*/\s*({_NUMBER})?\s*nd\s*")


class BadFailureRate(PacelineError):
    """A rate of failures that cannot be read."""

    text: str
    why: str
    sentence = "`--failures {text}`: {why}"
    hint = "give failures per node-days, such as `--failures 4/1000nd`, or a range, `--failures 2.3-6.5/1000nd`"


@dataclass(frozen=True)
class FailureRate:
    """Failures of one node per day: a middle value and the range that it may be in."""

    low: float
    rate: float
    high: float

    def on(self, nodes: int) -> FailureRate:
        """Return the rate of a whole job; small ones may fail more often, so the range is wider."""
        high = max(self.high, SMALL_HIGH) if nodes <= SMALL_NODES and self.is_published else self.high
        return replace(self, low=self.low * nodes, rate=self.rate * nodes, high=high * nodes)

    @property
    def is_published(self) -> bool:
        """True if nobody has stated another one."""
        return self == parse_failures(PUBLISHED)


def parse_failures(text: str) -> FailureRate:
    """Return the rate that `4/1000nd` or `2.3-6.5/1000nd` means; the middle of a range is its geometric mean."""
    words = _RATE.fullmatch(text)
    if words is None:
        raise BadFailureRate(text, "no number of failures, a stroke, and a number of node-days with `nd`")
    days = float(words[3] or 1)
    low = float(words[1])
    high = low if words[2] is None else float(words[2])
    if not 0 < low <= high or not 0 < days < math.inf or not math.isfinite(high):
        raise BadFailureRate(text, "rates are positive numbers, and a range begins with the smaller one")
    if words[2] is None:
        return FailureRate(low / SPREAD / days, low / days, low * SPREAD / days)
    return FailureRate(low / days, math.sqrt(low * high) / days, high / days)
