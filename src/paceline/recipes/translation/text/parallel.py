"""Parallel text: two files with a sentence per line, or one file of pairs (TSV, JSONL, packed); gzip where it ends so.

Lines are read as bytes, so that what is wrong is named by file and line.
"""

from __future__ import annotations

import gzip
import io
import json
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from paceline.core.cloud.file_copy import bring
from paceline.core.errors import InvalidData, InvalidSetting, PacelineError
from paceline.core.paths import near
from paceline.core.units import counted
from paceline.data.packed.errors import is_packed
from paceline.data.strings import Strings

MOST_SHOWN = 20
"""Bad lines that are shown."""
_MOST_CHARACTERS = 80
_MOST_KEYS = 6
BOM = b"\xef\xbb\xbf"
STANDARD_INPUT = "-"


class NoText(PacelineError):
    """A file that cannot be read."""

    path: Path
    why: str
    sentence = "{place}: {why}"
    hint = "give text files with one sentence per line, .tsv, .jsonl or packed files (.h5); each may be .gz"

    @property
    def place(self) -> str:
        return near(self.path)


class NoInput(PacelineError):
    """Something to translate that cannot be read."""

    path: Path
    why: str
    sentence = "{place}: {why}"
    hint = "give files with one sentence per line, .tsv, .jsonl or .h5; or one: `echo 'A dog.' | paceline infer RUN -`"

    @property
    def place(self) -> str:
        return near(self.path)


@dataclass(frozen=True)
class BadPair:
    """A line that cannot be used, and why."""

    path: Path
    line: int
    """Counted from 1."""
    what: str
    text: str = ""

    def __str__(self) -> str:
        shown = f"\n    {self.text}" if self.text else ""
        return f"{near(self.path)}:{self.line}: {self.what}{shown}"


class BadText(PacelineError):
    """Lines that cannot be used, where none may be left out."""

    bad: Sequence[BadPair]
    total: int
    is_all: bool = False
    can_skip: bool = True
    sentence = "{total:#bad line}{lines}"
    hint = "{advice}"

    @property
    def lines(self) -> str:
        more = [f"  ... and {self.total - MOST_SHOWN:,} more"] if self.total > MOST_SHOWN else []
        return "".join(f"\n{line}" for line in [*(f"  {bad}" for bad in self.bad[:MOST_SHOWN]), *more])

    @property
    def advice(self) -> str:
        these = "it" if self.total == 1 else "them"
        if self.is_all:
            return f"mend {these}: without {these} nothing is left"
        if not self.can_skip:
            return f"mend {these} (bytes that are no UTF-8: `iconv -f latin1 -t utf8 FILE`, say)"
        return f"mend {these}, or go on without {these} with `--bad-data skip`"


@dataclass(frozen=True)
class TextFiles:
    """Files of one data set."""

    name: str
    sources: tuple[Path, ...] = ()
    targets: tuple[Path, ...] = ()
    pairs: tuple[Path, ...] = ()
    languages: tuple[str, str] = ("source", "target")
    """Keys of JSONL, beside `source` and `target`."""
    is_reversed: bool = False
    """Files of pairs have the target first."""

    @property
    def paths(self) -> tuple[Path, ...]:
        return (*self.sources, *self.targets, *self.pairs)


@dataclass
class ParallelText:
    """Sentences and their translations, as they were read."""

    source: Strings
    target: Strings
    bad: list[BadPair] = field(default_factory=list)
    """Lines that were left out, the first of them."""
    num_bad: int = 0

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> dict[str, str]:
        """Return a pair by name, for `paceline pack`."""
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        return {"source": self.source[index], "target": self.target[index]}

    def take(self, rows: NDArray[np.int64]) -> ParallelText:
        return ParallelText(self.source.take(rows), self.target.take(rows), self.bad, self.num_bad)

    def lines(self) -> Iterator[str]:
        """Yield all sentences of both languages."""
        for row in range(len(self)):
            yield self.source[row]
            yield self.target[row]

    @property
    def fingerprint(self) -> str:
        """Digest of all texts and their order."""
        digest = xxhash.xxh3_64()
        for column in (self.source, self.target):
            digest.update(column.packed.data)
            digest.update(column.lengths.data)
        return digest.hexdigest()


class _Reader:
    """Collects pairs and what is wrong with lines."""

    def __init__(self) -> None:
        self.source: list[bytes] = []
        self.target: list[bytes] = []
        self.bad: list[BadPair] = []
        self.num_bad = 0

    def add(self, source: _Line, target: _Line) -> None:
        wrong = [each for each in (_wrong(source), _wrong(target)) if each is not None]
        if wrong:
            self.note(*wrong)
        else:
            self.source.append(source.text)
            self.target.append(target.text)

    def note(self, *wrong: BadPair) -> None:
        """Note what is wrong with one pair."""
        self.bad += wrong[: max(0, MOST_SHOWN - len(self.bad))]
        self.num_bad += 1


@dataclass(frozen=True)
class _Line:
    path: Path
    number: int
    text: bytes
    side: str = ""
    """Which part of the line it is, where that has both."""


def read_lines(
    paths: Sequence[Path],
    standard_input: bytes = b"",
    languages: tuple[str, str] = ("source", "target"),
    *,
    is_reversed: bool = False,
) -> list[str]:
    """Return lines to translate; empty ones stay, so that line N of what is written belongs to line N of what was read.

    A path `-` is standard input. Of a file of pairs the source is taken; a translation need not be there.
    """
    texts: list[str] = []
    bad: list[BadPair] = []
    try:
        for path in paths:
            is_input = str(path) == STANDARD_INPUT
            lines = _bare(io.BytesIO(standard_input)) if is_input else _lines_of(path, languages, is_reversed)
            for number, line in enumerate(lines, 1):
                if isinstance(line, str):
                    bad.append(BadPair(path, number, line))
                elif line.strip() and (wrong := _wrong(_Line(path, number, line))) is not None:
                    bad.append(wrong)
                else:
                    texts.append(line.decode("utf-8").strip())
    except NoText as error:
        raise NoInput(error.path, error.why) from None
    if bad:
        raise BadText(bad, len(bad), can_skip=False)
    if not texts:
        raise NoInput(paths[0], "there is no line in it")
    return texts


def _lines_of(path: Path, languages: tuple[str, str], is_reversed: bool) -> Iterator[bytes | str]:
    """Yield the source of each row of a file, or what is wrong with it; all of a line where the file is no pairs."""
    side = int(is_reversed)
    name = path.name.removesuffix(".gz")
    if is_packed(path):
        for pair in _packed_pairs(path):
            yield pair[side]
    elif name.endswith((".jsonl", ".json")):
        key = ("source", "target")[side], languages[side]
        for line in _lines(path):
            columns = _from_json(line, [key])
            yield columns if isinstance(columns, str) else columns[0]
    elif name.endswith(".tsv"):
        for line in _lines(path):
            if is_reversed or b"\t" in line:
                columns = _from_tsv(line)
                yield columns if isinstance(columns, str) else columns[side]
            else:
                yield line
    else:
        yield from _lines(path)


def has_pairs(path: Path) -> bool:
    """Return True if a JSONL file begins with a source and a target, and not with a line of a manifest."""
    try:
        line = next(_lines(path), b"")
    except NoText:
        return False
    return not isinstance(_from_json(line, [("source", "source"), ("target", "target")]), str)


def read_parallel(files: TextFiles, *, skip_bad: bool = False) -> ParallelText:
    """Read all files of a data set. Raises `BadText` with all that is wrong, unless that may be left out."""
    reader = _Reader()
    if len(files.sources) != len(files.targets):
        raise InvalidSetting(
            f"`{files.name}_source` names {counted(len(files.sources), 'file')}, `{files.name}_target` "
            f"{len(files.targets)}",
            hint="name a file of translations for each file of sources, in the same order",
        )
    for source, target in zip(files.sources, files.targets, strict=True):
        _read_two(reader, source, target)
    for path in files.pairs:
        _read_pairs(reader, path, files)
    if reader.num_bad and (not skip_bad or not reader.source):
        raise BadText(reader.bad, reader.num_bad, is_all=not reader.source)
    if not reader.source:
        raise NoText(files.paths[0], "there is no line in it")
    return ParallelText(Strings.pack(reader.source), Strings.pack(reader.target), reader.bad, reader.num_bad)


def _read_two(reader: _Reader, source: Path, target: Path) -> None:
    sources, targets = list(_lines(source)), list(_lines(target))
    if len(sources) != len(targets):
        raise InvalidData(
            f"{near(source)} has {counted(len(sources), 'line')}, {near(target)} has {len(targets):,}: they do not "
            "pair up",
            hint="line N of one must be the translation of line N of the other; find where they part with `paste` or "
            "`diff`",
        )
    for number, (first, second) in enumerate(zip(sources, targets, strict=True), 1):
        reader.add(_Line(source, number, first), _Line(target, number, second))


def _read_pairs(reader: _Reader, path: Path, files: TextFiles) -> None:
    if is_packed(path):
        _read_packed(reader, path, files)
        return
    is_json = path.name.removesuffix(".gz").endswith((".jsonl", ".json"))
    keys = list(zip(("source", "target"), files.languages, strict=True))
    for number, line in enumerate(_lines(path), 1):
        columns = _from_json(line, keys) if is_json else _from_tsv(line)
        if isinstance(columns, str):
            reader.note(BadPair(path, number, columns, _beginning(line)))
            continue
        first, second = reversed(columns) if files.is_reversed else columns
        reader.add(_Line(path, number, first, "source"), _Line(path, number, second, "target"))


def _read_packed(reader: _Reader, path: Path, files: TextFiles) -> None:
    for row, pair in enumerate(_packed_pairs(path), 1):
        first, second = reversed(pair) if files.is_reversed else pair
        reader.add(_Line(path, row, first, "source"), _Line(path, row, second, "target"))


def _packed_pairs(path: Path) -> Iterator[tuple[bytes, bytes]]:
    from paceline.data.packed.dataset import PackedDataset

    packed = PackedDataset(path)
    for row in range(len(packed)):
        sample = packed[row]
        pair = [sample.get(name) for name in ("source", "target")] if isinstance(sample, dict) else []
        if len(pair) != 2 or not all(isinstance(text, str) for text in pair):
            raise NoText(path, "holds no texts called source and target: pack them with `paceline pack`")
        yield str(pair[0]).encode(), str(pair[1]).encode()


def _from_tsv(line: bytes) -> list[bytes] | str:
    """Return both columns, or what is wrong."""
    columns = line.split(b"\t")
    if len(columns) != 2:
        return f"{counted(len(columns), 'column')} instead of a sentence, a tab and its translation"
    return columns


def _from_json(line: bytes, keys_of_texts: Sequence[tuple[str, str]]) -> list[bytes] | str:
    """Return texts of an object, each by one of two keys, or what is wrong; also of Hugging Face's `translation`."""
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        return f"no JSON ({str(error).partition(':')[0]})"
    inner = entry.get("translation", entry) if isinstance(entry, dict) else None
    if not isinstance(inner, dict):
        return "no JSON object"
    texts = []
    for keys in keys_of_texts:
        value = next((inner[key] for key in keys if key in inner), None)
        if not isinstance(value, str):
            names = " or ".join(f'"{key}"' for key in dict.fromkeys(keys))
            return f"{names} is missing{_other_keys(inner)}" if value is None else f"{names} is no text"
        texts.append(" ".join(value.splitlines()).encode("utf-8", "surrogatepass"))
    return texts


def _other_keys(entry: dict[str, Any]) -> str:
    """Return what an object has in place of a missing key, for people."""
    keys = [f'"{key}"' for key in entry][:_MOST_KEYS]
    return f" among {', '.join(keys)} (`source_lang` and `target_lang` name them)" if keys else ""


def _wrong(line: _Line) -> BadPair | None:
    side = f"its {line.side} " if line.side else ""
    try:
        text = line.text.decode("utf-8")
    except UnicodeDecodeError as error:
        what = f"{side or 'it '}is not UTF-8 (byte {error.start + 1} is 0x{line.text[error.start]:02x})"
        return BadPair(line.path, line.number, what, _beginning(line.text))
    if not text.strip():
        return BadPair(line.path, line.number, f"{side}is empty" if side else "the line is empty")
    return None


def _beginning(raw: bytes) -> str:
    text = raw[: 4 * _MOST_CHARACTERS].decode("utf-8", "backslashreplace").strip()
    text = "".join(letter if letter.isprintable() else " " for letter in text)
    return text if len(text) <= _MOST_CHARACTERS else text[: _MOST_CHARACTERS - 3] + "..."


def _lines(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file without their ends."""
    bring(path)
    opened: Any = gzip.open if path.suffix == ".gz" else open
    try:
        with opened(path, "rb") as file:
            yield from _bare(file)
    except FileNotFoundError:
        raise NoText(path, "there is no such file") from None
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise NoText(path, f"is no whole gzip file ({error})") from None
    except OSError as error:
        raise NoText(path, f"cannot be read ({error.strerror or error})") from None


def _bare(lines: Iterable[bytes]) -> Iterator[bytes]:
    """Yield lines without their ends, and without the mark that some editors put before the first."""
    for number, line in enumerate(lines):
        yield (line.removeprefix(BOM) if number == 0 else line).rstrip(b"\r\n")
