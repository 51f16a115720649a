"""Seconds become steps."""

from __future__ import annotations

import pytest

from paceline.parallel.averaged import GROWTH, first_interval, next_interval


def test_steps_stay_steps() -> None:
    assert first_interval(50) == 50
    assert next_interval(50, None, 7, [1.0, 100.0]) == 50


@pytest.mark.parametrize(
    ("seconds", "steps", "expected"),
    [
        ([1.0, 1.0], 10, 50),  # 0.1 s a step, 5 s
        ([1.0, 2.0], 10, 25),  # the slowest rank decides
        ([20.0, 1.0], 2, 1),  # a step takes longer than the interval
        ([0.001, 0.001], 4, 4 * GROWTH),  # no more than so many times the last
        ([0.0, 0.0], 1, GROWTH),
    ],
)
def test_as_many_as_the_slowest_rank_does(seconds: list[float], steps: int, expected: int) -> None:
    assert first_interval(None) == 1
    assert next_interval(None, 5.0, steps, seconds) == expected
