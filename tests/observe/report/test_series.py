"""Thinning keeps every spike; smoothing is a weighted mean of both sides."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.observe.report.series import short, smooth, thin


@given(st.lists(st.none() | st.floats(-1e6, 1e6), max_size=400), st.integers(6, 50))
def test_thinning_keeps_both_ends_and_every_extreme(values: list[float | None], most: int) -> None:
    kept = thin(values, most)
    assert kept == sorted(set(kept))
    assert len(kept) <= max(most, 2)
    known = [value for value in values if value is not None]
    left = [values[place] for place in kept if values[place] is not None]
    if values:
        assert (kept[0], kept[-1]) == (0, len(values) - 1)
    if known:
        assert (min(left), max(left)) == (min(known), max(known)), "a spike is what one looks for"


def test_smoothing_halves_weights() -> None:
    constant = smooth([3.0] * 9, half_life=2)
    assert constant == pytest.approx([3.0] * 9), "no start from 0"
    values = [1.0, None, 5.0]
    weight = 0.5 ** (1 / 2)
    ends = [(1 + weight * 5) / (1 + weight), (weight * 1 + 5) / (weight + 1)]
    assert smooth(values, half_life=2) == [pytest.approx(ends[0]), None, pytest.approx(ends[1])]
    assert short(float("nan")) is None
    assert short(0.123456789) == 0.12346


@given(st.lists(st.floats(-100, 100), max_size=60), st.floats(0.5, 20))
def test_smoothing_is_the_weighted_mean_of_both_sides(values: list[float], half_life: float) -> None:
    for place, smoothed in enumerate(smooth(values, half_life)):
        weights = [0.5 ** (abs(other - place) / half_life) for other in range(len(values))]
        expected = sum(weight * value for weight, value in zip(weights, values, strict=True)) / sum(weights)
        assert smoothed == pytest.approx(expected, abs=1e-9)


def test_a_jump_is_where_it_was() -> None:
    smoothed = smooth([8.0] * 100 + [2.0] * 100, half_life=10)
    assert smoothed[99] > 5.0 > smoothed[100], "half way at the jump itself, not many steps after it"
