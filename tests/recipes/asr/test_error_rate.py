"""Error counts against jiwer's."""

from __future__ import annotations

import random

import jiwer
import pytest
from rich.text import Text

from paceline.recipes.asr.error_rate import Aligned, alignment, character_errors, marked, word_errors


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


def test_words_side_by_side() -> None:
    """Both texts can be read off, and the differences are as many as are counted."""
    for reference, hypothesis in [*pairs()[:200], ("", "a b"), ("a", "")]:
        rows = alignment(reference, hypothesis)
        assert [row.reference for row in rows if row.operation != "insert"] == reference.split()
        assert [row.hypothesis for row in rows if row.operation != "delete"] == hypothesis.split()
        assert sum(row.operation != "equal" for row in rows) == word_errors(reference, hypothesis)[0]
        for operation, left, right in rows:
            assert (left == right) == (operation == "equal")
    assert alignment("turn on the big light now", "turn the pig light right now") == [
        Aligned("equal", "turn", "turn"),
        Aligned("delete", "on", ""),
        Aligned("equal", "the", "the"),
        Aligned("substitute", "big", "pig"),
        Aligned("equal", "light", "light"),
        Aligned("insert", "", "right"),
        Aligned("equal", "now", "now"),
    ]


def test_errors_in_colour() -> None:
    """Words that look like markup are shown as they are."""
    shown = Text.from_markup(marked(alignment("set [red] timer now", "a set lamp timer")))
    assert shown.plain == "a set lamp ([red]) timer now"
    assert {str(span.style): shown.plain[span.start : span.end] for span in shown.spans[1:]} == {
        "red": "lamp",
        "green": "([red])",
        "strike": "now",
    }
