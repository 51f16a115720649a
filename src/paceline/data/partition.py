"""Cutting a batch into grains and assigning them to ranks: pure arithmetic on lengths, balanced by padded cost."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.core.even import even_sizes
from paceline.core.sum_tree import Starts, even_starts

Ids = NDArray[np.int64]
Numbers = NDArray[Any]
"""One int or float per sample, of any width."""

MIN_GRAIN = 2
"""Fewest samples in a grain: batch norm has no variance over a lone sample and torch refuses it for flat features."""

BLOCK_TOLERANCE = 1 / 64
"""Blocks of equally many grains are kept while the costliest is within this fraction of the best possible."""

CUT_TOLERANCE = 1 / 512
"""`cut` stops when the costliest grain is known to be within this fraction of the best possible."""


def most_grains(num_samples: int, grains: int) -> int:
    """Return the number of grains that a batch is cut into, where `grains` are asked for: each has `MIN_GRAIN`."""
    return min(grains, max(1, num_samples // MIN_GRAIN))


def cut(lengths: Numbers | None, num_samples: int, grains: int) -> list[Ids]:
    """Return the positions of a batch's samples, grain by grain; the longest sample of a grain comes first.

    Equal or unknown lengths: contiguous pieces in the batch's order, as `np.array_split` makes them. Otherwise the
    samples go by length, longest first (equal ones in the batch's order), and are cut where the costliest grain
    (samples x longest) is cheapest. Every grain has at least `MIN_GRAIN` samples, so a small batch has fewer grains.
    """
    if num_samples == 0:
        return []
    num_grains = most_grains(num_samples, grains)
    if lengths is None or lengths.min() == lengths.max():
        positions = np.arange(num_samples)
        ends = _even_ends(0, num_samples, num_grains)
    else:
        positions = by_length(lengths, descending=True)
        ends = _balanced_ends(lengths[positions].tolist(), num_grains)
    return [positions[start:end] for start, end in pairwise([0, *ends])]


def assign(costs: Sequence[float], size: int) -> list[list[int]]:
    """Assign whole grains to `size` ranks: the costliest first, each to the least loaded rank (Graham's LPT rule).

    No rank exceeds (4/3 - 1/(3 size)) times the best possible. Ties go to the rank with fewer grains, then the lower
    one, so equal costs are dealt in turn.
    """
    ranks: list[list[int]] = [[] for _ in range(size)]
    loads = [(0.0, 0, rank) for rank in range(size)]
    for number in sorted(range(len(costs)), key=lambda number: -costs[number]):
        load, num_held, rank = loads[0]
        ranks[rank].append(number)
        heapq.heapreplace(loads, (load + costs[number], num_held + 1, rank))
    for held in ranks:
        held.sort()
    return ranks


def assign_blocks(costs: Sequence[float], size: int) -> Starts:
    """Assign grains to ranks in blocks, one rank after the other, as sums with one order need it.

    Blocks are of equally many grains, which are then whole nodes of the tree where numbers allow it, unless costs are
    so uneven that others are better balanced.
    """
    even = even_starts(len(costs), size)
    if not costs or min(costs) == max(costs):
        return even
    totals = list(accumulate(costs, initial=0.0))
    bound = max(max(costs), totals[-1] / size)
    most = max(totals[end] - totals[start] for start, end in pairwise(even))
    if most <= (1 + BLOCK_TOLERANCE) * bound:
        return even
    best, low, high = even, bound, most
    while high - low > BLOCK_TOLERANCE * low:
        middle = (low + high) / 2
        starts = _blocks_within(costs, size, middle)
        if starts:
            best, high = starts, middle
        else:
            low = middle
    return best


def _blocks_within(costs: Sequence[float], size: int, max_cost: float) -> Starts:
    """Return blocks that each take as many grains as `max_cost` allows; empty if `size` of them are not enough."""
    starts, load = [0], 0.0
    for number, cost in enumerate(costs):
        load += cost
        if load > max_cost:
            starts.append(number)
            load = cost
    if len(starts) > size:
        return ()
    return (*starts, *[len(costs)] * (size + 1 - len(starts)))


@lru_cache(maxsize=64)
def grain_ranks(num_samples: int, num_grains: int, size: int, *, in_blocks: bool = False) -> tuple[int, ...]:
    """Return the rank of each grain of a batch that was cut without lengths: all ranks know who has which sample."""
    costs = [float(len(piece)) for piece in cut(None, num_samples, num_grains)]
    ranks = [0] * len(costs)
    if in_blocks:
        starts = assign_blocks(costs, size)
        return tuple(rank for rank, (start, end) in enumerate(pairwise(starts)) for _ in range(start, end))
    for rank, numbers in enumerate(assign(costs, size)):
        for number in numbers:
            ranks[number] = rank
    return tuple(ranks)


def _even_ends(start: int, stop: int, num_pieces: int) -> list[int]:
    return list(accumulate(even_sizes(stop - start, num_pieces), initial=start))[1:]


def _balanced_ends(descending: Sequence[float], num_grains: int) -> list[int]:
    """Return the ends of grains for which the largest of samples x longest is minimal, to within `CUT_TOLERANCE`."""
    num_samples = len(descending)
    outliers: list[int] = []
    start = 0
    # A sample so long that its smallest grain is the costliest anyway: set that grain apart, then balance the others.
    while num_grains > 1 and _fill(descending, start, num_grains, MIN_GRAIN * descending[start]):
        start += MIN_GRAIN
        num_grains -= 1
        outliers.append(start)
    best = _even_ends(start, num_samples, num_grains)
    low = max(MIN_GRAIN * descending[start], sum(descending[start:]) / num_grains)
    high = (best[0] - start) * descending[start]
    while num_grains > 1 and high - low > CUT_TOLERANCE * low:
        middle = (low + high) / 2
        if middle in (low, high):  # lengths so tiny that no float lies between
            break
        ends = _fill(descending, start, num_grains, middle)
        if ends:
            best, high = ends, middle
        else:
            low = middle
    return outliers + best


def _fill(descending: Sequence[float], start: int, num_grains: int, max_cost: float) -> list[int]:
    """Return the ends of grains that each take as many samples as `max_cost` allows.

    Empty if the last grain cannot take the rest. Taking all that fits is optimal: what is left is then fewest and
    shortest. MIN_GRAIN is left for each later grain.
    """
    num_samples = len(descending)
    ends = []
    for reserved in range((num_grains - 1) * MIN_GRAIN, 0, -MIN_GRAIN):
        room = num_samples - start - reserved
        longest = descending[start]
        start += room if room * longest <= max_cost else int(max_cost / longest)
        ends.append(start)
    if (num_samples - start) * descending[start] > max_cost:
        return []
    ends.append(num_samples)
    return ends


def by_length(lengths: Numbers, *, descending: bool = False) -> Ids:
    """Return the positions by length; equal lengths keep their order in both directions."""
    if not descending:
        return np.argsort(lengths, kind="stable")
    # Reversed twice rather than negated: unsigned lengths have no negative.
    return len(lengths) - 1 - np.argsort(lengths[::-1], kind="stable")[::-1]
