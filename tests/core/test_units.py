"""Amounts as people read them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.units import duration, size


@pytest.mark.parametrize(
    ("num_bytes", "shown"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (115_038, "115.0 kB"),
        (999_949, "999.9 kB"),
        (999_950, "1.0 MB"),
        (32 * 10**9, "32.0 GB"),
        (5 * 10**15, "5,000.0 TB"),
    ],
)
def test_sizes(num_bytes: int, shown: str) -> None:
    assert size(num_bytes) == shown


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0, "0.0 s"), (4.26, "4.3 s"), (59.9, "59.9 s"), (59.96, "1.0 min"), (3596.9, "59.9 min"), (3600, "1.00 h")],
)
def test_durations(seconds: float, shown: str) -> None:
    assert duration(seconds) == shown
    assert duration(960 * 3600) == "960.00 h"


@given(st.integers(1, 10**15))
def test_a_size_is_never_nothing(num_bytes: int) -> None:
    """What is shown is within half a unit of its last digit."""
    number, unit = size(num_bytes).split()
    factor = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}[unit]
    assert float(number.replace(",", "")) * factor == pytest.approx(num_bytes, abs=0.051 * factor)
    assert float(number.replace(",", "")) > 0
