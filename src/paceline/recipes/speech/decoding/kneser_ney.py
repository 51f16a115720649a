"""N-gram language model from text: interpolated modified Kneser-Ney.

Chen and Goodman 1999, "An empirical study of smoothing techniques for language modeling": three discounts per order,
for n-grams seen once, twice and more often, from the numbers of n-grams seen one to four times. The lower orders count
how many different words an n-gram followed, not how often; those that begin a sentence are counted as they are. The
lowest order is interpolated with the uniform distribution, whose share is also the probability of unknown words. Same
numbers as KenLM's `lmplz`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray

from paceline.recipes.speech.decoding.ngram import END, START, UNKNOWN, Level

FALLBACK: Final = (0.5, 1.0, 1.5)
"""Discounts of an order with too little data for its own."""
_NO_PROBABILITY: Final = -99.0
"""Logarithm of what is never predicted: the beginning of a sentence."""


@dataclass(frozen=True)
class Estimate:
    """A model, and what it was made of."""

    words: list[str]
    levels: list[Level]
    num_sentences: int
    num_tokens: int
    """Words of the text, ends of sentences not counted."""
    discounts: list[tuple[float, float, float]]
    """Of n-grams seen once, twice, more often, by order."""
    fell_back: list[int]
    """Orders that have the fallback discounts."""


@dataclass(frozen=True)
class _Grams:
    """Different n-grams of one order."""

    prefix: NDArray[np.int64]
    """Number of the (n-1)-gram without the last word."""
    suffix: NDArray[np.int64]
    """Number of the (n-1)-gram without the first word."""
    last: NDArray[np.int64]
    first: NDArray[np.int64]
    counts: NDArray[np.int64]


def estimate(sentences: Iterable[Sequence[str]], order: int) -> Estimate:
    """Return the model of sentences that are lists of words. Probabilities after each context sum to 1."""
    if order < 1:
        raise ValueError(f"the order of a model is at least 1, not {order}")
    words = {UNKNOWN: 0, START: 1, END: 2}
    tokens: list[int] = []
    num_sentences = 0
    for sentence in sentences:
        tokens.append(1)
        tokens += [words.setdefault(word, len(words)) for word in sentence if word not in (START, END, UNKNOWN)]
        tokens.append(2)
        num_sentences += 1
    if not num_sentences:
        raise ValueError("there is no text")
    grams = _count(np.array(tokens, np.int64), len(words), order)
    adjusted = _adjusted(grams)
    discounts, fell_back = _discounts(adjusted)
    levels = _levels(grams, adjusted, discounts, len(words))
    return Estimate(list(words), levels, num_sentences, len(tokens) - 2 * num_sentences, discounts, fell_back)


def _count(tokens: NDArray[np.int64], num_words: int, order: int) -> list[_Grams]:
    every = np.arange(num_words)
    nothing = np.zeros(num_words, np.int64)
    counts = np.bincount(tokens, minlength=num_words)
    grams = [_Grams(nothing, nothing, every, every, counts)]
    # the n-gram that begins at each place; -1 where a sentence ends before it does
    at, below = tokens.copy(), tokens
    ends = tokens == 2
    for length in range(2, order + 1):
        begins = np.arange(len(tokens) - length + 1)
        inside = np.ones(len(begins), bool)
        for offset in range(length - 1):
            inside &= ~ends[begins + offset]
        begins = begins[inside]
        keys = at[begins] * num_words + tokens[begins + length - 1]
        unique, first_place, numbers, counts = np.unique(
            keys, return_index=True, return_inverse=True, return_counts=True
        )
        place = begins[first_place]
        grams.append(_Grams(unique // num_words, below[place + 1], unique % num_words, tokens[place], counts))
        at = np.full(len(tokens), -1, np.int64)
        at[begins] = numbers.reshape(-1)
        below = at
    return grams


def _adjusted(grams: Sequence[_Grams]) -> list[NDArray[np.int64]]:
    """Return counts of the highest order, and below it how many different words each n-gram followed."""
    result = []
    for level, longer in pairwise(grams):
        followed = np.bincount(longer.suffix, minlength=len(level.counts))
        result.append(np.where(level.first == 1, level.counts, followed))
    result.append(grams[-1].counts.copy())
    result[0][:2] = 0  # unknown words are not in the text, and a beginning is not predicted
    return result


def _discounts(adjusted: Sequence[NDArray[np.int64]]) -> tuple[list[tuple[float, float, float]], list[int]]:
    result, fell_back = [], []
    for order, counts in enumerate(adjusted, 1):
        seen = [int(np.count_nonzero(counts == times)) for times in range(5)]
        found = FALLBACK
        if all(seen[1:]):
            share = seen[1] / (seen[1] + 2 * seen[2])
            one, two, three = (times - (times + 1) * share * seen[times + 1] / seen[times] for times in (1, 2, 3))
            if 0 < one <= 1 and 0 < two <= 2 and 0 < three <= 3:
                found = (one, two, three)
        if found is FALLBACK:
            fell_back.append(order)
        result.append(found)
    return result, fell_back


def _levels(
    grams: Sequence[_Grams],
    adjusted: Sequence[NDArray[np.int64]],
    discounts: Sequence[tuple[float, float, float]],
    num_words: int,
) -> list[Level]:
    levels: list[Level] = []
    below = np.full(1, 1 / (num_words - 1))  # uniform over all words and the end, without the beginning
    rows = np.zeros((1, 0), np.int64)
    shares: list[NDArray[np.float64]] = []
    probabilities: list[NDArray[np.float64]] = []
    all_rows: list[NDArray[np.int64]] = []
    for level, counts, (one, two, more) in zip(grams, adjusted, discounts, strict=True):
        table = np.array([0.0, one, two, more])
        discount = table[np.minimum(counts, 3)]
        num_contexts = len(below)
        total = np.bincount(level.prefix, weights=counts, minlength=num_contexts)
        taken = np.bincount(level.prefix, weights=discount, minlength=num_contexts)
        is_context = total > 0
        share = np.where(is_context, taken / np.where(is_context, total, 1.0), 1.0)
        probability = (counts - discount) / np.where(is_context, total, 1.0)[level.prefix]
        probability += share[level.prefix] * below[level.suffix]
        rows = np.concatenate([rows[level.prefix], level.last[:, None]], 1)
        shares.append(share)
        probabilities.append(probability)
        all_rows.append(rows)
        below = probability
    for number, (ids, probability) in enumerate(zip(all_rows, probabilities, strict=True)):
        backoff = shares[number + 1] if number + 1 < len(shares) else np.ones(len(ids))
        log_probs = np.log10(probability)
        if number == 0:
            log_probs[1] = _NO_PROBABILITY
        levels.append(Level(ids, log_probs, np.log10(backoff)))
    return levels
