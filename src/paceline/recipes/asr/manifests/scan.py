"""Manifests made from what is on disk: every audio file is opened and measured, what cannot be used is reported."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from paceline.config.problems import first_lines
from paceline.core.disk import CannotWrite
from paceline.core.errors import PacelineError
from paceline.core.json_text import json_text
from paceline.data.audio.check import in_threads, measure
from paceline.data.audio.file import AudioUnreadable
from paceline.data.manifest.bad_line import MOST_SHOWN
from paceline.data.manifest.line import AUDIO_KEYS, LineInvalid, line_of, parse_object, resolve
from paceline.data.manifest.read import read_lines
from paceline.recipes.asr.manifests.transcripts import TABLES, find_in_folder, find_in_table

_DIGITS = 6
"""A microsecond is less than a sample at any rate that speech has."""


class WouldOverwrite(PacelineError):
    """A file that exists is to be written."""

    hint = "`--force` replaces it, `--out` names another"

    def __init__(self, path: Path) -> None:
        super().__init__(f"{path} exists")
        self.path = path


class NothingFound(PacelineError):
    """There is no utterance to write."""

    hint = (
        "texts are found in a .txt beside each audio file, in transcripts.tsv, .csv or .txt (file, text), in "
        "LibriSpeech's *.trans.txt, and in a .tsv with the columns path and sentence"
    )

    def __init__(self, path: Path, report: list[str]) -> None:
        super().__init__("\n".join([f"{path}: there is nothing to make a manifest of", *report]))
        self.path = path


class Entry(NamedTuple):
    """A line to be, before its audio is measured."""

    audio: Path
    fields: dict[str, Any]
    """All of the line but audio and duration."""
    where: str = ""
    """The line that it comes from, if it is one of a manifest."""
    audio_key: str = AUDIO_KEYS[0]


@dataclass
class Sources:
    """What was found, before any audio is opened."""

    entries: list[Entry]
    left_out: dict[str, list[str]] = field(default_factory=dict)
    """Why -> what."""


@dataclass
class Scan:
    """What is written, and what is not."""

    lines: list[dict[str, Any]]
    left_out: dict[str, list[str]]

    @property
    def hours(self) -> float:
        return sum(float(line["duration"]) for line in self.lines) / 3600

    def report(self) -> list[str]:
        """What was left out, for a reader."""
        told = []
        for why, names in self.left_out.items():
            if names:
                told.append(f"{why}: {len(names):,}")
                told += first_lines(names, MOST_SHOWN)
        return told


def default_out(path: Path) -> Path:
    """Where the manifest of a folder, of a table, or of another manifest goes."""
    if path.is_dir():
        return path / "manifest.json"
    return path.with_suffix(".json" if path.suffix in TABLES else f".measured{path.suffix}")


def gather(path: Path, out: Path) -> Sources:
    """The utterances of a folder, a table or a manifest, for a manifest at `out`."""
    if not path.is_dir() and path.suffix not in TABLES:
        return _gather_lines(path, out)
    found = find_in_folder(path) if path.is_dir() else find_in_table(path)
    entries = [
        Entry(audio, {"text": said.text} | ({"speaker": said.speaker} if said.speaker else {}))
        for audio, said in found.transcripts.items()
    ]
    left_out = {
        "audio without a transcript": [str(audio) for audio in found.untranscribed],
        "transcripts without audio": found.unmatched,
        "transcripts that cannot be read": found.unreadable,
    }
    return Sources(entries, left_out)


def scan(sources: Sources, out: Path, *, threads: int, progress: Callable[[int], None] | None = None) -> Scan:
    """Measure all audio, several files at a time."""
    lines, broken = [], []
    for answer in in_threads(lambda entry: _line(entry, out), sources.entries, threads, progress):
        if isinstance(answer, str):
            broken.append(answer)
        else:
            lines.append(answer)
    return Scan(lines, {**sources.left_out, "audio that is broken": broken})


def write_lines(out: Path, lines: Iterable[bytes]) -> None:
    """Whole or not at all: what is at `out` is replaced when all is written."""
    aside = out.with_name(f".{out.name}.{os.getpid()}.writing")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with aside.open("wb") as file:
            file.writelines(lines)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, out)
    except OSError as error:
        raise CannotWrite(out, error) from error
    finally:
        with suppress(OSError):
            aside.unlink()


def as_line(entry: dict[str, Any]) -> bytes:
    return json_text(entry).encode() + b"\n"


def path_from(out: Path, audio: Path) -> str:
    """How a manifest at `out` names a file: relative to it where the file lies below, in full elsewhere."""
    folder, target = os.path.abspath(out.parent), os.path.abspath(audio)
    return os.path.relpath(target, folder) if os.path.commonpath([folder, target]) == folder else target


def _gather_lines(path: Path, out: Path) -> Sources:
    """The lines of a manifest; the durations are what is looked for, and may be missing or wrong."""
    entries, bad = [], []
    for number, raw in read_lines(path):
        where = f"{path}:{number}"
        try:
            fields = parse_object(raw)
            line_of({**fields, "duration": 1.0}, path.parent)
        except LineInvalid as invalid:
            bad.append(f"{where}: {invalid}")
            continue
        if fields.get("text_filepath") is not None:
            fields["text_filepath"] = path_from(out, resolve(path.parent, str(fields["text_filepath"])))
        key = next(key for key in AUDIO_KEYS if fields.get(key) is not None)
        entries.append(Entry(resolve(path.parent, fields[key]), fields, where, key))
    return Sources(entries, {"lines that cannot be read": bad})


def _line(entry: Entry, out: Path) -> dict[str, Any] | str:
    """The line with its length, or what is wrong with the audio."""
    prefix = f"{entry.where}: " if entry.where else ""
    try:
        seconds = measure(entry.audio).seconds
    except AudioUnreadable as unreadable:
        return f"{prefix}{unreadable}"
    offset, said = entry.fields.get("offset"), entry.fields.get("duration")
    if offset is not None:
        if offset >= seconds:
            return f'{prefix}"offset" is {offset:g}, but {entry.audio} lasts {seconds:.2f} s'
        seconds -= offset
        if isinstance(said, int | float) and not isinstance(said, bool) and 0 < said < seconds:
            seconds = said  # of a part of a file, only its line knows where it ends
    named = {entry.audio_key: path_from(out, entry.audio), "duration": round(seconds, _DIGITS)}
    rest = {key: value for key, value in entry.fields.items() if key not in named}
    return {**named, **rest}
