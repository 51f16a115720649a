"""Who came last, and what moving numbers takes: on prescribed times of arrival."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.observe.rank_waits import Thinned, meetings


def waits(arrivals: list[list[float]], exchange_s: float) -> list[list[float]]:
    """By rank, from when each rank came to each meeting: all leave `exchange_s` after the last has come."""
    return [[max(each) + exchange_s - each[rank] for each in arrivals] for rank in range(len(arrivals[0]))]


def test_the_wait_of_the_last_is_the_exchange() -> None:
    arrivals = [[0.0, 0.3], [0.0, 0.5], [0.1, 0.0], [0.0, 0.1]]
    found = meetings(waits(arrivals, 0.05))
    assert found is not None
    idle = 0.3 + 0.5 + 0.1 + 0.1
    moving = 4 * 2 * 0.05
    assert found.exchange == pytest.approx(moving / (moving + idle))
    assert found.last == (0.25, 0.75)
    assert found.waited_for == pytest.approx((0.1 / (moving + idle), 0.9 / (moving + idle)))


@given(st.integers(2, 6), st.integers(1, 40), st.integers(0, 10**6))
def test_shares_of_any_arrivals(size: int, number: int, seed: int) -> None:
    draw = random.Random(seed)
    arrivals = [[draw.random() for _ in range(size)] for _ in range(number)]
    found = meetings(waits(arrivals, 0.1))
    assert found is not None
    assert sum(found.last) == pytest.approx(1.0)
    idle = sum(max(each) - came for each in arrivals for came in each)
    moving = 0.1 * size * number
    assert sum(found.waited_for) == pytest.approx(idle / (moving + idle))
    assert found.exchange == pytest.approx(moving / (moving + idle))


def test_nobody_to_meet() -> None:
    assert meetings([[0.1, 0.2]]) is None
    assert meetings([[], []]) is None


@given(st.integers(0, 500))
def test_the_same_places_are_kept_on_every_rank_however_many_there_are(number: int) -> None:
    kept = Thinned(most=16)
    for place in range(number):
        kept.add(float(place))
    assert len(kept.kept) < 16
    assert len(kept.kept) >= min(number, 7)
    stride = kept.kept[1] if len(kept.kept) > 1 else 1
    assert kept.kept == [stride * index for index in range(len(kept.kept))], "evenly spread from the first on"
    kept.clear()
    kept.add(5.0)
    assert kept.kept == [5.0]
