"""ARPA files: n-gram language models as text, plain or compressed (.gz)."""

from __future__ import annotations

import gzip
import re
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final, TextIO

import numpy as np

from paceline.core.disk import CannotWrite, replacing
from paceline.core.errors import PacelineError
from paceline.core.language import phrase
from paceline.recipes.asr.decoding.ngram import END, MAX_ORDER, MISSING_UNKNOWN, START, UNKNOWN, Level, Ngrams

_COUNT: Final = re.compile(r"ngram\s+(\d+)\s*=\s*(\d+)")
_SECTION: Final = re.compile(r"\\(\d+)-grams:")
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
    hint = "give an ARPA file (.arpa, .arpa.gz) or a binary of KenLM; `paceline lm train.json lm.arpa` makes one of text"


def read_arpa(path: Path) -> Ngrams:
    """Return the model of an ARPA file."""
    with _opened(path) as file:
        lines = _Lines(path, file)
        counts = _read_counts(lines)
        words: dict[str, int] = {}
        levels = [_read_level(lines, order, count, words) for order, count in enumerate(counts, 1)]
        line = lines.next_filled()
        if line != "\\end\\":
            raise lines.broken(phrase("`\\end\\` is missing after the last n-gram"))
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
        with opener(path, "rt", encoding="utf-8", newline="\n") as file:
            yield file  # type: ignore[misc]
    except UnicodeDecodeError as error:
        raise NoLanguageModel(path, phrase("it is not UTF-8 ({error})", error=error.reason)) from None
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
        raise NoLanguageModel(lines.path, phrase("`\\data\\`, with which an ARPA file begins, is not there"))
    counts: list[int] = []
    line = lines.next_filled()
    while line is not None and (match := _COUNT.fullmatch(line)):
        if int(match[1]) != len(counts) + 1:
            raise lines.broken(phrase("number of {order}-grams expected", order=len(counts) + 1))
        counts.append(int(match[2]))
        line = lines.next_filled()
    if not counts or line != "\\1-grams:":
        raise lines.broken(phrase("`ngram 1=...` or `\\1-grams:` expected"))
    if len(counts) > MAX_ORDER:
        raise lines.broken(phrase("n-grams of more than {most} words are not read", most=MAX_ORDER))
    return counts


def _read_level(lines: _Lines, order: int, count: int, words: dict[str, int]) -> Level:
    if order > 1:
        line = lines.next_filled()
        if line != f"\\{order}-grams:":
            why = phrase("`\\{order}-grams:` expected, after {count} {below}-grams", order=order, count=count, below=order - 1)
            raise lines.broken(why)
    ids = np.empty((count, order), np.int64)
    probs, backoffs = np.empty(count), np.zeros(count)
    seen: set[tuple[int, ...]] = set()
    place = 0
    for line in lines.file:
        lines.number += 1
        fields = line.split()
        if not fields:
            if place == count:
                break
            continue
        if place == count or fields[0].startswith("\\"):
            lines.text = line
            why = phrase("{count} {order}-grams are announced, {found} are there", count=count, order=order, found=place)
            raise lines.broken(why if place != count else phrase("more {order}-grams than announced", order=order))
        try:
            probs[place] = float(fields[0])
            if len(fields) == order + 2:
                backoffs[place] = float(fields[-1])
            elif len(fields) != order + 1:
                raise ValueError
        except ValueError:
            lines.text = line
            why = phrase("a logarithm, {order} words and perhaps a back-off weight expected", order=order)
            raise lines.broken(why) from None
        if not (probs[place] <= 0 and np.isfinite(backoffs[place])):
            lines.text = line
            raise lines.broken(phrase("a probability above 1, or no number"))
        if order == 1:
            if fields[1] in words:
                lines.text = line
                raise lines.broken(phrase("the word {word!r} stands there twice", word=fields[1]))
            ids[place, 0] = words.setdefault(fields[1], len(words))
        else:
            try:
                row = tuple([words[word] for word in fields[1 : order + 1]])
            except KeyError as error:
                lines.text = line
                raise lines.broken(phrase("the word {word!r} is not among the 1-grams", word=error.args[0])) from None
            if row in seen:
                lines.text = line
                raise lines.broken(phrase("the same n-gram stands there twice"))
            seen.add(row)
            ids[place] = row
        place += 1
        if place == count:
            break
    if place < count:
        lines.text = ""
        why = phrase("{count} {order}-grams are announced, {found} are there", count=count, order=order, found=place)
        raise lines.broken(why)
    return Level(ids, np.maximum(probs, MISSING_UNKNOWN), backoffs)
