"""Transcripts of the audio files in a folder, in the layouts that speech corpora come in.

`a.wav` beside `a.txt`; a table `transcripts.tsv`, `.csv` or `.txt` of files and texts; LibriSpeech's `*.trans.txt`;
tables like Common Voice's, whose first line names the columns `path` and `sentence`.
"""

from __future__ import annotations

import csv
import os
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from paceline.core.errors import Conflict, PacelineError
from paceline.core.units import counted
from paceline.recipes.speech.audio.file import SUFFIXES

TABLES = frozenset((".tsv", ".csv"))
_PLAIN_TABLES = frozenset(("transcripts.tsv", "transcripts.csv", "transcripts.txt"))
_LIBRISPEECH = ".trans.txt"
_LIBRISPEECH_ID = re.compile(r"(\d+)-\d+-\d+")
_CLIPS = ("", "clips", "wavs", "wav", "audio")
"""Folders beside a table that may hold the files it names."""
_FILE_COLUMNS = ("path", "audio_filepath", "file", "filename", "file_name", "audio")
_TEXT_COLUMNS = ("sentence", "text", "transcript", "transcription")
_SPEAKER_COLUMNS = ("client_id", "speaker", "speaker_id")


class NotATable(PacelineError):
    """A file that does not name audio and texts."""

    path: Path
    why: str
    sentence = "{path}: {why}"
    hint = (
        "name the columns in its first line, such as `path` and `sentence`, or put the file first and its text second"
    )


class Transcript(NamedTuple):
    """Text and speaker of an audio file."""

    text: str
    speaker: str | None = None


@dataclass
class Corpus:
    """Audio files and texts of a folder or a table."""

    transcripts: dict[Path, Transcript] = field(default_factory=dict)
    """By audio file, in the order of paths."""
    untranscribed: list[Path] = field(default_factory=list)
    """Audio without text."""
    unmatched: list[str] = field(default_factory=list)
    """Places of texts without audio, and the names of the missing files."""
    unreadable: list[str] = field(default_factory=list)
    """Places and reasons of texts that cannot be read."""


class _Row(NamedTuple):
    where: str
    name: str
    transcript: Transcript


class _Audio:
    """Index of the audio files below a folder, by path, by name and by name without suffix."""

    def __init__(self, paths: list[Path]) -> None:
        self.paths = paths
        self._known = set(paths)
        self._by_stem: dict[tuple[Path, str], list[Path]] = defaultdict(list)
        self._anywhere: dict[str, list[Path]] = defaultdict(list)
        for path in paths:
            self._by_stem[path.parent, path.stem].append(path)
            self._anywhere[path.name].append(path)
            self._anywhere[path.stem].append(path)

    def beside(self, folder: Path, stem: str) -> list[Path]:
        return self._by_stem.get((folder, stem), [])

    def named(self, folder: Path, name: str) -> list[Path]:
        """Return the files that a table in `folder` means by a name; the suffix may be left out."""
        for place in _CLIPS:
            path = Path(os.path.normpath(folder / place / name))
            if path in self._known:
                return [path]
            if matches := self.beside(path.parent, path.name):
                return matches
        matches = self._anywhere.get(Path(name).name, [])
        return matches if len(matches) == 1 else []


def find_in_folder(folder: Path) -> Corpus:
    """Return all audio files below a folder, with their texts."""
    files = list(_walk(folder))
    audio = _Audio([path for path in files if path.suffix.lower() in SUFFIXES])
    plain = [path for path in files if path.name in _PLAIN_TABLES]
    named = [path for path in files if path.suffix == ".tsv" and path not in plain and _columns(path) is not None]
    if len(named) > 1:
        names = ", ".join(table.name for table in named)
        raise Conflict(
            f"{folder} holds several tables of transcripts: {names}",
            hint=f"make a manifest of each: `paceline manifest scan {named[0]}`",
        )
    corpus = Corpus()
    for table in [*plain, *named]:
        _take(corpus, table.parent, _table_rows(table, corpus), audio)
    for path in files:
        if path.name.endswith(_LIBRISPEECH):
            _take(corpus, path.parent, _librispeech_rows(path), audio)
        elif path.suffix == ".txt" and path not in plain:
            _take_same_stem(corpus, path, audio)
    corpus.untranscribed = sorted(path for path in audio.paths if path not in corpus.transcripts)
    corpus.transcripts = dict(sorted(corpus.transcripts.items()))
    return corpus


def find_in_table(table: Path) -> Corpus:
    """Return the audio files that a table names, in its order; others are ignored."""
    audio = _Audio([path for path in _walk(table.parent) if path.suffix.lower() in SUFFIXES])
    corpus = Corpus()
    _take(corpus, table.parent, _table_rows(table, corpus), audio)
    return corpus


def _take_same_stem(corpus: Corpus, path: Path, audio: _Audio) -> None:
    matches = [match for match in audio.beside(path.parent, path.stem) if match not in corpus.transcripts]
    if not matches:
        return  # a note, a licence
    try:
        text = " ".join(" ".join(_lines(path)).split())
    except NotATable as unreadable:
        corpus.unreadable.append(str(unreadable))
        return
    corpus.transcripts |= {match: Transcript(text) for match in matches}


def _take(corpus: Corpus, folder: Path, rows: Iterator[_Row], audio: _Audio) -> None:
    for row in rows:
        matches = audio.named(folder, row.name)
        if not matches:
            corpus.unmatched.append(f"{row.where}: {row.name}")
        for match in matches:
            corpus.transcripts.setdefault(match, row.transcript)


def _walk(folder: Path) -> Iterator[Path]:
    """Yield all files below in the order of names; hidden ones are left out, links are followed once."""
    visited = set()
    for place, folders, names in os.walk(folder, followlinks=True):
        real = os.path.realpath(place)
        if real in visited:
            folders.clear()
            continue
        visited.add(real)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield from (Path(place, name) for name in sorted(names) if not name.startswith("."))


def _librispeech_rows(path: Path) -> Iterator[_Row]:
    """Yield the lines `1089-134686-0000 HE HOPED ...`; the corpus is all in capitals, which become small letters."""
    for number, line in enumerate(_lines(path), 1):
        name, _, text = line.strip().partition(" ")
        if name:
            speaker = _LIBRISPEECH_ID.fullmatch(name)
            yield _Row(f"{path}:{number}", name, Transcript(text.lower().strip(), speaker[1] if speaker else None))


def _table_rows(path: Path, corpus: Corpus) -> Iterator[_Row]:
    columns = _columns(path)
    file, text, speaker = columns or (0, 1, None)
    for number, cells in _cells(path):
        if columns is not None and number == 1:
            continue
        if len(cells) <= max(file, text):
            corpus.unreadable.append(f"{path}:{number}: has {counted(len(cells), 'column')}")
            continue
        # Without names of columns, all behind the first separator is text: commas in it may not be quoted.
        sentence = cells[text] if columns is not None else ("," if path.suffix == ".csv" else " ").join(cells[1:])
        name_of_speaker = cells[speaker].strip() if speaker is not None and len(cells) > speaker else ""
        if name := cells[file].strip():
            yield _Row(f"{path}:{number}", name, Transcript(" ".join(sentence.split()), name_of_speaker or None))


def _columns(path: Path) -> tuple[int, int, int | None] | None:
    """Return the columns of file, text and speaker, if the first line names them."""
    first = next(_cells(path), (0, []))[1]
    names = [cell.strip().lower() for cell in first]

    def place(accepted: tuple[str, ...]) -> int | None:
        return next((names.index(name) for name in accepted if name in names), None)

    file, text = place(_FILE_COLUMNS), place(_TEXT_COLUMNS)
    return (file, text, place(_SPEAKER_COLUMNS)) if file is not None and text is not None else None


def _cells(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Yield (line number, row), blank rows left out. Only .csv has quotes: sentences in a .tsv may begin with one."""
    if path.suffix == ".csv":
        reader = csv.reader(_lines(path))
        try:
            for cells in reader:
                if any(cells):
                    yield reader.line_num, cells
        except csv.Error as error:
            raise NotATable(path, f"line {reader.line_num}: {error}") from None
        return
    for number, line in enumerate(_lines(path), 1):
        if not line.strip():
            continue
        if path.suffix == ".tsv" or "\t" in line:
            yield number, line.split("\t")
        else:
            yield number, re.split(r"[,\s]", line.strip(), maxsplit=1)


def _lines(path: Path) -> Iterator[str]:
    try:
        with path.open(encoding="utf-8-sig") as file:
            yield from file
    except UnicodeDecodeError:
        raise NotATable(path, "is not UTF-8") from None
    except OSError as error:
        raise NotATable(path, f"cannot be read: {error.strerror}") from None
