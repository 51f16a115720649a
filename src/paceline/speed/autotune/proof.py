"""The proof that one candidate is faster: an exact test on the rounds of a race. Pure functions.

Each round gives one ratio of speeds. If both settings were equally fast, a ratio and its inverse would be equally
likely, whatever the noise: each rank of |log ratio| is as likely a win as a loss (Wilcoxon's signed-rank test), so
how often luck alone wins ranks as high as the measured ones can be counted. It sees by how much rounds were won, not
only how many: with 20 rounds a setting that is 1.23x as fast under noise of 35 % per round is found in two of three
races; counting wins of 15 rounds finds it in one of three, at the same rate of false alarms.

There are two looks, each with its share of that rate: after a few rounds, which must all be won, and at the end.
A gain must also be worth a change (`is_faster`): by 2 % for a setting of `paceline tune`, by 3 % for a way of `-O4`.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left, bisect_right
from collections.abc import Sequence

LUCK = 0.02
"""Largest share of races in which a setting that is only as fast as the other passes for faster."""
RACE_ROUNDS, FIRST_LOOK = 20, 8
LUCK_AT_FIRST = 0.5**FIRST_LOOK
"""Share of `LUCK` that the first look takes: all rounds won."""
FEW = 6
"""Fewer rounds than this cannot prove anything at that level: all of them must be won."""
HOPELESS = 0.5
"""A race is given up at the first look if luck alone does as well this often."""


def luck(ratios: Sequence[float]) -> float:
    """Return the share of races of two equally fast settings in which the second looks at least as good as here."""
    sizes = [round(abs(math.log(ratio)), 12) for ratio in ratios]
    in_order = sorted(sizes)
    # Ranks count twice, so that those of equal sizes, which share the mean of theirs, are whole numbers.
    ranks = [bisect_left(in_order, size) + bisect_right(in_order, size) + 1 for size in sizes]
    # By the sum of the won ranks: how many of all outcomes have it. The counts are the digits of one large number, in a
    # base that even their sum fits into, so that one addition counts the outcomes with and without a rank.
    bits = len(ranks) + 2
    outcomes = 1
    for rank in ranks:
        outcomes += outcomes << bits * rank
    won = sum(rank for rank, ratio in zip(ranks, ratios, strict=True) if ratio > 1)
    as_good: int = (outcomes >> bits * won) % (2**bits - 1)  # the sum of the digits that are left
    return as_good / float(1 << len(ranks))


def is_ahead(ratios: Sequence[float]) -> bool:
    """Return True if the second of a pair won a race by more than luck explains."""
    if len(ratios) < FEW:
        return bool(ratios) and min(ratios) > 1
    early = ratios[:FIRST_LOOK]
    if len(early) == FIRST_LOOK and luck(early) <= LUCK_AT_FIRST:
        return True
    return luck(ratios) <= LUCK - LUCK_AT_FIRST


def is_faster(ratios: Sequence[float], margin: float) -> bool:
    """Return True if the second of a pair is faster by more than `margin` in the median, and that is no luck."""
    return is_ahead(ratios) and statistics.median(ratios) > 1 + margin


def is_decided(ratios: Sequence[float]) -> bool:
    """Return True if the rounds that are left cannot change who wins, or hold no hope."""
    left = RACE_ROUNDS - len(ratios)
    if left <= 0:
        return True
    if len(ratios) < FIRST_LOOK:  # even if all of these were lost, the rest could still win
        return False
    if luck(ratios[:FIRST_LOOK]) > HOPELESS:
        return True
    far = 2 * max([ratio if ratio > 1 else 1 / ratio for ratio in ratios], default=1.0)
    return is_ahead([*ratios, *[1 / far] * left]) or not is_ahead([*ratios, *[far] * left])
