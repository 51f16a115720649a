"""Modified Kneser-Ney: sums of 1, and the formulas of Chen and Goodman with plain counting."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict

import numpy as np
import pytest

from paceline.recipes.speech.decoding.kneser_ney import FALLBACK, Estimate, estimate
from tests.recipes.speech.decoding import models


def text(seed: int, number: int = 400) -> list[list[str]]:
    dice = np.random.default_rng(seed)
    words = [f"w{each}" for each in range(400)]
    odds = 1 / np.arange(1, len(words) + 1) ** 1.2
    return [dice.choice(words, size=dice.integers(0, 9), p=odds / odds.sum()).tolist() for _ in range(number)]


def probabilities(made: Estimate) -> dict[tuple[str, ...], tuple[float, float]]:
    return {
        tuple(made.words[each] for each in ids): (10**log_prob, 10**backoff)
        for level in made.levels
        for ids, log_prob, backoff in zip(level.ids, level.log_probs, level.backoffs, strict=True)
    }


def by_hand(sentences: list[list[str]], order: int) -> tuple[dict[tuple[str, ...], float], list[tuple[float, ...]]]:
    """Return the interpolated probability of each n-gram of the text, and the discounts, by dictionaries."""
    counts = [Counter[tuple[str, ...]]() for _ in range(order)]
    for sentence in sentences:
        whole = ["<s>", *sentence, "</s>"]
        for size in range(1, order + 1):
            counts[size - 1].update(tuple(whole[begin : begin + size]) for begin in range(len(whole) - size + 1))
    adjusted = []
    for size in range(1, order + 1):
        if size == order:
            adjusted.append(dict(counts[size - 1]))
            continue
        followed: dict[tuple[str, ...], int] = Counter(gram[1:] for gram in counts[size])
        adjusted.append(
            {gram: number if gram[0] == "<s>" else followed[gram] for gram, number in counts[size - 1].items()}
        )
    adjusted[0].pop(("<s>",))
    discounts = []
    for values in adjusted:
        times = Counter(values.values())
        share = times[1] / (times[1] + 2 * times[2])
        discounts.append(tuple(k - (k + 1) * share * times[k + 1] / times[k] for k in (1, 2, 3)))
    size_of_vocabulary = len({word for (word,) in adjusted[0]}) + 1
    found: dict[tuple[str, ...], float] = {}
    for values, discount in zip(adjusted, discounts, strict=True):
        totals: dict[tuple[str, ...], float] = defaultdict(float)
        taken: dict[tuple[str, ...], float] = defaultdict(float)
        for gram, number in values.items():
            totals[gram[:-1]] += number
            taken[gram[:-1]] += discount[min(number, 3) - 1] if number else 0.0
        for gram, number in values.items():
            lower = found[gram[1:]] if len(gram) > 1 else 1 / size_of_vocabulary
            discounted = number - discount[min(number, 3) - 1] if number else 0.0
            found[gram] = (discounted + taken[gram[:-1]] * lower) / totals[gram[:-1]]
    return found, discounts


@pytest.mark.parametrize("order", [1, 2, 3])
def test_probabilities_and_discounts_are_those_of_the_paper(order: int) -> None:
    sentences = text(order)
    made = estimate(sentences, order)
    expected, discounts = by_hand(sentences, order)
    assert not made.fell_back
    np.testing.assert_allclose(made.discounts, discounts, rtol=1e-12)
    found = probabilities(made)
    assert {gram for gram in found if gram not in {("<s>",), ("<unk>",)}} == set(expected)
    for gram, value in expected.items():
        assert found[gram][0] == pytest.approx(value, rel=1e-12)


@pytest.mark.parametrize("order", [1, 2, 3, 4])
@pytest.mark.parametrize(
    "sentences", [text(0), models.SENTENCES, [["one"]], [[]]], ids=["text", "tiny", "word", "empty"]
)
def test_probabilities_after_every_context_sum_to_one(order: int, sentences: list[list[str]]) -> None:
    made = estimate(sentences, order)
    known = probabilities(made)
    words = [word for word in made.words if word != "<s>"]

    def probability(context: tuple[str, ...], word: str) -> float:
        if (*context, word) in known:
            return known[(*context, word)][0]
        return known.get(context, (0.0, 1.0))[1] * probability(context[1:], word)

    contexts = [gram for gram in known if len(gram) < order and gram[-1] != "</s>"][:60]
    for context in [(), *contexts, *itertools.product(made.words[:4], repeat=order - 1)]:
        assert sum(probability(context, word) for word in words) == pytest.approx(1, abs=1e-12)


def test_too_little_text_has_the_fallback_discounts() -> None:
    made = estimate([["one", "two"]], 2)
    assert made.fell_back == [1, 2]
    assert made.discounts == [FALLBACK, FALLBACK]
    assert (made.num_sentences, made.num_tokens) == (1, 2)
    with pytest.raises(ValueError, match="no text"):
        estimate([], 3)
