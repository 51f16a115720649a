"""Draws of what is replayed: different slots, uniform, independent of each other."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chi2

from paceline.recipes.continual.replay.draw import DRAWN_AHEAD, Drawer, draws


def draw(seed: int, step: int, number: int, num_stored: int, size: int) -> np.ndarray:
    return draws(seed, range(step, step + 1), number, num_stored, size)[0]


@given(st.integers(0, 2**31), st.integers(0, 10**6), st.integers(1, 300), st.integers(1, 300))
def test_draws_are_different_slots_in_range(seed: int, step: int, stored: int, size: int) -> None:
    slots = draw(seed, step, 0, stored, size)
    assert len(slots) == min(stored, size) == len(set(slots.tolist()))
    assert slots.min() >= 0
    assert slots.max() < stored
    together = draws(seed, range(step, step + 5), 0, stored, size)
    assert together.tolist() == [draw(seed, step + k, 0, stored, size).tolist() for k in range(5)]


@pytest.mark.parametrize(("stored", "size"), [(20, 5), (20, 13), (200, 6)])
def test_draws_are_uniform_and_independent(stored: int, size: int) -> None:
    rounds = 6000
    counts, firsts, met = np.zeros(stored), np.zeros(stored), 0
    for step in range(rounds):
        slots = draw(3, step, 0, stored, size)
        counts[slots] += 1
        firsts[slots[0]] += 1
        met += len(np.intersect1d(slots, draw(3, step, 1, stored, size)))
    share = size / stored
    statistic = ((counts - rounds * share) ** 2).sum() / (rounds * share * (1 - share)) * (stored - 1) / stored
    assert chi2.ppf(0.001, stored - 1) < statistic < chi2.ppf(0.999, stored - 1)
    statistic = ((firsts - rounds / stored) ** 2 / (rounds / stored)).sum()
    assert chi2.ppf(0.001, stored - 1) < statistic < chi2.ppf(0.999, stored - 1)
    assert met / rounds == pytest.approx(size * share, rel=0.1)  # two draws of one step meet by chance alone


def test_draws_made_ahead_are_those_of_single_steps() -> None:
    """While the buffer grows, when it is full, and in steps that are left out."""
    drawer = Drawer(4, num_full=40)
    steps = [0, 1, 2, *range(3, 2 * DRAWN_AHEAD + 5), 500, 499]
    stored = [10, 11, 12, *[40] * (len(steps) - 3)]
    for step, num_stored in zip(steps, stored, strict=True):
        for number in (0, 1):
            slots = drawer.slots(step, number, num_stored, 6)
            assert slots.tolist() == draw(4, step, number, num_stored, 6).tolist()
