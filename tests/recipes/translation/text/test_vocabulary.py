from __future__ import annotations

from pathlib import Path

import pytest

from paceline.core.errors import InvalidSetting
from paceline.recipes.translation.text.vocabulary import FILE, SPECIAL, BadTokenizer, Vocabulary
from tests.recipes.translation.toy import pairs

LINES = [line for pair in pairs(200) for line in pair]


def test_byte_pairs_write_any_text() -> None:
    vocabulary = Vocabulary.train(LINES, 300)
    assert len(vocabulary) % 8 == 0
    texts = ["one two", "Grüße, 日本 🙂!", "a  b", "<s> eight </s>"]
    encoded = list(vocabulary.encode(texts))
    assert vocabulary.decode(encoded)[:2] == texts[:2]
    assert vocabulary.decode([encoded[2]]) == ["a b"]
    assert vocabulary.tokens(next(vocabulary.encode(["seven"]))) == ["Ġseven"]


def test_the_same_lines_give_the_same_units(tmp_path: Path) -> None:
    first, second = Vocabulary.train(LINES, 280), Vocabulary.train(list(LINES), 287)
    assert first.json == second.json
    (tmp_path / FILE).write_text(first.json, encoding="utf-8")
    assert Vocabulary.read(tmp_path).json == first.json


def test_words_and_small_letters() -> None:
    vocabulary = Vocabulary.train(["One two", "two three"], 1000, tokens="words", lowercase=True)
    assert len(vocabulary) == 8
    assert vocabulary.decode(list(vocabulary.encode(["Two one new", "three"]))) == [
        "two one",
        "three",
    ]


def test_files_that_are_no_units(tmp_path: Path) -> None:
    with pytest.raises(BadTokenizer, match="there is no such file"):
        Vocabulary.read(tmp_path)
    (tmp_path / FILE).write_text("{}")
    with pytest.raises(BadTokenizer, match="is no tokenizer"):
        Vocabulary.read(tmp_path)
    other = Vocabulary.train(LINES, 280).json.replace(SPECIAL[0], "[PAD]")
    (tmp_path / FILE).write_text(other)
    with pytest.raises(BadTokenizer, match="its marks are not"):
        Vocabulary.read(tmp_path)
    with pytest.raises(InvalidSetting, match="too small"):
        Vocabulary.train(LINES, 100)
