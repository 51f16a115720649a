"""The one order of sums: a fixed binary tree over the grains of a step. Pure arithmetic on numbers of grains.

The grains 0 to n-1 are the leaves, in order. A node over n leaves is the sum of the first m and the other n - m, where
m is the largest power of two below n: what a binary counter of partial sums arrives at. So whole blocks of 2^k grains
that begin at a multiple of 2^k are nodes whatever n is, and a rank that holds such a block sends one number per weight.

    8 grains    ((0+1) + (2+3)) + ((4+5) + (6+7))
    3 ranks     rank 0: 0+1, 2      rank 1: 3, 4+5      rank 2: 6+7

A rank holds a row of grains one after the other (`starts`), adds those that make a node, and sends the largest nodes
that it can make; whoever gets all of them adds the rest of the tree.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Any

Span = tuple[int, int]
"""Leaves first to last + 1 of a node."""
Starts = tuple[int, ...]
"""Number of the first grain of each rank, and at the end the number of grains."""


@lru_cache(maxsize=64)
def nodes(num_leaves: int) -> Mapping[Span, int]:
    """Return the inner nodes of the tree: the leaves of each, and where they are split into its two parts."""
    splits: dict[Span, int] = {}
    todo = [(0, num_leaves)] if num_leaves > 1 else []
    while todo:
        first, end = todo.pop()
        middle = splits[first, end] = first + (1 << ((end - first - 1).bit_length() - 1))
        todo += [part for part in ((first, middle), (middle, end)) if part[1] - part[0] > 1]
    return MappingProxyType(splits)


@dataclass(frozen=True, slots=True)
class Move:
    """What to do once the gradients of a grain are complete. Buffer 0 is where gradients are accumulated."""

    adds: tuple[tuple[int, int], ...] = ()
    """Buffers to add, (to, from), in this order."""
    copies_to: int | None = None
    """Buffer that then takes what is in buffer 0."""
    clears: bool = False
    """Begin the next grain with zeros; else it is added to what is there: the two are a node."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """How a rank adds up its grains while it runs them."""

    moves: tuple[Move, ...]
    """One per grain."""
    num_buffers: int
    """Gradient buffers that this takes: 1 for two grains, k for 2^k."""
    partials: tuple[tuple[Span, int], ...]
    """Nodes that are left at the end, and the buffer of each; one of no leaves for a rank without grains."""


@lru_cache(maxsize=1024)
def schedule(num_leaves: int, first: int, end: int) -> Schedule:
    """Return how to add up the grains from `first` to `end` of a tree of `num_leaves`, in few buffers."""
    splits = nodes(num_leaves)
    stack: list[tuple[Span, int]] = []
    moves: list[Move] = []
    free: list[int] = []
    num_buffers, begin = 1, first
    for leaf in range(first, end):
        is_last = leaf + 1 == end
        if begin == leaf and not is_last and splits.get((leaf, leaf + 2)) == leaf + 1:
            moves.append(Move())
            continue
        adds, holder = [], 0
        while stack and splits.get((stack[-1][0][0], leaf + 1)) == begin:
            (begin, _), buffer = stack.pop()
            if is_last:
                adds.append((0, buffer))
                continue
            adds.append((buffer, holder))
            if holder:
                free.append(holder)
            holder = buffer
        copies_to = None
        if not is_last and not holder:
            if not free:
                free.append(num_buffers)
                num_buffers += 1
            copies_to = holder = free.pop()
        moves.append(Move(tuple(adds), copies_to, clears=not is_last))
        stack.append(((begin, leaf + 1), holder))
        begin = leaf + 1
    return Schedule(tuple(moves), num_buffers, tuple(stack) or (((first, first), 0),))


@dataclass(frozen=True, slots=True)
class Layout:
    """Partial sums that members of a group have, as rows: member after member, each one's in order of its leaves."""

    rows: tuple[int, ...]
    """Partial sums of each member, at least one; that of a member without grains is 0."""
    adds: tuple[tuple[int, int], ...]
    """Rows to add, (to, from), in this order."""
    roots: tuple[int, ...]
    """Rows that are left then: one if the members have all leaves of the tree."""
    spans: tuple[Span, ...]
    """Nodes that are left then."""
    is_plain: bool
    """True if a library may add in any order: not more than two members have something, and each has one row."""


@lru_cache(maxsize=1024)
def layout(starts: Starts) -> Layout:
    """Return what the ranks have of each sum in a step, and how to add it up."""
    return combine(tuple(partial_spans(starts, rank) for rank in range(len(starts) - 1)), starts[-1])


def partial_spans(starts: Starts, rank: int) -> tuple[Span, ...]:
    """Return the nodes that a rank has added up of its grains."""
    return tuple(span for span, _ in schedule(starts[-1], starts[rank], starts[rank + 1]).partials)


@lru_cache(maxsize=1024)
def combine(members: tuple[tuple[Span, ...], ...], num_leaves: int) -> Layout:
    """Return how to add up the nodes that the members of a group have, as far as they make larger ones."""
    splits = nodes(num_leaves)
    rows = list(enumerate(span for spans in members for span in spans))
    empty = [row for row, span in rows if span[0] == span[1]]
    stack: list[tuple[Span, int]] = []
    adds: list[tuple[int, int]] = []
    for row, span in sorted(rows, key=lambda each: each[1]):
        if span[0] == span[1]:
            continue
        stack.append((span, row))
        while len(stack) > 1 and _are_parts(splits, stack[-2][0], stack[-1][0]):
            (_, end), right = stack.pop()
            (first, _), left = stack.pop()
            adds.append((left, right))
            stack.append(((first, end), left))
    num_full = len(rows) - len(empty)
    if not stack:
        stack.append(((0, 0), empty.pop(0)))
    # Zeros, and small whole numbers (flags), may be added in any order.
    adds += [(stack[0][1], row) for row in empty]
    return Layout(
        tuple(map(len, members)),
        tuple(adds),
        tuple(row for _, row in stack),
        tuple(span for span, _ in stack),
        is_plain=num_full <= 2 and len(stack) == 1 and all(len(spans) == 1 for spans in members),
    )


def _are_parts(splits: Mapping[Span, int], left: Span, right: Span) -> bool:
    """Return True if two nodes are the two parts of one."""
    return left[1] == right[0] and splits.get((left[0], right[1])) == right[0]


def fold(values: Sequence[Any], num_leaves: int, first: int) -> list[Any]:
    """Return the sums of a rank's partial nodes of one value per grain, from grain `first` on."""
    splits = nodes(num_leaves)
    stack: list[tuple[Span, Any]] = []
    for leaf, value in enumerate(values, first):
        stack.append(((leaf, leaf + 1), value))
        while len(stack) > 1 and splits.get((stack[-2][0][0], stack[-1][0][1])) == stack[-1][0][0]:
            (_, end), right = stack.pop()
            (begin, _), left = stack.pop()
            stack.append(((begin, end), left + right))
    return [value for _, value in stack]


def even_starts(num_grains: int, size: int) -> Starts:
    """Return starts for grains of equal cost: ranks get as many, or one more, so that few partial sums are left."""
    return _even_starts(num_grains, size)


@lru_cache(maxsize=256)
def _even_starts(num_grains: int, size: int) -> Starts:
    least, num_larger = divmod(num_grains, size)
    # Fewest partial sums in all, by the number of larger ranks so far; ties go to larger ranks first.
    best: dict[int, tuple[int, Starts]] = {0: (0, (0,))}
    for rank in range(size):
        following: dict[int, tuple[int, Starts]] = {}
        for larger, (cost, starts) in best.items():
            for extra in (1, 0):
                if larger + extra > num_larger or num_larger - larger - extra > size - rank - 1:
                    continue
                end = starts[-1] + least + extra
                candidate = cost + len(schedule(num_grains, starts[-1], end).partials), (*starts, end)
                known = following.get(larger + extra)
                if known is None or candidate[0] < known[0]:
                    following[larger + extra] = candidate
        best = following
    return best[num_larger][1]
