"""Texts cut into pieces as SentencePiece does (BPE: Sennrich et al. 2016; unigram: Kudo 2018), and as BERT does.

Each of these gives the ids that the program gives which made the model, exactly.
"""

from __future__ import annotations

import heapq
import struct
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from paceline.recipes.speech.text.pieces import WORD_START
from paceline.recipes.speech.text.subwords.model_file import PieceKind, SentencePieceModel
from paceline.recipes.speech.text.subwords.normalizer import SpNormalizer

UNIGRAM, BPE = 1, 2
_UNKNOWN_PENALTY = 10.0
_CLOSE = 1e-2
"""Scores of two ways to cut a word that may be told apart otherwise in a long sentence, where sums are rounded more."""
_LONGEST_WORD = 100
"""BERT's: a longer word is unknown."""


class Cutter(Protocol):
    """Cuts texts into pieces."""

    def __call__(self, text: str) -> list[int]:
        """Return the pieces of a text by number."""


class SentencePieceCutter:
    """SentencePiece's way, a word at a time where pieces never hold parts of two words, each word once."""

    def __init__(self, model: SentencePieceModel) -> None:
        self._model = model
        numbered = [(number, piece) for number, piece in enumerate(model.pieces)]
        self._unknown = next(number for number, piece in numbered if piece.kind is PieceKind.UNKNOWN)
        self._byte = {int(piece.text[3:5], 16): number for number, piece in numbered if piece.kind is PieceKind.BYTE}
        usual = (PieceKind.NORMAL, PieceKind.USER_DEFINED, PieceKind.UNUSED)
        self._id_of = {piece.text: number for number, piece in numbered if piece.kind in usual}
        self._user = frozenset(piece.text for piece in model.pieces if piece.kind is PieceKind.USER_DEFINED)
        self._unused = frozenset(number for number, piece in numbered if piece.kind is PieceKind.UNUSED)
        self._longest = max(map(len, self._id_of), default=1)
        self._longest_user = max(map(len, self._user), default=0)
        normal = [piece.score for piece in model.pieces if piece.kind is PieceKind.NORMAL]
        self._lowest, self._highest = min(normal, default=0.0), max([0.0, *normal])
        self._normalize = SpNormalizer(model, sorted(self._user))
        self._by_word = model.escape_whitespaces and not any(WORD_START in text[1:] for text in self._id_of)
        self._cut = self._by_merging if model.model_type == BPE else self._by_path
        self._known_words: dict[str, list[int]] = {}

    def __call__(self, text: str) -> list[int]:
        normalized = self._normalize(text)
        if not self._by_word:
            return self._finished(normalized, self._cut(normalized)[0])
        ids: list[int] = []
        for word in _words(normalized):
            known = self._known_words.get(word)
            if known is None:
                known, is_close = self._cut(word)
                if is_close:  # decided by how sums are rounded, which depends on what stands before
                    return self._finished(normalized, self._cut(normalized)[0])
                self._known_words[word] = known
            ids += known
        return self._finished(normalized, ids)

    def _finished(self, text: str, ids: list[int]) -> list[int]:
        """Return ids with bytes for unknown characters, or with unknown neighbours as one."""
        if self._unknown not in ids:
            return ids
        if not self._model.byte_fallback:
            return [each for place, each in enumerate(ids) if each != self._unknown or ids[place - 1 : place] != [each]]
        out: list[int] = []
        at = 0
        for each in ids:
            if each == self._unknown:  # always one character
                out += [self._byte[byte] for byte in text[at].encode()]
                at += 1
            else:
                out.append(each)
                at += len(self._model.pieces[each].text)
        return out

    def _by_merging(self, text: str) -> tuple[list[int], bool]:
        """Join neighbours to the best piece that is left, the first of equal ones, until no two make a piece."""
        symbols = list(self._frozen_or_single(text))
        before = list(range(-1, len(symbols) - 1))
        after = [*range(1, len(symbols)), -1]
        made_of: dict[str, tuple[str, str]] = {}
        agenda: list[tuple[float, int, int, int]] = []

        def consider(left: int, right: int) -> None:
            if left < 0 or right < 0 or symbols[left] in self._user or symbols[right] in self._user:
                return
            joined = symbols[left] + symbols[right]
            number = self._id_of.get(joined)
            if number is not None:
                heapq.heappush(agenda, (-self._model.pieces[number].score, left, right, len(joined)))
                if number in self._unused:
                    made_of[joined] = symbols[left], symbols[right]

        for left in range(len(symbols) - 1):
            consider(left, left + 1)
        while agenda:
            _, left, right, length = heapq.heappop(agenda)
            if not symbols[left] or not symbols[right] or len(symbols[left]) + len(symbols[right]) != length:
                continue  # one of them has become part of another piece
            symbols[left] += symbols[right]
            symbols[right] = ""
            after[left] = after[right]
            if after[left] >= 0:
                before[after[left]] = left
            consider(before[left], left)
            consider(left, after[left])
        return [number for symbol in symbols if symbol for number in self._used(symbol, made_of)], False

    def _used(self, symbol: str, made_of: Mapping[str, tuple[str, str]]) -> Iterator[int]:
        number = self._id_of.get(symbol, self._unknown)
        if number not in self._unused or symbol not in made_of:
            yield number
            return
        for part in made_of[symbol]:
            yield from self._used(part, made_of)

    def _frozen_or_single(self, text: str) -> Iterator[str]:
        at = 0
        while at < len(text):
            most = min(self._longest_user, len(text) - at)
            length = next((size for size in range(most, 0, -1) if text[at : at + size] in self._user), 1)
            yield text[at : at + length]
            at += length

    def _by_path(self, text: str) -> tuple[list[int], bool]:
        """Return the pieces with the highest sum of scores, in single precision as SentencePiece adds them, and True if
        another way is so close that rounding decides."""
        unknown_score = _single(self._lowest - _UNKNOWN_PENALTY)
        best: list[tuple[float, int, int] | None] = [(0.0, -1, -1), *([None] * len(text))]
        is_close = False
        for start in range(len(text)):
            reached = best[start]
            assert reached is not None  # each character is a way to the next
            has_single = False
            for end in range(start + 1, min(len(text), start + self._longest) + 1):
                number = self._id_of.get(text[start:end])
                if number is None or number in self._unused:
                    continue
                has_single |= end == start + 1
                score = self._model.pieces[number].score
                if text[start:end] in self._user:
                    score = _single(len(text[start:end].encode()) * self._highest - 0.1)
                is_close |= _improve(best, end, _single(score + reached[0]), number, start)
            if not has_single:
                is_close |= _improve(best, start + 1, _single(unknown_score + reached[0]), self._unknown, start)
        ids: list[int] = []
        end = len(text)
        while end > 0:
            reached = best[end]
            assert reached is not None
            _, number, end = reached
            ids.append(number)
        return ids[::-1], is_close


def _improve(best: list[tuple[float, int, int] | None], end: int, score: float, number: int, start: int) -> bool:
    """Keep the better of two ways to a place; return True if they are close."""
    known = best[end]
    if known is None or score > known[0]:
        best[end] = (score, number, start)
    return known is not None and abs(score - known[0]) < _CLOSE


def _single(value: float) -> float:
    """Round to single precision."""
    rounded: float = struct.unpack("<f", struct.pack("<f", value))[0]
    return rounded


def _words(text: str) -> Iterator[str]:
    """Yield the words of a text, each from its `▁` on."""
    start = 0
    while start < len(text):
        end = text.find(WORD_START, start + 1)
        end = len(text) if end < 0 else end
        yield text[start:end]
        start = end


class WordPieceCutter:
    """BERT's way (cased): words and punctuation apart, each from the left in the longest pieces there are."""

    def __init__(self, pieces: Sequence[str], unknown: int) -> None:
        """`pieces` have `▁` at the beginning of a word, not `##` inside of it."""
        self._id_of = {piece: number for number, piece in enumerate(pieces)}
        self._unknown = unknown
        self._longest = max(map(len, pieces))
        self._known_words: dict[str, list[int]] = {}

    def __call__(self, text: str) -> list[int]:
        ids: list[int] = []
        for word in _bert_words(text):
            known = self._known_words.get(word)
            if known is None:
                known = self._known_words[word] = self._cut(word)
            ids += known
        return ids

    def _cut(self, word: str) -> list[int]:
        if len(word) > _LONGEST_WORD:
            return [self._unknown]
        rest = WORD_START + word
        ids: list[int] = []
        while rest:
            sizes = range(min(self._longest, len(rest)), 1 if not ids else 0, -1)
            size = next((size for size in sizes if rest[:size] in self._id_of), 0)
            if not size:
                return [self._unknown]  # one that is not known makes the whole word unknown
            ids.append(self._id_of[rest[:size]])
            rest = rest[size:]
        return ids


def _bert_words(text: str) -> Iterator[str]:
    """Yield words between spaces; punctuation and Chinese characters are words of their own."""
    apart = []
    for character in text:
        if is_punctuation(character) or _is_chinese(character):
            apart.append(f" {character} ")
        elif character in "\t\n\r" or unicodedata.category(character) == "Zs":
            apart.append(" ")
        elif unicodedata.category(character)[0] != "C" and character != "\ufffd":
            apart.append(character)
    yield from "".join(apart).split()


def is_punctuation(character: str) -> bool:
    """Return True for what BERT takes for punctuation: all ASCII signs are."""
    is_sign = character.isascii() and not character.isalnum() and character.isprintable() and character != " "
    return is_sign or unicodedata.category(character)[0] == "P"


def _is_chinese(character: str) -> bool:
    code = ord(character)
    blocks = (
        (0x4E00, 0x9FFF),
        (0x3400, 0x4DBF),
        (0x20000, 0x2A6DF),
        (0x2A700, 0x2B81F),
        (0x2B820, 0x2CEAF),
        (0xF900, 0xFAFF),
        (0x2F800, 0x2FA1F),
    )
    return any(first <= code <= last for first, last in blocks)
