"""NeMo's manifests: one JSON object per line, one or several files read into one data set.

Packed files (`.h5`), WebDataset shards (`.tar`) and Lhotse's cuts are read beside them, each row, sample or supervision
as a line.

A line names `audio_filepath` (or `audio_filename`), `duration` in seconds, `text` (or `text_filepath`) and, for a part
of a longer file, `offset`; paths are relative to the manifest's folder, other keys are ignored.
"""

from __future__ import annotations

import dataclasses
import difflib
import gzip
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from paceline.core.errors import PacelineError
from paceline.core.paths import near
from paceline.core.units import counted, duration
from paceline.data.packed.errors import is_packed
from paceline.data.strings import Strings
from paceline.recipes.speech.manifest.bad_line import MOST_SHOWN, BadLine, BadManifest, beginning, shown
from paceline.recipes.speech.manifest.columns import Manifest
from paceline.recipes.speech.manifest.lhotse import is_cut, lines_of_cut
from paceline.recipes.speech.manifest.line import BOM, Line, LineInvalid, line_of, parse_object
from paceline.recipes.speech.manifest.packed import read_packed
from paceline.recipes.speech.manifest.sources import Shards, Source, beside, sources_of

__all__ = ["BadData", "BadLine", "BadManifest", "Manifest", "NotAManifest", "NothingKept", "Reading", "read_manifests"]

BadData = Literal["stop", "skip"]
"""Reaction to data that cannot be used."""
MOST_LISTED = 1000
"""Skipped lines that are listed with their place; the others are only counted."""
_LINES_AT_ONCE = 1 << 16


class Amount(NamedTuple):
    """Number of utterances and their total length."""

    number: int = 0
    hours: float = 0.0

    def __str__(self) -> str:
        return f"{self.number:,} ({self.length})"

    @property
    def length(self) -> str:
        return duration(3600 * self.hours)


@dataclass(frozen=True)
class FileReading:
    """Outcome of reading one file: its lines by what became of them."""

    path: Path
    kept: Amount
    too_short: Amount
    too_long: Amount
    num_bad: int

    @property
    def num_lines(self) -> int:
        return self.kept.number + self.too_short.number + self.too_long.number + self.num_bad


@dataclass(frozen=True)
class Reading:
    """Outcome of reading a data set, file by file: utterances kept, dropped and skipped, and their hours."""

    files: tuple[FileReading, ...]
    bad: tuple[BadLine, ...]
    """Lines that were skipped, up to `MOST_LISTED`; `num_bad` counts all."""
    min_seconds: float
    max_seconds: float | None

    @property
    def kept(self) -> Amount:
        return _sum(file.kept for file in self.files)

    @property
    def too_short(self) -> Amount:
        return _sum(file.too_short for file in self.files)

    @property
    def too_long(self) -> Amount:
        return _sum(file.too_long for file in self.files)

    @property
    def num_bad(self) -> int:
        return sum(file.num_bad for file in self.files)

    def lines(self) -> list[str]:
        """Return the summary that is shown when a run starts."""
        summary = [self._words(self.kept, self.too_short, self.too_long, self.num_bad)]
        if len(self.files) > 1:
            summary += [
                f"  {near(file.path)}: {self._words(file.kept, file.too_short, file.too_long, file.num_bad)}"
                for file in self.files
            ]
        return summary + shown(self.bad, self.num_bad)

    def _words(self, kept: Amount, too_short: Amount, too_long: Amount, num_bad: int) -> str:
        parts = [f"{counted(kept.number, 'utterance')}, {kept.length}"]
        if too_short.number:
            parts.append(f"dropped {too_short} shorter than {self.min_seconds:g} s")
        if too_long.number:
            parts.append(f"dropped {too_long} longer than {self.max_seconds:g} s")
        if num_bad:
            parts.append(f"skipped {counted(num_bad, 'bad line')}")
        return ", ".join(parts)


class NotAManifest(PacelineError):
    """A path that holds no JSON lines."""

    path: Path | str
    what: str
    advice: str = ""
    sentence = "{place}: {what}"
    hint = "{advice}"

    @property
    def place(self) -> str:
        return near(self.path)


class NothingKept(PacelineError):
    """Every utterance is too short or too long."""

    reading: Reading
    sentence = "{files}: nothing is left: {summary}"
    hint = "set other limits; `paceline manifest stats FILE` shows how long the utterances are"

    @property
    def files(self) -> str:
        return ", ".join(near(file.path) for file in self.reading.files)

    @property
    def summary(self) -> str:
        return self.reading.lines()[0]


def read_manifests(
    spec: str | Sequence[Path | str],
    *,
    min_seconds: float = 0.1,
    max_seconds: float | None = None,
    max_utterances: int | None = None,
    bad_data: BadData = "stop",
    needs_text: bool = True,
) -> tuple[Manifest, Reading]:
    """Read one data set from one or several files, which a string names with commas between.

    Utterances outside the limits are dropped, never trimmed; `max_utterances` keeps the first ones, and what follows
    is not read. A line that cannot be used stops everything, with all such lines in one error, or is skipped. Without
    `needs_text` a line may do without a transcript, and none is read from a file.
    """
    sources = _sources(spec)
    paths = [source.path for source in sources]
    for path in paths:
        if not is_packed(path):
            _require_file(path)
    reader = _Reader(sources, min_seconds, max_seconds, max_utterances, needs_text)
    files = []
    for number in range(len(paths)):
        files.append(reader.read(number))
        if reader.is_full:
            break
    else:
        reader.check_shards()
    reading = Reading(tuple(files), tuple(reader.bad), min_seconds, max_seconds)
    are_all_bad = reading.num_bad == sum(file.num_lines for file in files)
    if reading.num_bad and (bad_data == "stop" or are_all_bad):
        raise BadManifest(reading.bad, reading.num_bad, is_all=are_all_bad)
    if not reading.kept.number:
        raise NothingKept(reading)
    return reader.columns.finish(paths), reading


def manifest_paths(spec: str | Sequence[Path | str]) -> list[Path]:
    """Return the files that a string names, with commas between."""
    return [source.path for source in _sources(spec)]


def _sources(spec: str | Sequence[Path | str]) -> list[Source]:
    names = [name.strip() for name in spec.split(",")] if isinstance(spec, str) else spec
    sources = sources_of([name for name in names if str(name)])
    if not sources:
        raise NotAManifest(repr(spec), "names no manifest", "give one file, or several with commas between")
    return sources


def read_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the lines that are not blank, with their numbers from 1, without a byte order mark."""
    _require_file(path)
    is_empty = True
    try:
        with open_lines(path) as file:
            for number, raw in enumerate(file, 1):
                if number == 1:
                    _refuse_other_formats(path, raw)
                    raw = raw.removeprefix(BOM)
                if raw.isspace() or not raw:
                    continue
                if is_empty:
                    _refuse_array(path, raw)
                    is_empty = False
                yield number, raw
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        hint = f"copy it again from where it was made, or see what is left: `gunzip {near(path)}`"
        raise NotAManifest(path, f"is compressed, and damaged: {error}", hint) from None
    except OSError as error:
        raise NotAManifest(path, f"cannot be read: {error.strerror}") from None
    if is_empty:
        raise NotAManifest(
            path,
            "is empty",
            "it must hold one JSON object per line; `paceline manifest scan FOLDER` makes one",
        )


def open_lines(path: Path) -> IO[bytes]:
    """Open a file of lines; one that ends in .gz is unpacked while it is read."""
    if path.suffix == ".gz":
        return cast("IO[bytes]", gzip.open(path, "rb"))
    return path.open("rb", buffering=1 << 20)


class _Columns:
    """Lines that become columns: only the newest of them are Python objects."""

    def __init__(self) -> None:
        self._lines: list[Line] = []
        self._numbers: list[int] = []
        self._parts: list[Manifest] = []

    def add(self, line: Line, number: int, source: int) -> None:
        self._lines.append(line)
        self._numbers.append(number)
        if len(self._lines) == _LINES_AT_ONCE:
            self.flush(source)

    def flush(self, source: int) -> None:
        """Turn the lines that wait, all of one file, into arrays."""
        audio, seconds, texts, offsets = zip(*self._lines, strict=True) if self._lines else ((), (), (), ())
        part = Manifest(
            (),
            audio_names=Strings.pack(audio),
            texts=Strings.pack(texts),
            durations=np.array(seconds, dtype=np.float64),
            offsets=np.array(offsets, dtype=np.float64),
            source_numbers=np.full(len(audio), source, dtype=np.int32),
            lines=np.array(self._numbers, dtype=np.int32),
        )
        self._parts.append(part)
        self._lines, self._numbers = [], []

    def append(self, part: Manifest) -> None:
        """Add rows that are columns already."""
        self._parts.append(part)

    def finish(self, sources: Sequence[Path]) -> Manifest:
        whole = Manifest.concat(self._parts)  # parts without sources: their numbers are not shifted
        return dataclasses.replace(whole, sources=sources)


class _Reader:
    """Reads file after file: valid lines go into columns, the others are counted."""

    def __init__(
        self,
        sources: Sequence[Source],
        min_seconds: float,
        max_seconds: float | None,
        max_utterances: int | None,
        needs_text: bool,
    ) -> None:
        self._sources, self._needs_text = sources, needs_text
        self._paths = [source.path for source in sources]
        self._beside: dict[Path, Shards] = {}
        """Of manifests with lines about shards that nobody named."""
        self._shortest = min_seconds
        self._longest = float("inf") if max_seconds is None else max_seconds
        self._most = float("inf") if max_utterances is None else max_utterances
        self._number = 0
        self.columns = _Columns()
        self.bad: list[BadLine] = []

    @property
    def is_full(self) -> bool:
        return self._number >= self._most

    def read(self, source: int) -> FileReading:
        """Read one file, up to the number of utterances that are wanted."""
        path, before = self._paths[source], self._number
        if is_packed(path):
            return self._read_packed(source)
        short, long, num_bad = 0, 0, 0
        kept_s, short_s, long_s = 0.0, 0.0, 0.0
        for number, raw in read_lines(self._lines_of(source)):
            try:
                lines = self._parse(source, number, raw)
            except LineInvalid as invalid:
                num_bad += 1
                self._note_bad(path, number, invalid.why, raw)
                continue
            for line in lines:
                if line.seconds < self._shortest:
                    short, short_s = short + 1, short_s + line.seconds
                elif line.seconds > self._longest:
                    long, long_s = long + 1, long_s + line.seconds
                elif self._number < self._most:
                    self._number, kept_s = self._number + 1, kept_s + line.seconds
                    self.columns.add(line, number, source)
            if self._number >= self._most:
                break
        self.columns.flush(source)
        return FileReading(
            path,
            kept=Amount(self._number - before, kept_s / 3600),
            too_short=Amount(short, short_s / 3600),
            too_long=Amount(long, long_s / 3600),
            num_bad=num_bad,
        )

    def check_shards(self) -> None:
        """Refuse patterns that name more shards than all lines are about."""
        for shards in {id(source.shards): source.shards for source in self._sources}.values():
            if shards is not None:
                shards.check_all_used([source.path for source in self._sources if source.shards is shards])

    def _lines_of(self, source: int) -> Path:
        if not self._sources[source].are_samples:
            return self._paths[source]
        from paceline.recipes.speech.shards.scan import shard_lines  # needs soundfile

        return shard_lines(self._paths[source])

    def _parse(self, source: int, number: int, raw: bytes) -> list[Line]:
        """Return the utterances of a line: one, or those of a cut."""
        entry, path = parse_object(raw), self._paths[source]
        if self._sources[source].are_samples:  # written by us: the path is that of the member
            if "unusable" in entry:
                raise LineInvalid(str(entry["unusable"]))
            return [line_of(entry, path.parent, self._needs_text)]
        if "supervisions" in entry or "recording" in entry:
            return [line_of(each, path.parent, self._needs_text) for each in _utterances(entry, path.parent)]
        shards = self._sources[source].shards
        if shards is None and "shard_id" in entry:
            shards = self._beside.setdefault(path, beside(path))
        if shards is not None:
            entry = shards.locate(entry, path.parent, number)
        return [line_of(entry, path.parent, self._needs_text)]

    def _read_packed(self, source: int) -> FileReading:
        whole = read_packed(self._paths[source], source=source, needs_text=self._needs_text)
        is_short, is_long = whole.durations < self._shortest, whole.durations > self._longest
        rows = np.flatnonzero(~is_short & ~is_long)
        if len(rows) >= self._most - self._number:  # what follows is not read
            rows = rows[: int(self._most - self._number)]
            is_short, is_long = is_short[: rows[-1] + 1], is_long[: rows[-1] + 1]
        part = whole if len(rows) == len(whole) else whole.take(rows)
        self._number += len(rows)
        self.columns.append(part)
        short, long = (whole.durations[: len(mask)][mask] for mask in (is_short, is_long))
        return FileReading(
            self._paths[source],
            kept=_amount(part.durations),
            too_short=_amount(short),
            too_long=_amount(long),
            num_bad=0,
        )

    def _note_bad(self, path: Path, number: int, what: str, raw: bytes) -> None:
        if len(self.bad) < MOST_LISTED:
            text = beginning(raw) if len(self.bad) < MOST_SHOWN else ""
            self.bad.append(BadLine(path, number, what, text))


def _utterances(entry: dict[str, Any], folder: Path) -> list[dict[str, Any]]:
    return lines_of_cut(entry, folder) if is_cut(entry) else [entry]


def _amount(seconds: NDArray[np.float64]) -> Amount:
    return Amount(len(seconds), float(seconds.sum()) / 3600)


def _require_file(path: Path) -> None:
    try:
        _refuse_other_things(path)
    except OSError as error:  # a name too long, a folder that may not be looked into
        raise NotAManifest(path, f"cannot be read: {error.strerror}") from None


def _refuse_other_things(path: Path) -> None:
    if is_packed(path):
        hint = "give the JSON-lines manifest it was made from"
        raise NotAManifest(path, "is HDF5, not JSON lines", hint)
    if path.is_dir():
        hint = f"name a file in it, or make one with `paceline manifest scan {near(path)}`"
        raise NotAManifest(path, "is a folder, not a manifest", hint)
    if not path.exists():
        names = [other.name for other in path.parent.iterdir()] if path.parent.is_dir() else []
        nearest = [near(path.with_name(name)) for name in difflib.get_close_matches(path.name, names, n=1)]
        scan = "check the path; `paceline manifest scan FOLDER` makes a manifest of a folder of audio"
        hint = f"did you mean {nearest[0]}?" if nearest else scan
        raise NotAManifest(path, "there is no such file", hint)


def _refuse_other_formats(path: Path, raw: bytes) -> None:
    """Refuse files by how they begin: they would be one bad line after the other."""
    if raw.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise NotAManifest(path, "is UTF-16", "save it as UTF-8")
    if raw.startswith(b"\x1f\x8b"):
        hint = f"let its name end in .gz, or unpack it: `gunzip {near(path)}`"
        raise NotAManifest(path, "is compressed", hint)
    if raw.startswith(b"\x89HDF"):
        hint = "packed data is known by its name: let it end in .h5"
        raise NotAManifest(path, "is HDF5, not JSON lines", hint)


def _refuse_array(path: Path, raw: bytes) -> None:
    begin = raw.strip()[:200]
    if begin.startswith(b"[") and begin[1:].lstrip()[:1] in (b"", b"{"):
        python = "import json,sys; [print(json.dumps(x)) for x in json.load(sys.stdin)]"
        line = f"python -c '{python}' < {near(path)} > lines.json"
        hint = f"write one object per line: `{line}`"
        raise NotAManifest(path, "is one JSON array, not one JSON object per line", hint)


def _sum(amounts: Iterable[Amount]) -> Amount:
    listed = list(amounts)
    return Amount(sum(amount.number for amount in listed), sum(amount.hours for amount in listed))
