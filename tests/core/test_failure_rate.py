"""Rates of failures as users type them."""

from __future__ import annotations

import math

import pytest

from paceline.core.failure_rate import PUBLISHED, SMALL_HIGH, SPREAD, BadFailureRate, FailureRate, parse_failures


def test_a_range_has_its_geometric_mean_in_the_middle() -> None:
    rate = parse_failures("2.3-6.5/1000nd")
    assert (rate.low, rate.high) == (2.3e-3, 6.5e-3)
    assert rate.rate == pytest.approx(math.sqrt(2.3 * 6.5) * 1e-3)
    assert rate.is_published
    assert rate == parse_failures(PUBLISHED)


@pytest.mark.parametrize(
    ("text", "rate"), [("4/1000nd", 4e-3), (" 1 / 30 nd ", 1 / 30), ("0.5/nd", 0.5), ("1e-3/nd", 1e-3)]
)
def test_one_number_stands_for_the_range_around_it(text: str, rate: float) -> None:
    parsed = parse_failures(text)
    assert parsed.rate == pytest.approx(rate)
    assert (parsed.rate / parsed.low, parsed.high / parsed.rate) == pytest.approx((SPREAD, SPREAD))


@pytest.mark.parametrize(
    "text", ["", "4", "4/1000", "0/1000nd", "6-2/1000nd", "-1/1000nd", "4/0nd", "x/1000nd", "1e999/nd"]
)
def test_what_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(BadFailureRate, match="--failures"):
        parse_failures(text)


def test_published_rates_agree_with_published_times_between_failures() -> None:
    """1.8 h at 2,048 nodes and 13.5 min at 16,384 with 6.5 per 1,000 node-days; 7.9 h at 128 in the wider range."""
    rate = parse_failures(PUBLISHED)
    assert 24 / rate.on(2048).high == pytest.approx(1.8, rel=0.01)
    assert 24 * 60 / rate.on(16_384).high == pytest.approx(13.5, rel=0.01)
    assert 24 / rate.on(128).high == pytest.approx(7.9, rel=0.01)
    assert rate.on(129).high == pytest.approx(129 * 6.5e-3)
    assert FailureRate(1e-3, 2e-3, 3e-3).on(8).high == 24e-3  # stated: nothing is added
    assert rate.on(1).high == SMALL_HIGH
