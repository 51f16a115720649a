"""Clocks of machines: the true offset is within what is claimed."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from paceline.observe.timeline.recorder import (
    time_axis,
)
from paceline.observe.timeline.time_axis import NUM_TRIES, Offset, Try, offset
from paceline.world.link import Link
from tests.ranks import ranks

APART_NS = 5_000_000_000


@given(
    true_ns=st.integers(-(10**15), 10**15),
    ways=st.lists(st.tuples(st.integers(0, 10**7), st.integers(0, 10**7)), min_size=1, max_size=NUM_TRIES),
)
def test_the_true_offset_is_within_what_is_claimed(true_ns: int, ways: list[tuple[int, int]]) -> None:
    now, tries = 0, []
    for there, back in ways:  # however unequal the two ways are
        tries.append(Try(now, now + there + true_ns, now + there + back))
        now += there + back + 1
    found = offset(tries)
    assert abs(found.ns - true_ns) <= found.uncertainty_ns
    assert found.uncertainty_ns <= min(there + back for there, back in ways) // 2 + 1


@ranks(4)
def test_clocks_of_machines_are_found_apart(link: Link) -> None:
    """Ranks 0 and 1 share a machine; each other one has a clock that is seconds ahead."""
    rank = link.world.rank
    here, ahead_ns = max(1, rank), 0 if rank < 2 else rank * APART_NS
    found = time_axis.measure(link, f"machine {here}", lambda: time_axis.perf_counter_ns() + ahead_ns)
    if rank < 2:
        assert found == Offset(), "one clock: nothing is to be measured"
    else:
        assert abs(found.ns + ahead_ns) <= found.uncertainty_ns < APART_NS // 2
