"""ARPA files: the back-off rule by hand, broken files by file and line, KenLM's probabilities."""

from __future__ import annotations

import gzip
import itertools
from pathlib import Path

import numpy as np
import pytest

from paceline.recipes.speech.decoding.arpa import BrokenArpa, NoLanguageModel, read_arpa, write_arpa
from paceline.recipes.speech.decoding.kneser_ney import estimate
from paceline.recipes.speech.decoding.ngram import Ngrams
from tests.recipes.speech.decoding import models


@pytest.mark.parametrize("is_packed", [False, True])
def test_probabilities_are_those_of_the_back_off_rule(tmp_path: Path, is_packed: bool) -> None:
    path = models.written(tmp_path)
    if is_packed:
        path = tmp_path / "lm.arpa.gz"
        path.write_bytes(gzip.compress(models.ARPA.encode()))
    model, grams = read_arpa(path), models.grams_of(models.ARPA)
    assert model.order == 3
    sentences = [words for size in range(5) for words in itertools.product(["a", "b", "ab", "zz"], repeat=size)]
    for sentence, found in zip(sentences, model.log_probs(sentences), strict=True):
        whole = ["<s>", *sentence, "</s>"]
        expected = [models.log_prob(grams, whole[:place], whole[place], 3) for place in range(1, len(whole))]
        np.testing.assert_allclose(found, expected, atol=1e-6)


def test_a_model_is_read_as_it_was_written(tmp_path: Path) -> None:
    made = estimate(models.SENTENCES, 3)
    expected = Ngrams(made.words, made.levels).log_probs(models.SENTENCES)
    for name in ("lm.arpa", "lm.arpa.gz"):
        write_arpa(tmp_path / name, made.words, made.levels)
        found = read_arpa(tmp_path / name).log_probs(models.SENTENCES)
        np.testing.assert_allclose(np.concatenate(found), np.concatenate(expected), atol=1e-6)


@pytest.mark.parametrize(
    ("before", "after", "line", "why"),
    [
        ("-0.6\ta\t-0.3", "-0.6 a b c -0.3", 10, "a logarithm, 1 words"),
        ("-0.7\ta b\t-0.25", "x\ta b\t-0.25", 16, "a logarithm, 2 words"),
        ("-0.7\ta b\t-0.25", "0.7\ta b\t-0.25", 16, "above 1"),
        ("-0.5\tb a", "-0.5\tb zz", 17, "'zz' is not among the 1-grams"),
        ("-0.5\tb a", "-0.5\ta b", 17, "twice"),
        ("-0.15\tb ab a\n", "", 24, "3 3-grams are announced, 2 are there"),
        ("ngram 3=3", "ngram 3=2", 24, "`\\end\\` is missing"),
        ("ngram 2=5", "ngram 2=4", 19, "`\\3-grams:` expected"),
        ("ngram 2=5\n", "", 3, "number of 2-grams expected"),
        ("ngram 2=5", f"ngram 2={2**63}", 3, "more n-grams are announced than any file holds"),
        ("ngram 2=5", f"ngram 2={'9' * 5000}", 3, "more n-grams are announced than any file holds"),
    ],
)
def test_broken_lines_are_named(tmp_path: Path, before: str, after: str, line: int, why: str) -> None:
    assert before in models.ARPA
    path = models.written(tmp_path, models.ARPA.replace(before, after))
    with pytest.raises(BrokenArpa) as caught:
        read_arpa(path)
    assert str(caught.value).startswith(f"{path}:{line}: ")
    assert why in str(caught.value)
    assert "paceline lm" in caught.value.hint


def test_spaces_of_unicode_part_no_words_and_a_mark_is_no_word(tmp_path: Path) -> None:
    """A no-break space is a part of a word for KenLM, also before what looks like a back-off weight."""
    text = "\ufeff" + models.ARPA.replace("ab", "a\u00a05")
    assert read_arpa(models.written(tmp_path, text)).words[:6] == [
        word.replace("ab", "a\u00a05") for word in read_arpa(models.written(tmp_path)).words[:6]
    ]
    with pytest.raises(BrokenArpa, match="a model without words"):
        read_arpa(models.written(tmp_path, "\\data\\\nngram 1=0\n\n\\1-grams:\n\n\\end\\\n"))


def test_files_that_are_none(tmp_path: Path) -> None:
    text, bytes_, packed = tmp_path / "a.txt", tmp_path / "b.bin", tmp_path / "c.gz"
    text.write_text("once upon a time\n")
    bytes_.write_bytes(b"\xff\xfe\x00")
    packed.write_bytes(gzip.compress(models.ARPA.encode())[:40])
    for path in (text, bytes_, packed, tmp_path / "gone.arpa"):
        with pytest.raises(NoLanguageModel) as caught:
            read_arpa(path)
        assert str(path) in str(caught.value)
        assert ".arpa" in caught.value.hint


def test_kenlm_says_the_same(tmp_path: Path) -> None:
    kenlm = pytest.importorskip("kenlm", reason="the package kenlm is not installed")
    made = estimate(models.SENTENCES, 3)
    write_arpa(tmp_path / "made.arpa", made.words, made.levels)
    sentences = [words for size in range(5) for words in itertools.product(["a", "b", "ab", "zz"], repeat=size)]
    whole = models.ARPA.replace("ngram 2=5", "ngram 2=6").replace("-1.0\ta ab", "-1.2\tb ab\n-1.0\ta ab")
    for path in (models.written(tmp_path, whole), tmp_path / "made.arpa"):
        theirs = kenlm.Model(str(path))
        for sentence, found in zip(sentences, read_arpa(path).log_probs(sentences), strict=True):
            expected = [value for value, _, _ in theirs.full_scores(" ".join(sentence))]
            np.testing.assert_allclose(found, expected, atol=2e-6)
