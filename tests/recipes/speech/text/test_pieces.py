"""Pieces that decoders see, of characters, SentencePiece's subwords and BERT's."""

from __future__ import annotations

import pytest

from paceline.recipes.speech.text.labels import ENGLISH
from paceline.recipes.speech.text.pieces import BadLabels, Pieces, are_subwords, check_symbols, from_wordpiece


def test_a_space_is_the_beginning_of_a_word() -> None:
    assert ENGLISH.pieces == ("\u2581", *"abcdefghijklmnopqrstuvwxyz", "'")
    assert Pieces(ENGLISH.symbols).decode(ENGLISH.encode(" so  it's ")) == "so it's"
    assert not are_subwords(ENGLISH.symbols)


def test_subwords_are_joined_to_words() -> None:
    pieces = Pieces(("<unk>", "\u2581walk", "ing", "\u2581", "s", "\u2581the", "<s>", "<0xC3>", "<0xB6>"))
    assert are_subwords(pieces.symbols)
    assert pieces.pieces[:2] == ("\u2581\u2047", "\u2581walk")
    assert pieces.blank == len(pieces) == 9
    assert pieces.decode([5, 1, 2, 3, 4, 6]) == "the walking s"
    assert pieces.decode([2, 3, 0, 5]) == "ing \u2047 the"
    assert pieces.decode([1, 7, 8]) == "walk\u00f6"
    assert pieces.decode([1, 7]) == "walk\ufffd"
    assert pieces.decode([]) == ""


def test_word_pieces_of_bert_get_the_same_form() -> None:
    pieces = Pieces(from_wordpiece(["[PAD]", "[UNK]", "walk", "##ing", "s", "##s", "#"]))
    assert pieces.symbols == ("[PAD]", "[UNK]", "\u2581walk", "ing", "\u2581s", "s", "\u2581#")
    assert pieces.decode([0, 2, 3, 4, 5, 1]) == "walking ss \u2047"
    assert from_wordpiece(ENGLISH.symbols) == ENGLISH.symbols


@pytest.mark.parametrize(("symbols", "says"), [((), "there is none"), (("a", "a"), "'a' stands there more than once")])
def test_labels_are_distinct(symbols: tuple[str, ...], says: str) -> None:
    with pytest.raises(BadLabels, match=says):
        Pieces(symbols)
    with pytest.raises(ValueError, match="empty|more than once"):
        check_symbols(symbols)


def test_a_word_among_characters_is_refused() -> None:
    with pytest.raises(ValueError, match="single characters, or subwords .* 1 are not: 'the'"):
        check_symbols(("a", " ", "the"))
    check_symbols(("\u2581the", "a"))
