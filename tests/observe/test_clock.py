"""Every moment has a name."""

from __future__ import annotations

from paceline.observe.clock import PHASES, Clock, computing_share, elapsed


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


def test_computing_time_is_what_is_not_waiting_for_data() -> None:
    assert computing_share({"data": 1.0, "compute": 8.0, "communication": 1.0}) == 0.9
    assert computing_share(dict.fromkeys(PHASES, 0.0)) == 1.0


def test_computing_time_is_that_of_all_ranks() -> None:
    assert computing_share({"data": 1.0, "compute": 9.0}, {"data": 3.0, "compute": 7.0}) == 0.8
