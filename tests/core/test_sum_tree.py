"""The order of sums: whoever holds which grains, the same additions are made, in few buffers."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.sum_tree import combine, even_starts, fold, layout, nodes, partial_spans, schedule
from paceline.data.partition import BLOCK_TOLERANCE, assign_blocks
from tests.train.exact import add_up


class Word(str):
    """A sum written out: `a + b` is "(a+b)", and the order of two does not matter."""

    def __add__(self, other: str) -> Word:  # type: ignore[override]
        return Word(f"({min(self, other)}+{max(self, other)})")


def leaves(first: int, end: int) -> list[Word]:
    return [Word(str(number)) for number in range(first, end)]


def run(num_leaves: int, first: int, end: int) -> tuple[dict[tuple[int, int], Word], int]:
    """Follow a schedule with buffers of words; return what is left by node, and the number of buffers."""
    plan = schedule(num_leaves, first, end)
    buffers: dict[int, Word | None] = {0: None}
    for leaf, move in zip(leaves(first, end), plan.moves, strict=True):
        current = buffers[0]
        buffers[0] = leaf if current is None else current + leaf
        for to, source in move.adds:
            left, right = buffers[to], buffers[source]
            assert left is not None
            assert right is not None
            buffers[to] = left + right
        if move.copies_to is not None:
            buffers[move.copies_to] = buffers[0]
        if move.clears:
            buffers[0] = None
    sums = {span: buffers[place] for span, place in plan.partials if span[0] < span[1]}
    return {span: word for span, word in sums.items() if word is not None}, len(buffers)


@given(st.integers(1, 40), st.integers(1, 9), st.data())
def test_ranks_make_the_sum_that_one_process_makes(num_grains: int, size: int, data: Any) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, num_grains), min_size=size - 1, max_size=size - 1)))
    starts = (0, *cuts, num_grains)
    rows: list[Word | None] = []
    for rank in range(size):
        sums, _ = run(num_grains, starts[rank], starts[rank + 1])
        assert list(sums.values()) == fold(leaves(starts[rank], starts[rank + 1]), num_grains, starts[rank])
        rows += list(sums.values()) or [None]
    plan = layout(starts)
    assert sum(plan.rows) == len(rows)
    for to, source in plan.adds:
        left, right = rows[to], rows[source]
        rows[to] = left if right is None else left + right if left is not None else None
    (root,) = plan.roots
    assert rows[root] == add_up(leaves(0, num_grains))


@given(st.integers(1, 24), st.integers(2, 4), st.integers(1, 3), st.booleans())
def test_machines_add_up_theirs_first(num_grains: int, machines: int, each: int, in_turn: bool) -> None:
    """Also where ranks are dealt over machines in turn."""
    starts = even_starts(num_grains, machines * each)
    ranks = [
        range(m, machines * each, machines) if in_turn else range(m * each, m * each + each) for m in range(machines)
    ]
    rows = {
        rank: list(run(num_grains, starts[rank], starts[rank + 1])[0].values()) or [None]
        for rank in range(len(starts) - 1)
    }
    left: list[Word | None] = []
    spans = []
    for members in ranks:
        inside = combine(tuple(partial_spans(starts, rank) for rank in members), num_grains)
        held = [word for rank in members for word in rows[rank]]
        for to, source in inside.adds:
            held[to] = held[to] if held[source] is None else held[to] + held[source]  # type: ignore[operator]
        left += [held[root] for root in inside.roots]
        spans.append(inside.spans)
    between = combine(tuple(spans), num_grains)
    for to, source in between.adds:
        left[to] = left[to] if left[source] is None else left[to] + left[source]  # type: ignore[operator]
    assert left[between.roots[0]] == add_up(leaves(0, num_grains))


@pytest.mark.parametrize("power", range(1, 6))
def test_buffers(power: int) -> None:
    """2^k grains take k - 1 buffers more than one."""
    assert schedule(2**power, 0, 2**power).num_buffers == power
    assert run(2**power, 0, 2**power)[1] == power


def test_blocks_of_powers_of_two_are_nodes() -> None:
    for num_grains in (6, 8, 13, 32):
        for size in (1, 2, 4, 8):
            for start in range(0, num_grains - size + 1, size):
                assert size == 1 or (start, start + size) in nodes(num_grains)


@pytest.mark.parametrize(
    ("num_grains", "size", "starts"),
    [(8, 4, (0, 2, 4, 6, 8)), (8, 3, (0, 3, 6, 8)), (6, 4, (0, 2, 4, 5, 6)), (2, 4, (0, 1, 2, 2, 2))],
)
def test_even_blocks(num_grains: int, size: int, starts: tuple[int, ...]) -> None:
    assert even_starts(num_grains, size) == starts


def test_two_ranks_need_no_order() -> None:
    assert layout((0, 4, 8)).is_plain
    assert layout((0, 1, 2, 2, 2)).is_plain
    assert not layout((0, 3, 6)).is_plain  # 0+1, 2 and 3, 4+5
    assert not layout((0, 2, 4, 6, 8)).is_plain


@given(st.lists(st.floats(0.5, 20.0), min_size=1, max_size=24), st.integers(1, 6))
def test_blocks_are_balanced(costs: list[float], size: int) -> None:
    starts = assign_blocks(costs, size)
    assert starts[0] == 0
    assert starts[-1] == len(costs)
    assert list(starts) == sorted(starts)
    assert len(starts) == size + 1
    most = max(sum(costs[first:end]) for first, end in pairwise(starts))
    assert most <= (1 + 2 * BLOCK_TOLERANCE) * _least(tuple(costs), size) + 1e-9


def _least(costs: tuple[float, ...], size: int) -> float:
    """The smallest largest load of any contiguous blocks, by trying all."""
    totals = np.concatenate([[0.0], np.cumsum(costs)])
    best = totals.copy()
    for _ in range(size - 1):
        best = np.array(
            [min(max(best[cut], totals[end] - totals[cut]) for cut in range(end + 1)) for end in range(len(totals))]
        )
    return float(best[-1])
