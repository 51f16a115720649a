"""Words as numbers: a 64-bit hash that grows with each piece of a word, and a table of all beginnings of known words.

A search holds thousands of unfinished words at a time. The hash of a word is a polynomial over its characters, so that
adding a piece is one multiplication and one addition, for characters and for subwords alike, in C and on GPUs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from paceline.recipes.speech.decoding.ngram import END, START, UNKNOWN, LanguageModel

FACTOR: Final = 0x9E3779B97F4A7C15 | 1
_MASK: Final = (1 << 64) - 1
WORD_START: Final = "\u2581"


@dataclass(frozen=True)
class Alphabet:
    """Labels as the search sees them, the blank of CTC after the last."""

    hashes: NDArray[np.int64]
    """Of what each label adds to a word."""
    powers: NDArray[np.int64]
    """Factor of the hash of what stood before."""
    lengths: NDArray[np.int32]
    """In characters."""
    starts: NDArray[np.bool_]
    """True for labels that begin a word."""
    space_is_silent: bool
    """True if the label of a space is a gap between words, False if it is the first sound of the next one."""

    @property
    def blank(self) -> int:
        return len(self.hashes)

    @classmethod
    def of(cls, pieces: Sequence[str]) -> Alphabet:
        """Return the alphabet of pieces that have `▁` where a word begins."""
        texts = [piece.removeprefix(WORD_START) for piece in pieces]
        return cls(
            np.array([signed(hash_of(text)) for text in texts], np.int64),
            np.array([signed(pow(FACTOR, len(text), 1 << 64)) for text in texts], np.int64),
            np.array([len(text) for text in texts], np.int32),
            np.array([piece.startswith(WORD_START) for piece in pieces], bool),
            not any(piece.startswith(WORD_START) and piece != WORD_START for piece in pieces),
        )


@dataclass(frozen=True)
class WordTable:
    """Beginnings of all words of a language model and of hot words, by their hashes."""

    hashes: NDArray[np.int64]
    """Rising."""
    words: NDArray[np.int32]
    """Id in the language model of the word that this is as a whole, else -1."""
    partials: NDArray[np.float64]
    """Score of an unfinished word: what a hot word gives so far, 0 for beginnings of other words."""
    is_hot: NDArray[np.bool_]
    """True for a whole hot word."""


def hash_of(text: str) -> int:
    value = 0
    for character in text:
        value = (value * FACTOR + ord(character) + 1) & _MASK
    return value


def signed(value: int) -> int:
    """Return 64 bits as the number that int64 has for them."""
    return value - (1 << 64) if value >> 63 else value


def word_table(model: LanguageModel | None, hotwords: Sequence[str], hotword_weight: float) -> WordTable:
    """Return the table of a language model, or of none, and of hot words (phrases count as their words)."""
    known = [] if model is None else list(model.words)
    ids = np.arange(len(known), dtype=np.int32)
    is_word = np.array([word not in (START, END, UNKNOWN) for word in known], bool)
    hashes, ends = _prefixes([word for word, is_real in zip(known, is_word, strict=True) if is_real])
    words = np.full(len(hashes), -1, np.int32)
    words[ends >= 0] = ids[is_word][ends[ends >= 0]]
    partials, is_hot = _hot_prefixes(hotwords, hotword_weight)
    hot_hashes = np.array([signed(hash_of(prefix)) for prefix in partials], np.int64)
    every = np.unique(np.concatenate([hashes, hot_hashes]))
    table = WordTable(every, np.full(len(every), -1, np.int32), np.zeros(len(every)), np.zeros(len(every), bool))
    # of equal beginnings the one that is a whole word counts
    order = np.argsort(words, kind="stable")
    table.words[np.searchsorted(every, hashes[order])] = words[order]
    places = np.searchsorted(every, hot_hashes)
    table.partials[places] = list(partials.values())
    table.is_hot[places] = [prefix in is_hot for prefix in partials]
    return table


def _prefixes(words: Sequence[str]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return hashes of all beginnings, some more than once, and which word each is as a whole, or -1."""
    lengths = np.array([len(word) for word in words], np.int64)
    codes = np.frombuffer("".join(words).encode("utf-32-le", "surrogatepass"), np.uint32).astype(np.uint64)
    begins = np.cumsum(lengths) - lengths
    value = np.zeros(len(words), np.uint64)
    hashes, ends = [np.zeros(0, np.uint64)], [np.zeros(0, np.int64)]
    for column in range(int(lengths.max(initial=0))):
        rows = np.flatnonzero(lengths > column)
        value[rows] = value[rows] * np.uint64(FACTOR) + codes[begins[rows] + column] + np.uint64(1)
        hashes.append(value[rows].copy())
        ends.append(np.where(lengths[rows] == column + 1, rows, -1))
    return np.concatenate(hashes).view(np.int64), np.concatenate(ends)


def _hot_prefixes(hotwords: Sequence[str], weight: float) -> tuple[dict[str, float], set[str]]:
    """Return scores of beginnings of hot words, in proportion to how much of the shortest such word is there."""
    whole = {word for phrase in hotwords for word in phrase.split()}
    shortest: dict[str, int] = {}
    for word in sorted(whole, key=len):
        for end in range(1, len(word) + 1):
            shortest.setdefault(word[:end], len(word))
    return {prefix: weight * len(prefix) / length for prefix, length in shortest.items()}, whole
