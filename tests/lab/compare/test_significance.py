"""Tests of difference against published tables and examples, closed formulas and brute force."""

from __future__ import annotations

import itertools
import math
import random
import statistics
import sys

import numpy as np
import pytest

from paceline.core.errors import NotInstalled
from paceline.lab.compare import significance
from paceline.lab.compare.significance import paired_bootstrap, permutation, welch
from paceline.observe.sample_scores import SampleScores, corpus_values

A1 = (27.5, 21.0, 19.0, 23.6, 17.0, 17.9, 16.9, 20.1, 21.9, 22.6, 23.1, 19.6, 19.0, 21.7, 21.4)
A2 = (27.1, 22.0, 20.8, 23.4, 23.4, 23.5, 25.8, 22.0, 24.8, 20.2, 21.9, 22.1, 22.9, 20.5, 24.4)


def test_welchs_published_example() -> None:
    """Equal sizes, as in encyclopaedias: t = -2.46 with 25.0 degrees of freedom, p = 0.021."""
    found = welch(A2, A1)
    assert found is not None
    assert (round(found.t, 2), round(found.degrees, 1), round(found.p, 3)) == (-2.46, 25.0, 0.021)
    assert found.low < found.difference < found.high < 0


def test_without_scipy_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy", None)
    with pytest.raises(NotInstalled, match="scipy") as caught:
        welch(A1, A2)
    assert "paceline[lab]" in caught.value.hint


def test_welch_at_the_edges() -> None:
    assert welch([1.0], [2.0, 3.0]) is None
    still = welch([1.0, 1.0], [2.0, 2.0])
    assert still is not None
    assert (still.difference, still.p) == (1.0, 0.0)
    same = welch([1.0, 1.0], [1.0, 1.0])
    assert same is not None
    assert same.p == 1.0


def test_all_splits() -> None:
    found = permutation([1, 2, 3], [4, 5, 6])
    assert found is not None
    assert (found.p, found.num_splits, found.is_exact) == (0.1, 20, True)
    values = [random.Random(3).gauss(0, 1) for _ in range(7)]
    first, second = values[:3], values[3:]
    observed = abs(statistics.fmean(first) - statistics.fmean(second))
    large = 0
    for chosen in itertools.combinations(range(7), 3):
        left = [values[index] for index in chosen]
        right = [values[index] for index in range(7) if index not in chosen]
        large += abs(statistics.fmean(left) - statistics.fmean(right)) >= observed - 1e-12
    again = permutation(first, second)
    assert again is not None
    assert again.p == large / 35


def test_drawn_splits_are_near_all(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = A1[:8], A2[:8]
    exact = permutation(first, second)
    monkeypatch.setattr(significance, "MOST_SPLITS", 4000)
    drawn = permutation(first, second)
    assert exact is not None
    assert drawn is not None
    assert (exact.is_exact, drawn.is_exact) == (True, False)
    assert drawn.p == pytest.approx(exact.p, abs=0.03)


def ratio(rows: list[tuple[float, float]]) -> SampleScores:
    return SampleScores.of("ratio", [list(enumerate(rows))])


def test_bootstrap_of_equal_and_of_unequal_runs() -> None:
    draw = random.Random(1)
    words = [draw.randint(5, 20) for _ in range(300)]
    errors = [draw.randint(0, 5) for _ in words]
    base = ratio(list(zip(errors, words, strict=True)))
    same = paired_bootstrap([base], [base])
    assert (same.difference, same.low, same.high, same.p) == (0.0, 0.0, 0.0, 1.0)
    fewer = ratio([(max(0, error - 1), count) for error, count in zip(errors, words, strict=True)])
    better = paired_bootstrap([base, base], [fewer])
    assert better.difference == pytest.approx(fewer.value() - base.value())
    assert better.low < better.difference < better.high < 0
    assert better.p < 0.001


def test_bootstraps_interval_is_that_of_the_mean() -> None:
    """With one word a sample the rate is a mean: the interval is 1.96 standard errors wide on both sides."""
    random_state = np.random.default_rng(2)
    differences = random_state.normal(0.3, 1.0, 500)
    found = paired_bootstrap([ratio([(0.0, 1.0)] * 500)], [ratio([(each, 1.0) for each in differences])])
    error = differences.std() / math.sqrt(500)
    assert found.low == pytest.approx(differences.mean() - 1.96 * error, abs=0.1 * error)
    assert found.high == pytest.approx(differences.mean() + 1.96 * error, abs=0.1 * error)


TEXTS = [
    ("a man sits on a bench", "a man is sitting on a bench"),
    ("two dogs run", "two dogs are running in the snow"),
    ("the girl in the red coat climbs", "the girl in the red coat climbs"),
    ("blue", "nothing here"),
]


def test_bleu_is_sacrebleus() -> None:
    sacrebleu = pytest.importorskip("sacrebleu", reason="needs sacrebleu")
    metric = sacrebleu.metrics.BLEU(effective_order=True)
    rows = []
    for hypothesis, reference in TEXTS:
        score = metric.sentence_score(hypothesis, [reference])
        rows.append((score.sys_len, score.ref_len, *score.counts, *score.totals))
    for texts, part in ((TEXTS, rows), (TEXTS[:1], rows[:1]), (TEXTS[1:3], rows[1:3]), (TEXTS[3:], rows[3:])):
        expected = sacrebleu.corpus_bleu([hypothesis for hypothesis, _ in texts], [[other for _, other in texts]]).score
        found = SampleScores.of("bleu", [list(enumerate(part))]).value()
        assert found == pytest.approx(expected, abs=1e-9)


def test_bleu_by_hand() -> None:
    """7 words for 8; matches 6, 4, 3, 2 of 7, 6, 5, 4 n-grams."""
    sums = np.array([7, 8, 6, 4, 3, 2, 7, 6, 5, 4], dtype=np.float64)
    expected = 100 * math.exp(1 - 8 / 7) * (6 / 7 * 4 / 6 * 3 / 5 * 2 / 4) ** 0.25
    assert float(corpus_values("bleu", sums)) == pytest.approx(expected)
    assert corpus_values("bleu", np.stack([sums, np.zeros(10)])).tolist() == pytest.approx([expected, 0.0])
