"""Every moment has a name."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.observe import clock as clock_module
from paceline.observe.clock import PHASES, Clock, Thinned, computing_share, elapsed


def test_the_clock_has_a_name_for_every_moment() -> None:
    clock = Clock()
    before = clock.read()
    for phase in PHASES:
        clock.lap(phase)
    after = clock.read()
    assert all(seconds > 0 for seconds in elapsed(before, after).values())
    began, ended = clock._last, clock._ns.copy()
    clock.lap("data")
    assert sum(clock._ns.values()) - sum(ended.values()) == clock._last - began


def test_waits_are_those_of_the_epoch_and_of_single_meetings(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0
    monkeypatch.setattr(clock_module, "perf_counter_ns", lambda: now)
    clock = Clock()
    for waited in (5, 7):
        now += 100
        clock.lap("compute")
        now += waited * 1_000_000
        clock.meet()
    assert clock.waits.numbers == pytest.approx([0.005, 0.007])
    now += 3_000_000
    clock.lap("communication")  # between two epochs
    clock.begin_epoch()
    now += 9_000_000
    clock.meet()
    assert clock.waits.numbers == pytest.approx([0.009])
    assert clock.read()["communication"] == pytest.approx(0.024)


def test_steps_of_an_epoch_are_kept_with_their_phases(monkeypatch: pytest.MonkeyPatch) -> None:
    """Step k computes for k ms; of 1,000 steps those kept are evenly spread, and each has its own times."""
    now = 0
    monkeypatch.setattr(clock_module, "perf_counter_ns", lambda: now)
    clock = Clock()
    clock.begin_epoch()
    for step in range(1000):
        now += 1_000_000
        clock.begin_step()
        for phase, ms in (
            ("compute", step),
            ("communication", 2),
            ("optimizer", 3),
            ("logging", 4),
            ("validation", 50),
        ):
            now += ms * 1_000_000
            clock.lap(phase)
    numbers = [int(row[0]) for row in clock.steps.numbers]
    assert numbers == list(range(0, 999, 8))
    for number, *seconds in clock.steps.numbers:
        assert seconds == pytest.approx([0.001, 0.0, 1e-3 * number, 0.002, 0.003, 0.004])
    clock.begin_epoch()
    assert clock.steps.numbers == []


def test_a_follower_hears_of_every_lap_without_gaps() -> None:
    clock, laps = Clock(), []
    clock.follow(lambda phase, began, ended: laps.append((phase, began, ended)))
    clock.begin_step()
    clock.lap("compute")
    clock.meet()
    assert [phase for phase, _, _ in laps] == ["data", "compute", "communication"]
    assert all(before[2] == after[1] for before, after in itertools.pairwise(laps))


def test_computing_time_is_what_is_not_waiting_for_data() -> None:
    assert computing_share({"data": 1.0, "compute": 8.0, "communication": 1.0}) == 0.9
    assert computing_share(dict.fromkeys(PHASES, 0.0)) == 1.0


def test_computing_time_is_that_of_all_ranks() -> None:
    assert computing_share({"data": 1.0, "compute": 9.0}, {"data": 3.0, "compute": 7.0}) == 0.8


@given(st.integers(0, 500))
def test_the_same_places_are_kept_on_every_rank_however_many_there_are(number: int) -> None:
    kept = Thinned(most=16)
    for place in range(number):
        kept.add(float(place))
    assert len(kept.numbers) < 16
    assert len(kept.numbers) >= min(number, 7)
    stride = kept.numbers[1] if len(kept.numbers) > 1 else 1
    assert kept.numbers == [stride * index for index in range(len(kept.numbers))], "evenly spread from the first on"
    kept.clear()
    kept.add(5.0)
    assert kept.numbers == [5.0]
