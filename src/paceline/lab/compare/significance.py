"""Differences of two settings with their p-values: Welch's t, permutation of runs, paired bootstrap of samples.

Welch 1947, "The generalization of Student's problem when several different population variances are involved";
Koehn 2004, "Statistical significance tests for machine translation evaluation". All p-values are two-sided.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from paceline.core.errors import NotInstalled
from paceline.observe.sample_scores import SampleScores, corpus_values

CONFIDENCE = 0.95
MOST_SPLITS = 200_000
"""Maximum number of splits of the runs that are all evaluated; of more splits, this number is drawn."""
NUM_DRAWS = 10_000
"""Resampled sets of the bootstrap."""
_CHUNK = 250
_KEY = 0x636F6D70


@dataclass(frozen=True)
class Welch:
    """Difference of two means, the second minus the first, with variances of their own."""

    difference: float
    low: float
    """Of the interval that has the true difference with `CONFIDENCE`."""
    high: float
    t: float
    degrees: float
    p: float


@dataclass(frozen=True)
class Permutation:
    """Share of the ways to deal the runs to the two settings that give as large a difference."""

    p: float
    num_splits: int
    is_exact: bool
    """All splits were evaluated; otherwise they were drawn."""


@dataclass(frozen=True)
class Bootstrap:
    """Difference of a corpus metric between the same samples under two settings, over sets that are drawn from them."""

    difference: float
    low: float
    high: float
    p: float
    num_samples: int


def welch(first: Sequence[float], second: Sequence[float]) -> Welch | None:
    """Return Welch's test; None where a side has fewer than two values."""
    if min(len(first), len(second)) < 2:
        return None
    difference = statistics.fmean(second) - statistics.fmean(first)
    if statistics.variance(first) == statistics.variance(second) == 0:
        p = 1.0 if difference == 0 else 0.0
        return Welch(difference, difference, difference, math.copysign(math.inf, difference), math.inf, p)
    test = _stats().ttest_ind(second, first, equal_var=False)
    interval = test.confidence_interval(CONFIDENCE)
    return Welch(
        difference, float(interval.low), float(interval.high), float(test.statistic), float(test.df), float(test.pvalue)
    )


def permutation(first: Sequence[float], second: Sequence[float]) -> Permutation | None:
    """Return the permutation test of the difference of means; None where there is one split only."""
    num_splits = math.comb(len(first) + len(second), len(first))
    if num_splits < 2 or min(len(first), len(second)) < 1:
        return None
    test = _stats().permutation_test(
        (first, second),
        lambda one, two, axis: np.abs(one.mean(axis) - two.mean(axis)),
        vectorized=True,
        n_resamples=MOST_SPLITS,
        batch=10_000,
        alternative="greater",
        rng=_generator(),
    )
    return Permutation(float(test.pvalue), min(num_splits, MOST_SPLITS), num_splits <= MOST_SPLITS)


def paired_bootstrap(first: Sequence[SampleScores], second: Sequence[SampleScores]) -> Bootstrap:
    """Return the difference of the settings' means of a corpus metric over drawn sets of the same samples.

    Each side has the samples of one run or of several, all in one order. What is drawn is the set: how the runs of a
    setting differ is what `welch` and `permutation` look at.
    """
    sides = [np.stack([scores.rows for scores in side]) for side in (first, second)]  # (runs, samples, statistics)
    form, num_samples = first[0].form, sides[0].shape[1]
    generator, drawn = _generator(), []
    for start in range(0, NUM_DRAWS, _CHUNK):
        number = min(_CHUNK, NUM_DRAWS - start)
        times = generator.multinomial(num_samples, np.full(num_samples, 1 / num_samples), size=number)
        means = [corpus_values(form, times.astype(np.float64) @ side).mean(0) for side in sides]
        drawn.append(means[1] - means[0])
    differences = np.concatenate(drawn)
    means = [float(corpus_values(form, side.sum(1)).mean()) for side in sides]
    tail = min(int((differences <= 0).sum()), int((differences >= 0).sum()))
    low, high = np.quantile(differences, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    p = min(1.0, 2 * (tail + 1) / (NUM_DRAWS + 1))
    return Bootstrap(means[1] - means[0], float(low), float(high), p, num_samples)


def _stats() -> Any:
    try:
        from scipy import stats
    except ModuleNotFoundError as error:
        raise NotInstalled(
            "comparing runs needs the package scipy, which is not installed", hint="`pip install 'paceline[lab]'`"
        ) from error
    return stats


def _generator() -> np.random.Generator:
    return np.random.Generator(np.random.Philox(key=_KEY))
