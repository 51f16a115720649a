"""Transcripts as label ids: which characters a model writes, and how any text is brought down to them.

All transcripts of a manifest are held in one array of ids, so that a million of them cost workers nothing to receive.
"""

from __future__ import annotations

import json
import math
import re
import shlex
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, Final, Literal, Protocol, overload

import numpy as np
from numpy.typing import NDArray

from paceline.core.errors import InvalidData, PacelineError
from paceline.recipes.speech.text.english import expand
from paceline.recipes.speech.text.pieces import BadLabels, Pieces

TextMode = Literal["en", "basic", "none"]

_CHUNK_TEXTS: Final = 1 << 14
_MAX_SHOWN: Final = 20
_APOSTROPHES: Final = "\u2018\u2019\u201a\u201b\u02bc\u02bb\u2032\u00b4\u0060\uff07"
_QUOTES: Final = "\u201c\u201d\u201e\u201f\u00ab\u00bb\u2039\u203a\u2033\u300c\u300d"
_HYPHENS: Final = "\u2010\u2011\u2012\u2013\u2212\ufe63\uff0d"
_PLAIN: Final = {
    **dict.fromkeys(_APOSTROPHES, "'"),
    **dict.fromkeys(_QUOTES, '"'),
    **dict.fromkeys(_HYPHENS, "-"),
    **dict.fromkeys("\u2014\u2015", " - "),  # dashes that part clauses must not join words
    "\u2044": "/",
}
_QUOTED: Final = re.compile("\u2018(.*?)\u2019(?!\\w)", re.DOTALL)
_INNER_APOSTROPHE: Final = re.compile(r"(?<=\w)'(?=\w)")
_SPACES: Final = re.compile(r"  +")
_WORD: Final = re.compile(
    "[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]"
    "|[^\\s\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]+"
)
"""A word; a single character in scripts that put no space between words (Thai, Lao, Burmese, Khmer, Chinese, kana)."""


@dataclass(frozen=True)
class Labels(Pieces):
    """The characters that a model writes, in the order of its outputs; the blank of CTC comes after the last."""

    def __post_init__(self) -> None:
        long = [symbol for symbol in self.symbols if not isinstance(symbol, str) or len(symbol) != 1]
        if long:
            raise BadLabels(f"{long[0]!r} is not one character; subwords come with `--vocabulary` or `--tokenizer`")
        super().__post_init__()

    @cached_property
    def characters(self) -> frozenset[str]:
        return frozenset(self.symbols)

    def encode(self, text: str) -> list[int]:
        ids = [self._id_of.get(character, -1) for character in text]
        if -1 in ids:
            outside = {_shown(character): None for character in text if character not in self.characters}
            raise InvalidData(
                f"{text!r} has characters outside the labels: {' '.join(outside)}",
                hint='normalise texts first: `text_rules` "en" or "basic"',
            )
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        return "".join([self.symbols[label] for label in ids])

    @property
    def letters(self) -> Labels:
        """Characters to which texts are brought before they become ids: these."""
        return self

    def encode_many(self, texts: list[str]) -> tuple[NDArray[np.int16], NDArray[np.int64]]:
        """Return the ids of texts that consist of labels in one array, and how many each has."""
        return self._ids("".join(texts)), _lengths(texts)

    @cached_property
    def _id_of(self) -> dict[str, int]:
        return {symbol: number for number, symbol in enumerate(self.symbols)}

    @cached_property
    def _id_by_code(self) -> NDArray[np.int16]:
        """The id of each Unicode code point up to the highest label's, -1 where it is no label."""
        table = np.full(max(map(ord, self.symbols)) + 2, -1, np.int16)
        table[[ord(symbol) for symbol in self.symbols]] = np.arange(len(self), dtype=np.int16)
        return table

    def _ids(self, joined: str) -> NDArray[np.int16]:
        codes = np.frombuffer(joined.encode("utf-32-le", "surrogatepass"), np.uint32)
        return self._id_by_code[np.minimum(codes, len(self._id_by_code) - 1)]


def read_labels(value: str | Sequence[str]) -> str:
    """Return labels as one text, from a text, a list of characters, or a file (.txt) that holds them.

    No set of labels looks like the name of such a file: it would have one character twice.
    """
    if not isinstance(value, str):
        return "".join(map(str, value))
    if not value.endswith(".txt"):
        return value
    try:
        return Path(value).read_text(encoding="utf-8").strip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{value} cannot be read: {error}") from None


ENGLISH: Final = Labels((" ", *"abcdefghijklmnopqrstuvwxyz", "'"))
"""Labels of QuartzNet and Jasper: 28, the blank is 28."""


@dataclass(frozen=True)
class Normalized:
    """A text in labels only, and what was lost on the way."""

    text: str
    changed: bool
    dropped: Mapping[str, int]
    """Number of drops of each character that no label stands for."""
    stripped: Mapping[str, int] = field(default_factory=dict)
    """Number of letters of each kind that lost their accent, because only the letter without it is a label."""
    num_words: int = 0
    """In the text, before anything is lost."""
    num_hurt: int = 0
    """Words that lost a letter, an accent or a digit: what is trained on is another word."""


class _Plain(dict[int, str]):
    """The plain form of each character that is no label: NFKC, and ASCII for typographic signs."""

    def __init__(self, labels: frozenset[str]) -> None:
        self._labels = labels

    def __missing__(self, code: int) -> str:
        character = chr(code)
        if character in self._labels:
            plain = character
        else:
            plain = _PLAIN.get(character) or unicodedata.normalize("NFKC", character)
            plain = "".join(_PLAIN.get(part, part) for part in plain)
        self[code] = plain
        return plain


class _Spelling(dict[int, str]):
    """Spelling of each character in the labels, computed when it is first met; for `str.translate`."""

    def __init__(self, labels: frozenset[str]) -> None:
        self._labels = labels
        self.lost: set[str] = set()
        """Characters met that no label stands for."""
        self.stripped: set[str] = set()
        """Letters met that are written without their accent."""

    def __missing__(self, code: int) -> str:
        character = chr(code)
        spelled = self._in_labels(character)
        if spelled is None:
            kind = unicodedata.category(character)
            # punctuation parts words; format characters (soft hyphen, byte order mark) have no sound: neither is a loss
            spelled = " " if kind[0] in "PSZ" or character.isspace() else ""
            if is_heard(character):
                self.lost.add(character)
            spelled = spelled if " " in self._labels else ""
        self[code] = spelled
        return spelled

    def _in_labels(self, character: str) -> str | None:
        parts = unicodedata.normalize("NFD", character)
        for form in (character, parts, parts[0]):  # whole, base letter and accents apart, base letter alone
            for cased in (form, form.lower(), form.upper()):
                if self._labels.issuperset(cased):
                    if form is not character and form != parts:
                        self.stripped.add(character)
                    return cased
        return None


def is_heard(character: str) -> bool:
    """Return True if a character stands for a sound: letters, digits and symbols, not punctuation, space or format."""
    kind = unicodedata.category(character)
    return not (kind[0] in "PZ" or kind == "Cf" or character.isspace())


def count_words(text: str) -> int:
    return len(text.split()) if text.isascii() else len(_WORD.findall(text))


class Normalizer:
    """Brings texts down to the labels. Made once per label set: what it learns of a character is kept.

    "none" only drops what is outside the labels. "basic" also turns compatibility forms and typographic signs into
    plain ones, follows the labels' case, strips accents that are no labels and turns punctuation into space. "en" also
    writes numbers, + & % and a few abbreviations as English words. A character that is a label is never changed.
    """

    def __init__(self, labels: Labels, mode: TextMode) -> None:
        self._labels = labels
        self._mode = mode
        self._spelling = _Spelling(labels.characters)
        self._plain = _Plain(labels.characters)

    def __call__(self, text: str) -> Normalized:
        clean = text
        dropped: dict[str, int] = {}
        stripped: dict[str, int] = {}
        before = text
        if self._mode != "none":
            clean = self._unify(clean)
            if self._mode == "en":
                clean = expand(clean, self._labels.characters)
            if "'" in clean and "'" not in self._labels.characters:
                clean = _INNER_APOSTROPHE.sub("", clean)
            spelled, before = clean.translate(self._spelling), clean
            if self._spelling.lost:
                dropped = _count(clean, self._spelling.lost)
            if self._spelling.stripped:
                stripped = _count(clean, self._spelling.stripped)
            clean = _SPACES.sub(" ", spelled).strip(" ")
        elif not self._labels.characters.issuperset(clean):
            dropped = _count(clean, set(clean) - self._labels.characters)
            clean = "".join([character for character in clean if character not in dropped])
        hurt = {character for character in (*dropped, *stripped) if is_heard(character)}
        num_hurt = sum(not hurt.isdisjoint(word) for word in _WORD.findall(before)) if hurt else 0
        return Normalized(clean, clean != text, dropped, stripped, count_words(before), num_hurt)

    def _unify(self, text: str) -> str:
        """Signs and letters that only look different as one; code points that labels do not tell apart."""
        if text.isascii():
            return text.replace("`", "'") if "`" in text and "`" not in self._labels.characters else text
        if not unicodedata.is_normalized("NFC", text):
            text = unicodedata.normalize("NFC", text)
        if "\u2018" in text and not self._labels.characters.issuperset("\u2018\u2019"):
            text = _QUOTED.sub(r" \1 ", text)
        return text.translate(self._plain)


@dataclass
class TextReport:
    """Changes by normalisation to all texts of a data set, shown before training."""

    num_texts: int = 0
    num_changed: int = 0
    num_empty: int = 0
    """Texts of which nothing is left."""
    dropped: Counter[str] = field(default_factory=Counter)
    stripped: Counter[str] = field(default_factory=Counter)
    """Letters that lost their accent."""
    num_words: int = 0
    num_hurt: int = 0
    """Words that lost a letter, an accent or a digit."""
    example: tuple[str, str] | None = None
    """A text with such words, before and after."""

    @property
    def lost_share(self) -> float:
        """Share of the words that are not what was said."""
        return self.num_hurt / max(1, self.num_words)

    def add_text(self, text: str, normalized: Normalized) -> None:
        """Enter what normalisation did to a text that is counted already."""
        self.num_changed += normalized.changed
        self.dropped.update(normalized.dropped)
        self.stripped.update(normalized.stripped)
        self.num_words += normalized.num_words - count_words(text)  # a number may become several words
        self.num_hurt += normalized.num_hurt
        if normalized.num_hurt and self.example is None:
            self.example = (text, normalized.text)

    def add(self, other: TextReport) -> None:
        self.num_texts += other.num_texts
        self.num_changed += other.num_changed
        self.num_empty += other.num_empty
        self.dropped.update(other.dropped)
        self.stripped.update(other.stripped)
        self.num_words += other.num_words
        self.num_hurt += other.num_hurt
        self.example = self.example or other.example

    def __str__(self) -> str:
        lines = [f"normalised {self.num_changed:,} of {self.num_texts:,} texts"]
        if self.dropped:
            lines.append(f"dropped characters outside the labels: {counted(self.dropped)}")
        if self.stripped:
            lines.append(f"accents outside the labels taken off: {counted(self.stripped)}")
        if self.num_hurt:
            lines.append(f"{self.lost_share:.2%} of the words lost letters")
        if self.num_empty:
            lines.append(f"{self.num_empty:,} empty")
        return "; ".join(lines)


@dataclass(frozen=True)
class EncodedTexts:
    """The label ids of many texts in one array: text i is `ids[offsets[i] : offsets[i + 1]]`."""

    ids: NDArray[Any]
    offsets: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> NDArray[Any]:
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        index %= len(self)
        return self.ids[self.offsets[index] : self.offsets[index + 1]]

    @property
    def lengths(self) -> NDArray[np.int64]:
        return np.diff(self.offsets)


@overload
def required_frames(ids: Sequence[int] | NDArray[Any]) -> int: ...
@overload
def required_frames(ids: EncodedTexts) -> NDArray[np.int64]: ...


def required_frames(ids: Sequence[int] | NDArray[Any] | EncodedTexts) -> int | NDArray[np.int64]:
    """The least number of frames in which CTC can write a text: one per label, and a blank between equal neighbours."""
    if not isinstance(ids, EncodedTexts):
        array = np.asarray(ids)
        return len(array) + int(np.count_nonzero(array[1:] == array[:-1]))
    first, end = ids.offsets[:-1], ids.offsets[1:]
    repeats = np.zeros(len(ids.ids) + 1, np.int64)  # equal pairs that end before this position
    np.cumsum(ids.ids[1:] == ids.ids[:-1], out=repeats[2:])
    inside = repeats[end] - repeats[np.minimum(first + 1, end)]
    return np.asarray(ids.lengths + inside, np.int64)


class EncodingLabels(Protocol):
    """Labels that texts are written in: characters, or subwords."""

    @property
    def symbols(self) -> tuple[str, ...]: ...
    @property
    def dtype(self) -> np.dtype[Any]: ...
    @property
    def letters(self) -> Labels:
        """Characters that they can write."""

    def encode_many(self, texts: list[str]) -> tuple[NDArray[np.int16], NDArray[np.int64]]:
        """Return the ids of texts of these letters in one array, and how many each has."""

    def decode(self, ids: Iterable[int]) -> str: ...


def encode_all(texts: Iterable[str], labels: EncodingLabels, mode: TextMode) -> tuple[EncodedTexts, TextReport]:
    """Return the ids of all texts, normalised, and what that changed. Texts that already consist of labels cost
    least."""
    report = TextReport()
    ids: list[NDArray[Any]] = []
    lengths: list[NDArray[np.int64]] = []
    for chunk in _normalized(texts, labels.letters, mode, report):
        numbers, counts = labels.encode_many(chunk)
        ids.append(numbers.astype(labels.dtype))
        lengths.append(counts)
    offsets = np.zeros(report.num_texts + 1, np.int64)
    np.cumsum(np.concatenate([np.empty(0, np.int64), *lengths]), out=offsets[1:])
    return EncodedTexts(np.concatenate([np.empty(0, labels.dtype), *ids]), offsets), report


def normalized(texts: Iterable[str], letters: Labels, mode: TextMode) -> Iterator[str]:
    """Yield texts as `encode_all` brings them to the letters, before they become ids."""
    for chunk in _normalized(texts, letters, mode, TextReport()):
        yield from chunk


def _normalized(texts: Iterable[str], letters: Labels, mode: TextMode, report: TextReport) -> Iterator[list[str]]:
    normalizer = Normalizer(letters, mode)
    for chunk in _chunks(texts):
        report.num_words += sum(map(count_words, chunk))
        for number in _to_normalize(chunk, letters, mode):
            result = normalizer(chunk[number])
            report.add_text(chunk[number], result)
            chunk[number] = result.text
        report.num_texts += len(chunk)
        report.num_empty += sum(not text for text in chunk)
        yield chunk


def _to_normalize(texts: list[str], labels: Labels, mode: TextMode) -> list[int]:
    """Return the numbers of texts that normalisation would change."""
    lengths = _lengths(texts)
    text_of = np.repeat(np.arange(len(texts)), lengths)
    ids = labels._ids("".join(texts))
    wrong = ids < 0
    if mode != "none" and " " in labels.characters:
        space = ids == labels.encode(" ")[0]
        starts = np.append(True, text_of[1:] != text_of[:-1])[: len(ids)]
        ends = np.append(starts[1:], True)[: len(ids)]
        wrong |= space & (starts | ends | np.append(False, space[:-1])[: len(ids)])
    return [int(number) for number in np.unique(text_of[wrong])]


def _chunks(texts: Iterable[str]) -> Iterator[list[str]]:
    """Few enough texts at a time that the arrays to look at them stay small."""
    rest = iter(texts)
    while chunk := list(islice(rest, _CHUNK_TEXTS)):
        yield chunk


def _lengths(texts: list[str]) -> NDArray[np.int64]:
    return np.fromiter(map(len, texts), np.int64, len(texts))


def _count(text: str, characters: set[str]) -> dict[str, int]:
    return {character: text.count(character) for character in sorted(characters.intersection(text))}


def counted(characters: Mapping[str, int]) -> str:
    """Return characters with their counts in words, the most frequent ones first."""
    by_count = sorted(characters.items(), key=lambda pair: (-pair[1], pair[0]))
    named = [f"{_shown(character)} {count:,}" for character, count in by_count[:_MAX_SHOWN]]
    more = f" and {len(by_count) - _MAX_SHOWN:,} more" if len(by_count) > _MAX_SHOWN else ""
    return f"{', '.join(named)}{more}"


# -- labels that lack the language's letters ---------------------------------------------------------------------------


class LabelsLackLetters(PacelineError):
    """Labels that cannot write the transcripts: training, or measuring, on them would be on other words."""

    part: str
    report: TextReport
    labels: Labels
    mode: TextMode
    is_training: bool = True
    is_given: bool = False
    """The labels are subwords from a file: others cannot be added to them."""
    learned_from: Labels | None = None
    """Characters that subwords were learned of, from training transcripts; None if labels are something else."""
    taught: frozenset[str] = frozenset()
    """Of learned subwords: characters that training transcripts have, and lose."""
    sentence = "{part}: {share} of the words lose letters that are not among the labels: {letters}{example}"
    hint = "{advice}"

    @property
    def share(self) -> str:
        return f"{self.report.lost_share:.1%}"

    @property
    def letters(self) -> str:
        return counted(lost_letters(self.report))

    @property
    def example(self) -> str:
        before, after = self.report.example or ("", "")
        return f"\n  {_cut(before)!r} becomes {_cut(after)!r}" if before else ""

    @property
    def advice(self) -> str:
        share = min(1.0, math.ceil(100 * self.report.lost_share + 1) / 100)
        go_on = f"`--max-lost-words {share:g}` goes on without them"
        if not self.is_training:
            return f"the model cannot write them, and its error rate would be that of other words; {go_on}"
        rules, lost = _better_rules(self.labels, list(lost_letters(self.report)), self.mode)
        words = [f"--text-rules {rules}"] * (rules != self.mode)
        if not lost:
            return f"bring the transcripts to the labels with `{words[0]}`; {go_on}"
        if self.is_given:
            symbols = "".join(covering(self.labels, lost, rules).symbols)
            learn = f"instead of `--tokenizer`, with `--vocabulary 128 --labels {_quoted(symbols)}`"
            return f"the tokenizer does not know them: give another, or learn one {learn}; {go_on}"
        base = self.labels
        if self.learned_from is not None:
            # A subword is learned of characters that training transcripts have: labels of others change nothing.
            base, lost = self.learned_from, [each for each in lost if each in self.taught]
            if not lost:
                return (
                    "subwords are learned from the training transcripts, and none of those has them: train on "
                    f"transcripts that do, or validate on others; {go_on}"
                )
        symbols = "".join(covering(base, lost, rules).symbols)
        words.append(f"--labels {_quoted(symbols)}")
        yaml = f"in YAML `labels: {json.dumps(symbols, ensure_ascii=False)}`"
        return f"set labels that have them: `{' '.join(words)}`, {yaml}; {go_on}"


def covering(labels: Labels, characters: Iterable[str], mode: TextMode) -> Labels:
    """Return labels that have these characters, too, after those that are there; in their case, unless texts are taken
    as they are."""
    letters = [symbol for symbol in labels.symbols if symbol.lower() != symbol.upper()]
    is_lower, is_upper = (all(map(test, letters)) for test in (str.islower, str.isupper))
    more: dict[str, None] = {}
    for character in sorted(characters):
        plain = character
        if mode != "none" and letters and is_lower != is_upper:
            plain = character.lower() if is_lower else character.upper()
        more |= dict.fromkeys(plain if len(plain) == 1 else character)
    return Labels((*labels.symbols, *sorted(symbol for symbol in more if symbol not in labels.characters)))


def lost_letters(report: TextReport) -> Counter[str]:
    """Return characters that were lost or changed, and are heard."""
    return Counter({char: count for char, count in (report.dropped + report.stripped).items() if is_heard(char)})


def _better_rules(labels: Labels, lost: list[str], mode: TextMode) -> tuple[TextMode, list[str]]:
    """Return text rules that lose fewer of the characters, and those that they still lose."""
    modes: tuple[TextMode, ...] = ("basic", "en")
    still = {rules: [each for each in lost if Normalizer(labels, rules)(each).num_hurt] for rules in modes}
    if not still["en"] and still["basic"]:
        return "en", []  # numbers as words, where the rest is English
    return ("basic", still["basic"]) if mode == "none" else (mode, lost)


def _quoted(text: str) -> str:
    """Return a text as a shell takes it, in double quotes where that is enough."""
    return shlex.quote(text) if set(text) & set('"$`\\!') else f'"{text}"'


def _cut(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:57]}..."


def _shown(character: str) -> str:
    return character if character.isprintable() and not character.isspace() else f"U+{ord(character):04X}"
