"""Manifests made from files on disk: every audio file is opened and measured; unusable ones are reported."""

from __future__ import annotations

import gzip
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from paceline.config.problems import first_lines
from paceline.core.disk import CannotWrite, replacing
from paceline.core.errors import AlreadyExists
from paceline.core.json_text import json_text
from paceline.recipes.speech.audio.check import in_threads, measure
from paceline.recipes.speech.audio.file import AudioUnreadable
from paceline.recipes.speech.manifest.bad_line import MOST_SHOWN
from paceline.recipes.speech.manifest.lhotse import is_cut, lines_of_cut
from paceline.recipes.speech.manifest.line import AUDIO_KEYS, LineInvalid, line_of, parse_object, resolve
from paceline.recipes.speech.manifest.read import read_lines
from paceline.recipes.speech.manifest.sources import Source, beside, sources_of
from paceline.recipes.speech.manifest.transcripts import TABLES, find_in_folder, find_in_table
from paceline.recipes.speech.shards.pattern import expand
from paceline.recipes.speech.shards.scan import shard_lines
from paceline.recipes.speech.shards.tar_index import SUFFIX

COMPRESSED = ".gz"
_DIGITS = 6
"""A microsecond is less than a sample at any rate of speech."""


class Entry(NamedTuple):
    """A line to write, before its audio is measured."""

    audio: Path
    fields: dict[str, Any]
    """All keys of the line but audio and duration."""
    where: str = ""
    """Place of the line that it comes from, if that is in a manifest."""
    audio_key: str = AUDIO_KEYS[0]


@dataclass
class Sources:
    """Utterances of a folder, table or manifest, before any audio is opened."""

    entries: list[Entry]
    left_out: dict[str, list[str]] = field(default_factory=dict)
    """Names by reason."""


@dataclass
class Scan:
    """Lines to write, and what was left out."""

    lines: list[dict[str, Any]]
    left_out: dict[str, list[str]]

    @property
    def hours(self) -> float:
        return sum(float(line["duration"]) for line in self.lines) / 3600

    def report(self) -> list[str]:
        """Return lines about what was left out."""
        report = []
        for why, names in self.left_out.items():
            if names:
                report.append(f"{why}: {len(names):,}")
                report += first_lines(names, MOST_SHOWN)
        return report


def default_out(path: Path) -> Path:
    """Return the default path of the manifest of a folder, of a table, or of another manifest."""
    if path.is_dir():
        return path / "manifest.json"
    if path.suffix == SUFFIX:
        source = sources_of([path])[0]
        if not source.are_samples:  # lines, and the shards that they are about
            return default_out(source.path)
        first = next(iter(expand(path).values()))
        return first.with_name("manifest.json" if first != path else f"{path.stem}.json")
    return path.with_suffix(".json") if path.suffix in TABLES else named_like(path, ".measured")


def named_like(path: Path, more: str) -> Path:
    """Return the path of a manifest made of another: its name, with more before its suffix (`train.measured.json.gz`);
    lines of a shard become JSON."""
    suffix = ".json" if path.suffix == SUFFIX else path.suffix
    stem = path.stem
    if suffix == COMPRESSED:
        inner = Path(stem)
        stem, suffix = inner.stem, inner.suffix + suffix
    return path.with_name(f"{stem}{more}{suffix}")


def gather(path: Path, out: Path) -> Sources:
    """Return the utterances of a folder, a table or a manifest, for a manifest at `out`."""
    if not path.is_dir() and path.suffix not in TABLES:
        return _gather_lines(path, out)
    corpus = find_in_folder(path) if path.is_dir() else find_in_table(path)
    entries = [
        Entry(audio, {"text": transcript.text} | ({"speaker": transcript.speaker} if transcript.speaker else {}))
        for audio, transcript in corpus.transcripts.items()
    ]
    left_out = {
        "audio without a transcript": [str(audio) for audio in corpus.untranscribed],
        "transcripts without audio": corpus.unmatched,
        "transcripts that cannot be read": corpus.unreadable,
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


def refuse_overwriting(paths: Sequence[Path], force: bool) -> None:
    """Raise `AlreadyExists` for a file that exists, unless it may be replaced."""
    for path in paths:
        try:
            exists = path.exists()
        except OSError as error:
            raise CannotWrite(path, error) from error
        if exists and not force:
            raise AlreadyExists(f"{path} exists", hint="`--force` replaces it, `--out` names another")


def write_lines(out: Path, lines: Iterable[bytes]) -> None:
    """Write lines, whole or not at all: a file at `out` is replaced when all is written; `.gz` is compressed."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with replacing(out, "wb") as file:
            if out.suffix == COMPRESSED:
                with gzip.GzipFile("", "wb", fileobj=file, mtime=0) as packed:
                    packed.writelines(lines)
            else:
                file.writelines(lines)
    except OSError as error:
        raise CannotWrite(out, error) from error


def as_line(entry: dict[str, Any]) -> bytes:
    return json_text(entry).encode() + b"\n"


def path_from(out: Path, audio: Path) -> str:
    """Return how a manifest at `out` names a file: relative if the file lies below its folder, else in full."""
    folder, target = os.path.abspath(out.parent), os.path.abspath(audio)
    return os.path.relpath(target, folder) if os.path.commonpath([folder, target]) == folder else target


def _gather_lines(path: Path, out: Path) -> Sources:
    """Return the lines of a manifest, of cuts or of shards; their durations are measured again, and may be missing or
    wrong."""
    entries: list[Entry] = []
    bad: list[str] = []
    samples: list[str] = []
    for source in sources_of([path]):
        if source.are_samples:
            _add_samples(source.path, entries, samples)
        else:
            _add_lines(source, out, entries, bad)
    return Sources(entries, {"lines that cannot be read": bad, "samples that cannot be used": samples})


def _add_lines(source: Source, out: Path, entries: list[Entry], bad: list[str]) -> None:
    path, shards = source.path, source.shards
    for number, raw in read_lines(path):
        where = f"{path}:{number}"
        try:
            fields = parse_object(raw)
            if shards is None and "shard_id" in fields:
                shards = beside(path)
            if is_cut(fields):
                lines = lines_of_cut(fields, path.parent)
            else:
                lines = [fields if shards is None else shards.locate(fields, path.parent, number)]
            for line in lines:
                line_of({**line, "duration": 1.0}, path.parent)
        except LineInvalid as invalid:
            bad.append(f"{where}: {invalid.why}")
            continue
        for line in lines:
            if line.get("text_filepath") is not None:
                line["text_filepath"] = path_from(out, resolve(path.parent, str(line["text_filepath"])))
            key = next(key for key in AUDIO_KEYS if line.get(key) is not None)
            audio = resolve(path.parent, line[key])
            if shards is not None:
                line.pop("shard_id", None)  # the path names the shard
            entries.append(Entry(audio, line, where, key))


def _add_samples(path: Path, entries: list[Entry], bad: list[str]) -> None:
    """Add the samples of a WebDataset shard; they have been measured, and are measured again like all audio."""
    for number, raw in read_lines(shard_lines(path)):
        fields = parse_object(raw)
        where = f"{path}:{number}"
        if "unusable" in fields or "text" not in fields:
            bad.append(f"{where}: {fields.get('unusable', 'there is no text beside the audio')}")
            continue
        entries.append(Entry(path.parent / fields["audio_filepath"], fields, where))


def _line(entry: Entry, out: Path) -> dict[str, Any] | str:
    """Return the line with its length, or what is wrong with the audio."""
    prefix = f"{entry.where}: " if entry.where else ""
    try:
        seconds = measure(entry.audio).seconds
    except AudioUnreadable as unreadable:
        return f"{prefix}{unreadable}"
    offset, written = entry.fields.get("offset"), entry.fields.get("duration")
    if offset is not None:
        if offset >= seconds:
            return f'{prefix}"offset" is {offset:g}, but {entry.audio} lasts {seconds:.2f} s'
        seconds -= offset
        if isinstance(written, int | float) and not isinstance(written, bool) and 0 < written < seconds:
            seconds = written  # of a part of a file, only its line knows where it ends
    named = {entry.audio_key: path_from(out, entry.audio), "duration": round(seconds, _DIGITS)}
    rest = {key: value for key, value in entry.fields.items() if key not in named}
    return {**named, **rest}
