"""Error counts against jiwer's."""

from __future__ import annotations

import random

import jiwer
import pytest

from paceline.recipes.speech.text.error_rate import character_errors, word_errors


def pairs() -> list[tuple[str, str]]:
    """1,000 references and what a poor recogniser makes of them; few words, so that many repeat."""
    dice = random.Random(0)
    words = ["a", "b", "one", "one", "two", "seven", "it's", "turn", "torn", "x"]
    found: list[tuple[str, str]] = []
    while len(found) < 1000:
        reference = dice.choices(words, k=dice.randint(1, 12))
        hypothesis: list[str] = []
        for word in reference:
            kind = dice.random()
            if kind < 0.1:
                continue
            hypothesis.append(dice.choice(words) if kind < 0.3 else word)
            if kind > 0.9:
                hypothesis.append(dice.choice(words))
        if len(found) % 50 == 0:
            hypothesis = []
        gap = " " if len(found) % 7 else "  "
        found.append(
            (gap.join(reference), f" {gap.join(hypothesis)} " if len(found) % 11 == 0 else gap.join(hypothesis))
        )
    return found


def test_as_jiwer_counts() -> None:
    num_wrong = num_words = num_wrong_characters = num_characters = 0
    references, hypotheses = [], []
    for reference, hypothesis in pairs():
        words = jiwer.process_words(reference, hypothesis)
        errors, count = word_errors(reference, hypothesis)
        assert errors == words.substitutions + words.deletions + words.insertions
        assert count == words.hits + words.substitutions + words.deletions
        characters = jiwer.process_characters(reference, hypothesis)
        character_count = characters.hits + characters.substitutions + characters.deletions
        wrong = characters.substitutions + characters.deletions + characters.insertions
        assert character_errors(reference, hypothesis) == (wrong, character_count)
        num_wrong, num_words = num_wrong + errors, num_words + count
        num_wrong_characters, num_characters = num_wrong_characters + wrong, num_characters + character_count
        references.append(reference)
        hypotheses.append(hypothesis)
    assert num_wrong / num_words == pytest.approx(jiwer.wer(references, hypotheses), abs=1e-12)
    assert num_wrong_characters / num_characters == pytest.approx(jiwer.cer(references, hypotheses), abs=1e-12)


def test_a_reference_without_words_has_no_weight() -> None:
    assert word_errors("", "two words") == (2, 0)
    assert word_errors("  ", "") == (0, 0)
    assert character_errors("", "ab c") == (4, 0)
