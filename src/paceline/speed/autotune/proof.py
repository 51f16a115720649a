"""When a race proves that one setting is faster: an exact test on rounds taken in turns. Pure functions.

Each round gives one ratio of speeds. If both settings were equally fast, a ratio and its inverse would be equally
likely, whatever the noise: each rank of |log ratio| is as likely a win as a loss (Wilcoxon's signed-rank test), so
how often luck alone wins ranks as high as those that were seen can be counted. It sees by how much rounds were won, not
only how many: with 20 rounds a setting that is 1.23x as fast under noise of 35 % per round is found in two of three
races; counting wins of 15 rounds finds it in one of three, at the same rate of false alarms.

There are two looks, each with its share of that rate: after a few rounds, which must all be won, and at the end.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

LUCK = 0.02
"""A setting that is as fast as the other passes for faster in so many races at most."""
RACE_ROUNDS, FIRST_LOOK = 20, 8
LUCK_AT_FIRST = 0.5**FIRST_LOOK
"""What the first look takes of it: all rounds won."""
FEW = 6
"""Fewer rounds than this cannot prove anything so surely; of them, all must be won."""
HOPELESS = 0.5
"""A race is given up at the first look if luck does as well as often as this."""


def luck(ratios: Sequence[float]) -> float:
    """How often two equally fast settings have a race in which the second looks at least as good as here."""
    sizes = [round(abs(math.log(ratio)), 12) for ratio in ratios]
    # Ranks count twice, so that those of equal sizes, which share the mean of theirs, are whole numbers.
    ranks = [sum(other < size for other in sizes) + sum(other <= size for other in sizes) + 1 for size in sizes]
    ways = [1] + [0] * sum(ranks)  # in how many of all outcomes the won ranks have this sum
    for rank in ranks:
        ways = [count + (ways[total - rank] if total >= rank else 0) for total, count in enumerate(ways)]
    won = sum(rank for rank, ratio in zip(ranks, ratios, strict=True) if ratio > 1)
    return sum(ways[won:]) / 2.0 ** len(ranks)


def is_ahead(ratios: Sequence[float]) -> bool:
    """Whether the second of a pair is faster, and that is no luck."""
    if len(ratios) < FEW:
        return bool(ratios) and min(ratios) > 1
    early = ratios[:FIRST_LOOK]
    if len(early) == FIRST_LOOK and luck(early) <= LUCK_AT_FIRST:
        return True
    return luck(ratios) <= LUCK - LUCK_AT_FIRST


def is_decided(ratios: Sequence[float]) -> bool:
    """Whether a race is over: the rounds that are left cannot change who wins, or there is no hope in them."""
    left = RACE_ROUNDS - len(ratios)
    if left <= 0:
        return True
    if len(ratios) >= FIRST_LOOK and luck(ratios[:FIRST_LOOK]) > HOPELESS:
        return True
    far = 2 * max([ratio if ratio > 1 else 1 / ratio for ratio in ratios], default=1.0)
    return is_ahead([*ratios, *[1 / far] * left]) or not is_ahead([*ratios, *[far] * left])
