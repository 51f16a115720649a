"""Differences of two settings with their p-values: Welch's t, permutation of runs, paired bootstrap of samples.

Welch 1947, "The generalization of Student's problem when several different population variances are involved";
Koehn 2004, "Statistical significance tests for machine translation evaluation". All p-values are two-sided.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from paceline.observe.sample_scores import SampleScores, corpus_values

CONFIDENCE = 0.95
MOST_SPLITS = 200_000
"""Splits of the runs up to which all of them are looked at; beyond, so many are drawn."""
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
    """All ways were looked at; else they were drawn."""


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
    parts = [statistics.variance(side) / len(side) for side in (first, second)]
    error = math.sqrt(sum(parts))
    if error == 0:  # no spread at all
        p = 1.0 if difference == 0 else 0.0
        return Welch(difference, difference, difference, math.copysign(math.inf, difference), math.inf, p)
    degrees = sum(parts) ** 2 / sum(
        part**2 / (len(side) - 1) for part, side in zip(parts, (first, second), strict=True)
    )
    t = difference / error
    reach = t_quantile(0.5 + CONFIDENCE / 2, degrees) * error
    return Welch(difference, difference - reach, difference + reach, t, degrees, t_two_sided(t, degrees))


def t_two_sided(t: float, degrees: float) -> float:
    """Return the probability that Student's t is at least as far from 0."""
    return incomplete_beta(degrees / 2, 0.5, degrees / (degrees + t * t))


def t_quantile(probability: float, degrees: float) -> float:
    """Return the t that is exceeded with 1 - `probability`, for probabilities above a half."""
    low, high = 0.0, 1.0
    while 1 - t_two_sided(high, degrees) / 2 < probability:
        high *= 2
    for _ in range(200):
        middle = (low + high) / 2
        if 1 - t_two_sided(middle, degrees) / 2 < probability:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def incomplete_beta(a: float, b: float, x: float) -> float:
    """Return the regularised incomplete beta function I_x(a, b), by its continued fraction."""
    if x <= 0 or x >= 1:
        return 0.0 if x <= 0 else 1.0
    if x > (a + 1) / (a + b + 2):  # where the fraction of the other side converges faster
        return 1 - incomplete_beta(b, a, 1 - x)
    front = math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)) / a
    tiny = 1e-300
    value, upper, lower = 1.0, 1.0, 0.0
    for step in range(1000):
        half = step // 2
        if step == 0:
            term = 1.0
        elif step % 2 == 0:
            term = half * (b - half) * x / ((a + 2 * half - 1) * (a + 2 * half))
        else:
            term = -(a + half) * (a + b + half) * x / ((a + 2 * half) * (a + 2 * half + 1))
        lower = 1 / (1 + term * lower or tiny)
        upper = 1 + term / upper or tiny
        value *= upper * lower
        if abs(1 - upper * lower) < 1e-15:
            break
    return front * (value - 1)


def permutation(first: Sequence[float], second: Sequence[float]) -> Permutation | None:
    """Return the permutation test of the difference of means; None where there is one split only."""
    values = np.array([*first, *second], dtype=np.float64)
    num_first, total = len(first), len(first) + len(second)
    num_splits = math.comb(total, num_first)
    if num_splits < 2 or min(len(first), len(second)) < 1:
        return None
    is_exact = num_splits <= MOST_SPLITS
    if is_exact:
        chosen = np.array(list(combinations(range(total), num_first)))
    else:
        generator = _generator()
        chosen = np.stack([generator.permutation(total)[:num_first] for _ in range(MOST_SPLITS)])
    sums = values[chosen].sum(1)
    differences = np.abs((values.sum() - sums) / (total - num_first) - sums / num_first)
    observed = abs(statistics.fmean(second) - statistics.fmean(first))
    as_large = int((differences >= observed - 1e-12 * max(1.0, np.abs(values).max())).sum())
    p = as_large / num_splits if is_exact else (as_large + 1) / (MOST_SPLITS + 1)
    return Permutation(p, num_splits if is_exact else MOST_SPLITS, is_exact)


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


def _generator() -> np.random.Generator:
    return np.random.Generator(np.random.Philox(key=_KEY))
