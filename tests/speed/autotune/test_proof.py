"""When a race proves something: against all outcomes counted out, and on races of settings that are equal or not."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence

import pytest
from scipy.stats import wilcoxon

from paceline.speed.autotune.proof import FEW, FIRST_LOOK, LUCK, RACE_ROUNDS, is_ahead, is_decided, luck


def test_luck_is_what_scipy_has() -> None:
    chance = random.Random(1)
    for rounds in (6, 8, 13, 20):
        logs = [chance.gauss(0.1, 0.3) for _ in range(rounds)]
        theirs = wilcoxon(logs, alternative="greater", method="exact").pvalue
        assert luck([math.exp(value) for value in logs]) == pytest.approx(theirs, abs=1e-12)


def won_ranks(ranks: Sequence[float], wins: Sequence[int]) -> float:
    return sum(rank for rank, won in zip(ranks, wins, strict=True) if won)


def test_luck_is_counted_with_ties() -> None:
    """All ways to hand out wins and losses to the same sizes, equal ones among them."""
    sizes = [0.1, 0.1, 0.1, 0.2, 0.3, 0.3, 0.4]
    ranks = [2.0, 2.0, 2.0, 4.0, 5.5, 5.5, 7.0]
    for wins in ((1, 1, 1, 1, 1, 1, 1), (0, 1, 0, 1, 1, 1, 1), (1, 0, 0, 1, 0, 1, 0), (0,) * 7):
        sums = [won_ranks(ranks, outcome) for outcome in itertools.product((0, 1), repeat=7)]
        as_good = sum(total >= won_ranks(ranks, wins) for total in sums)
        ratios = [math.exp(size if won else -size) for size, won in zip(sizes, wins, strict=True)]
        assert luck(ratios) == as_good / 2**7


def race(chance: random.Random, gain: float, noise: float) -> list[float]:
    ratios: list[float] = []
    while not is_decided(ratios):
        ratios.append(gain * math.exp(chance.gauss(0.0, noise)))
    return ratios


def test_equals_pass_for_faster_as_seldom_as_is_said() -> None:
    chance = random.Random(0)
    for noise in (0.02, 0.5):
        passed = sum(is_ahead(race(chance, 1.0, noise)) for _ in range(2000))
        assert passed <= 2000 * LUCK + 3 * math.sqrt(2000 * LUCK)


def test_what_is_faster_is_found_through_noise() -> None:
    """1.23x under noise of 35 %: by the number of wins alone, 12 of 15, it is found in 36 % of races."""
    chance = random.Random(0)
    assert sum(is_ahead(race(chance, 1.23, 0.35)) for _ in range(400)) >= 0.55 * 400
    assert sum(is_ahead(race(chance, 1.23, 0.15)) for _ in range(400)) >= 0.95 * 400


def test_few_rounds_must_all_be_won() -> None:
    assert not is_ahead([])
    for rounds in range(1, FEW + 1):
        assert is_ahead([1.01] * rounds)
        assert not is_ahead([2.0] * (rounds - 1) + [0.99])
    # Small losses among large wins are no doubt; large ones are.
    assert is_ahead([0.99] * 3 + [1.5] * 10)
    assert not is_ahead([0.5] * 3 + [1.01] * 10)


def test_a_race_ends_when_it_is_decided() -> None:
    assert not is_decided([])
    assert not is_decided([2.0] * (FIRST_LOOK - 1))
    assert is_decided([2.0] * FIRST_LOOK)
    assert is_decided([0.5] * FIRST_LOOK)
    assert not is_decided([0.99] * 2 + [1.5] * (FIRST_LOOK - 2))
    assert is_decided([1.0] * RACE_ROUNDS)
    chance = random.Random(3)
    for _ in range(50):  # what is decided stays so, however the rest goes
        ratios = race(chance, 1.1, 0.3)
        if len(ratios) > FIRST_LOOK:
            rest = [math.exp(chance.gauss(0.0, 1.0)) for _ in range(RACE_ROUNDS - len(ratios))]
            assert is_ahead(ratios) == is_ahead([*ratios, *rest])
