"""Labels as decoders see them: a piece of text for each output of a network, with the beginnings of words marked."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np

from paceline.core.errors import PacelineError

WORD_START: Final = "\u2581"
"""Stands for a space in pieces, as SentencePiece has it: a lower block that no text has."""
UNKNOWN: Final = "\u2047"
"""Text of a label for characters that have none."""
MAX_LABELS: Final = 2**15 - 1
_UNKNOWN_NAMES: Final = frozenset({"<unk>", "[UNK]"})
_SILENT_NAMES: Final = frozenset({"<s>", "</s>", "<pad>", "<blank>", "<blk>", "[PAD]", "[CLS]", "[SEP]", "[MASK]"})
_BYTE: Final = re.compile(r"<0x([0-9A-F]{2})>")
_CONTINUED: Final = "##"


class BadLabels(PacelineError):
    """A list of labels that cannot name the outputs of a model."""

    why: str
    sentence = "`labels` cannot be used: {why}"
    hint = 'give each label once, as one character, such as labels: [" ", "a", "b", "\'"]'


@dataclass(frozen=True)
class Pieces:
    """Names of a network's outputs, in their order; the blank of CTC comes after the last.

    Decoders, language models and word times look at `pieces`, the text that each label writes, in SentencePiece's
    convention for characters and for subwords alike:

    - A piece that begins with `WORD_START` (`▁`) begins a word, and so does the first piece of an utterance. A piece
      may be `▁` alone: the character label " " is, and the next piece goes on with the word that it began.
    - The text of `ids` is `"".join(pieces[i] for i in ids)` with `▁` as space, and spaces only between words.
    - A label that writes nothing (`<s>`, `[PAD]`) has an empty piece; that of unknown characters is `▁⁇`. Bytes of
      SentencePiece's byte fallback stay as they are named (`<0xC3>`): `decode` makes characters of them.
    """

    symbols: tuple[str, ...]

    def __post_init__(self) -> None:
        if not self.symbols:
            raise BadLabels("there is none")
        if len(self.symbols) > MAX_LABELS:
            raise BadLabels(f"{len(self.symbols):,} are more than {MAX_LABELS:,}")
        twice = [symbol for symbol, count in Counter(self.symbols).items() if count > 1]
        if twice:
            raise BadLabels(f"{twice[0]!r} stands there more than once")

    def __len__(self) -> int:
        return len(self.symbols)

    @property
    def blank(self) -> int:
        return len(self.symbols)

    @cached_property
    def pieces(self) -> tuple[str, ...]:
        """The text of each label, `▁` at the beginning of a word."""
        return tuple(map(_piece, self.symbols))

    @property
    def dtype(self) -> np.dtype[Any]:
        """The smallest that holds every id."""
        return np.dtype(np.uint8 if len(self) <= 256 else np.int16)

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of labels, with one space between words."""
        joined = "".join([self._texts[label] for label in ids])
        if self._has_bytes:
            joined = _with_characters(joined)
        return " ".join(joined.replace(WORD_START, " ").split())

    @cached_property
    def _texts(self) -> tuple[str, ...]:
        """Pieces, and what is unknown as a word of its own."""
        unknown = WORD_START + UNKNOWN
        return tuple(unknown + WORD_START if piece == unknown else piece for piece in self.pieces)

    @cached_property
    def _has_bytes(self) -> bool:
        return any(_BYTE.fullmatch(symbol) for symbol in self.symbols)


def is_byte(symbol: str) -> bool:
    """Return True for a byte of SentencePiece's byte fallback (`<0xC3>`)."""
    return _BYTE.fullmatch(symbol) is not None


def are_subwords(symbols: Sequence[str]) -> bool:
    """Return True if labels are pieces of words in SentencePiece's convention, not characters."""
    return " " not in symbols and any(symbol.startswith(WORD_START) for symbol in symbols)


def from_wordpiece(symbols: Sequence[str]) -> tuple[str, ...]:
    """Return labels in SentencePiece's convention (`▁walk`, `ing`), where they are in BERT's (`walk`, `##ing`)."""
    if not any(symbol.startswith(_CONTINUED) and symbol != _CONTINUED for symbol in symbols):
        return tuple(symbols)
    return tuple(
        symbol
        if symbol in _UNKNOWN_NAMES | _SILENT_NAMES
        else symbol.removeprefix(_CONTINUED)
        if symbol.startswith(_CONTINUED) and symbol != _CONTINUED
        else WORD_START + symbol
        for symbol in symbols
    )


def check_symbols(symbols: Sequence[str]) -> None:
    """Raise `ValueError` unless these are the labels of a network: characters, or subwords."""
    long = [] if are_subwords(symbols) else [symbol for symbol in symbols if len(symbol) != 1]
    if long:
        shown = ", ".join(repr(symbol) for symbol in long[:5])
        marked = f"or subwords that have {WORD_START!r} at the beginning of a word"
        raise ValueError(f"must be single characters, {marked}; {len(long)} are not: {shown}")
    twice = sorted(symbol for symbol, count in Counter(symbols).items() if count > 1)
    if twice or not symbols:
        raise ValueError(f"hold {', '.join(map(repr, twice))} more than once" if twice else "are empty")


def _piece(symbol: str) -> str:
    if symbol in _UNKNOWN_NAMES:
        return WORD_START + UNKNOWN
    return "" if symbol in _SILENT_NAMES else symbol.replace(" ", WORD_START)


def _with_characters(joined: str) -> str:
    """Return a text in which bytes that follow each other are the characters that they encode."""
    return re.sub(
        rf"(?:{_BYTE.pattern})+",
        lambda run: bytes(int(byte, 16) for byte in _BYTE.findall(run[0])).decode("utf-8", "replace"),
        joined,
    )
