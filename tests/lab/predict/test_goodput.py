"""Goodput beside closed forms, published figures and a simulation of failures one by one."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.failure_rate import parse_failures
from paceline.lab.predict.goodput import goodput, useful_share
from paceline.train.save_interval import DAY_S, auto_steps, best_interval_s, young_interval_s

HOUR_S = 3600.0


def simulate(every_s: float, save_s: float, recovery_s: float, mean_s: float, segments: int, seed: int) -> float:
    """Return the useful share of a run whose failures are drawn one after the other."""
    draw, now, fails_at = random.Random(seed), 0.0, 0.0
    fails_at = draw.expovariate(1 / mean_s)
    for _ in range(segments):
        wanted = every_s + save_s
        while fails_at < now + wanted:
            now = fails_at
            fails_at = now + draw.expovariate(1 / mean_s)
            while fails_at < now + recovery_s:  # hit while it recovers: from the beginning
                now = fails_at
                fails_at = now + draw.expovariate(1 / mean_s)
            now += recovery_s
        now += wanted
    return segments * every_s / now


@pytest.mark.parametrize(
    ("every_s", "save_s", "recovery_s", "mean_s"),
    [(600.0, 10.0, 60.0, 3600.0), (100.0, 1.0, 5.0, 500.0), (50.0, 20.0, 30.0, 100.0)],
)
def test_the_share_is_that_of_a_simulation(every_s: float, save_s: float, recovery_s: float, mean_s: float) -> None:
    measured = simulate(every_s, save_s, recovery_s, mean_s, 20_000, seed=1)
    assert useful_share(every_s, save_s, recovery_s, mean_s) == pytest.approx(measured, rel=0.02)


@given(st.floats(1e-4, 100), st.floats(200, 1e8))
def test_no_other_interval_is_better(save_s: float, mean_s: float) -> None:
    best_s = best_interval_s(save_s, mean_s)
    share = useful_share(best_s, save_s, 0.0, mean_s)
    for other in (0.5, 0.9, 1.1, 2.0):
        assert useful_share(other * best_s, save_s, 0.0, mean_s) <= share + 1e-12


@given(st.floats(1e-4, 10), st.floats(1e6, 1e9))
def test_rare_failures_are_as_young_has_them(save_s: float, mean_s: float) -> None:
    assert best_interval_s(save_s, mean_s) == pytest.approx(young_interval_s(save_s, mean_s), rel=0.01)
    every_s, recovery_s = young_interval_s(save_s, mean_s), 60.0
    lost = save_s / every_s + (recovery_s + every_s / 2) / mean_s
    assert 1 - useful_share(every_s, save_s, recovery_s, mean_s) == pytest.approx(lost, rel=0.05)


def test_the_series_meets_the_equation_where_they_change() -> None:
    assert best_interval_s(0.999, 1e6) / math.sqrt(0.999) == pytest.approx(
        best_interval_s(1.001, 1e6) / math.sqrt(1.001), rel=1e-4
    )
    u = best_interval_s(1e-3, 1.0)
    assert (1 - u) * math.exp(u) == pytest.approx(math.exp(-1e-3), rel=1e-12)


def test_published_examples() -> None:
    """A stall of 10 ms and 8 hours between failures: 24 s, both terms 0.04 %; with 600 s to recover at 1.8 h: 9.3 %."""
    every_s = best_interval_s(0.010, 8 * HOUR_S)
    assert every_s == pytest.approx(24, rel=0.01)
    assert 0.010 / every_s == pytest.approx(0.0004, rel=0.05)
    assert 1 - useful_share(every_s, 0.010, 600.0, 8 * HOUR_S) == pytest.approx(0.021, abs=0.001)
    every_s = best_interval_s(0.010, 1.8 * HOUR_S)
    assert 1 - useful_share(every_s, 0.010, 600.0, 1.8 * HOUR_S) == pytest.approx(0.093, abs=0.006)


def test_survivors_lose_steps_instead_of_intervals() -> None:
    rate = parse_failures("4/1000nd")
    restart = goodput(rate, 2048, step_s=1.0, save_s=5.0, recovery_s=60.0)
    survivors = goodput(rate, 2048, step_s=1.0, save_s=5.0, recovery_s=0.6, repeated_steps=2)
    assert 0 < restart[0] < restart[1] < restart[2] < survivors[2] < 1
    mean_s = DAY_S / (2048 * 4e-3)
    every_s = best_interval_s(5.0, mean_s)
    assert survivors[1] == pytest.approx((1 - 2.6 / mean_s) * every_s / (every_s + 5.0))


def test_a_job_that_never_gets_there_has_no_useful_time() -> None:
    assert useful_share(1e6, 1.0, 1.0, 100.0) == 0.0
    shares = goodput(parse_failures("900/nd"), 1000, step_s=60.0, save_s=10.0, recovery_s=100.0)
    assert shares[1] == pytest.approx(0, abs=1e-6)


def test_automatic_steps() -> None:
    rate = parse_failures("4/1000nd")
    mean_s = DAY_S / (8 * 4e-3)
    assert auto_steps(rate, 8, step_s=0.2, save_s=0.05) == math.ceil(best_interval_s(0.05, mean_s) / 0.2)
    assert auto_steps(rate, 8, step_s=0.2, save_s=0.05, write_s=1e5) == 500_000  # no more than the disk can take
    assert auto_steps(rate, 8, step_s=1e9, save_s=0.05) == 1
