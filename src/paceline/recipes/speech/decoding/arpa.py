"""ARPA files: n-gram language models as text, plain or compressed (.gz)."""

from __future__ import annotations

import gzip
import math
import re
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Final, TextIO

import numpy as np

from paceline.core.disk import CannotWrite, replacing
from paceline.core.errors import PacelineError
from paceline.recipes.speech.decoding.ngram import END, MAX_ORDER, MISSING_UNKNOWN, START, UNKNOWN, Level, Ngrams

_COUNT: Final = re.compile(r"ngram\s+(\d{1,9})\s*=\s*(\d+)")
_MOST_DIGITS: Final = 18
"""Of a count; those that have more are no 64-bit numbers."""
_SECTION: Final = re.compile(r"\\(\d+)-grams:")
_SPACES: Final = re.compile(r"[ \t\r\n]+")
_GZIP_MAGIC: Final = b"\x1f\x8b"


class BrokenArpa(PacelineError):
    """A line of an ARPA file that cannot be read."""

    path: Path
    line: int
    why: str
    text: str = ""
    sentence = "{path}:{line}: {why}{shown}"
    hint = "write the model anew: `paceline lm train.json lm.arpa`, or KenLM's `lmplz -o 3 < text > lm.arpa`"

    @property
    def shown(self) -> str:
        return f"\n  {self.text[:100].rstrip()}" if self.text else ""


class NoLanguageModel(PacelineError):
    """A file that holds no language model."""

    path: Path
    why: str
    sentence = "{path} is no language model: {why}"
    hint = (
        "give an ARPA file (.arpa, .arpa.gz) or a binary of KenLM; `paceline lm train.json lm.arpa` makes one of text"
    )


def read_arpa(path: Path) -> Ngrams:
    """Return the model of an ARPA file."""
    with _opened(path) as file:
        lines = _Lines(path, file)
        counts = _read_counts(lines)
        words: dict[str, int] = {}
        levels = [_read_level(lines, order, count, words) for order, count in enumerate(counts, 1)]
        line = lines.next_filled()
        if line != "\\end\\":
            raise lines.broken("`\\end\\` is missing after the last n-gram")
    for word, log_prob in ((START, MISSING_UNKNOWN), (END, MISSING_UNKNOWN), (UNKNOWN, MISSING_UNKNOWN)):
        if word not in words:
            words[word] = len(words)
            levels[0] = Level(
                np.append(levels[0].ids, [[words[word]]], 0),
                np.append(levels[0].log_probs, log_prob),
                np.append(levels[0].backoffs, 0.0),
            )
    return Ngrams(list(words), levels)


def write_arpa(path: Path, words: Sequence[str], levels: Sequence[Level]) -> None:
    """Write a model; a file that ends in .gz is compressed. It has its name once it is complete."""
    try:
        with replacing(path, "wb") as raw:
            if path.suffix == ".gz":
                with gzip.GzipFile(fileobj=raw, mode="wb", mtime=0, filename="") as packed:
                    for text in _arpa_lines(words, levels):
                        packed.write(text.encode())
            else:
                for text in _arpa_lines(words, levels):
                    raw.write(text.encode())
    except OSError as error:
        raise CannotWrite(path, error) from error


def _arpa_lines(words: Sequence[str], levels: Sequence[Level]) -> Iterator[str]:
    yield "\\data\\\n"
    for order, level in enumerate(levels, 1):
        yield f"ngram {order}={len(level.ids)}\n"
    for order, level in enumerate(levels, 1):
        yield f"\n\\{order}-grams:\n"
        rows = zip(level.ids.tolist(), level.log_probs.tolist(), level.backoffs.tolist(), strict=True)
        is_last = order == len(levels)
        for ids, log_prob, backoff in rows:
            text = " ".join([words[each] for each in ids])
            yield f"{log_prob:.9g}\t{text}\n" if is_last else f"{log_prob:.9g}\t{text}\t{backoff:.9g}\n"
    yield "\n\\end\\\n"


@contextmanager
def _opened(path: Path) -> Iterator[TextIO]:
    try:
        with path.open("rb") as raw:
            is_packed = raw.read(2) == _GZIP_MAGIC
        opener = gzip.open if is_packed else open
        with opener(path, "rt", encoding="utf-8-sig", newline="\n") as file:
            yield file
    except UnicodeDecodeError as error:
        raise NoLanguageModel(path, f"it is not UTF-8 ({error.reason})") from None
    except (OSError, EOFError, zlib.error) as error:
        raise NoLanguageModel(path, getattr(error, "strerror", None) or str(error)) from None


class _Lines:
    """Lines of a file, with the number of the last one."""

    def __init__(self, path: Path, file: TextIO) -> None:
        self.path, self.number, self.text = path, 0, ""
        self.file = file

    def next_filled(self) -> str | None:
        for line in self.file:
            self.number += 1
            self.text = line
            stripped = line.strip()
            if stripped:
                return stripped
        self.text = ""
        return None

    def broken(self, why: str) -> BrokenArpa:
        return BrokenArpa(self.path, self.number, why, self.text)


def _read_counts(lines: _Lines) -> list[int]:
    line = lines.next_filled()
    while line is not None and line != "\\data\\":
        if lines.number > 1000:
            break
        line = lines.next_filled()
    if line != "\\data\\":
        raise NoLanguageModel(lines.path, "`\\data\\`, with which an ARPA file begins, is not there")
    counts: list[int] = []
    line = lines.next_filled()
    while line is not None and (match := _COUNT.fullmatch(line)):
        if int(match[1]) != len(counts) + 1:
            raise lines.broken(f"number of {len(counts) + 1}-grams expected")
        if len(match[2]) > _MOST_DIGITS:
            raise lines.broken("more n-grams are announced than any file holds")
        counts.append(int(match[2]))
        line = lines.next_filled()
    if not counts or line != "\\1-grams:":
        raise lines.broken("`ngram 1=...` or `\\1-grams:` expected")
    if not counts[0]:
        raise lines.broken("a model without words: `ngram 1=0`")
    if len(counts) > MAX_ORDER:
        raise lines.broken(f"n-grams of more than {MAX_ORDER} words are not read")
    return counts


def _read_level(lines: _Lines, order: int, count: int, words: dict[str, int]) -> Level:
    if order > 1 and lines.next_filled() != f"\\{order}-grams:":
        raise lines.broken(f"`\\{order}-grams:` expected: more n-grams are there than announced")
    begin = lines.number
    rows = list(map(_split, islice(lines.file, count)))
    lines.number += len(rows)
    level = _converted(rows, order, count, words)
    if level is None:
        raise _first_broken(lines, rows, begin, order, count, words)
    return level


def _split(line: str) -> list[str]:
    """Return the fields of a line; spaces of Unicode belong to words, as KenLM has it."""
    return line.split() if line.isascii() else [field for field in _SPACES.split(line) if field]


def _converted(rows: list[list[str]], order: int, count: int, words: dict[str, int]) -> Level | None:
    """Return n-grams; None if something is wrong with any of them."""
    try:
        if not set(map(len, rows)) <= {order + 1, order + 2} or len(rows) != count:
            return None
        probs = np.array([row[0] for row in rows], np.float64) if rows else np.zeros(0)
        backoffs = np.array([row[order + 1] if len(row) > order + 1 else "0" for row in rows], np.float64)
        if order == 1:
            words.update({row[1]: number for number, row in enumerate(rows)})
            ids = np.arange(count)[:, None]
            is_once = len(words) == count
        else:
            flat = [words[word] for row in rows for word in row[1 : order + 1]]
            ids = np.array(flat, np.int64).reshape(count, order)
            is_once = len({row.tobytes() for row in ids}) == count
    except (ValueError, KeyError, IndexError):
        return None
    are_numbers = (probs <= 0).all() and np.isfinite(backoffs).all()
    return Level(ids, np.maximum(probs, MISSING_UNKNOWN), backoffs) if is_once and are_numbers else None


def _first_broken(
    lines: _Lines, rows: list[list[str]], begin: int, order: int, count: int, words: dict[str, int]
) -> BrokenArpa:
    """Return the error of the first line that cannot be used."""
    seen: set[tuple[str, ...]] = set()
    for number, row in enumerate(rows):
        gram = tuple(row[1 : order + 1])
        why = _wrong(row, order, gram, seen, words)
        if why is not None:
            is_end = not row or row[0].startswith("\\")
            found = f"{count} {order}-grams are announced, {number} are there"
            return BrokenArpa(lines.path, begin + number + 1, found if is_end else why, " ".join(row))
        seen.add(gram)
    found = f"{count} {order}-grams are announced, {len(rows)} are there"
    return BrokenArpa(lines.path, begin + len(rows), found)


def _wrong(
    row: list[str], order: int, gram: tuple[str, ...], seen: set[tuple[str, ...]], words: dict[str, int]
) -> str | None:
    try:
        numbers = [float(row[0]), *map(float, row[order + 1 :])]
        if not order + 1 <= len(row) <= order + 2:
            raise ValueError
    except (ValueError, IndexError):
        return f"a logarithm, {order} words and perhaps a back-off weight expected"
    if not (numbers[0] <= 0 and math.isfinite(numbers[-1] if len(row) == order + 2 else 0.0)):
        return "a probability above 1, or no number"
    missing = [word for word in gram if order > 1 and word not in words]
    if missing:
        return f"the word {missing[0]!r} is not among the 1-grams"
    return "the same n-gram stands there twice" if gram in seen else None
