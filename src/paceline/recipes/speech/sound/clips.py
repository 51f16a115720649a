"""Audio to mix into other audio: noise and impulse responses, from a folder or a manifest."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from paceline.config.problems import first_lines
from paceline.core.errors import NotFound, Unreadable
from paceline.core.units import counted
from paceline.data.packed.errors import is_packed
from paceline.recipes.speech.audio.file import SUFFIXES, audio_below
from paceline.recipes.speech.manifest.bad_line import MOST_SHOWN, BadLine, BadManifest, beginning
from paceline.recipes.speech.manifest.line import LineInvalid, audio_of, parse_object, resolve
from paceline.recipes.speech.manifest.read import read_lines


class Clip(NamedTuple):
    """A file, or a part of one."""

    path: Path
    offset_s: float
    seconds: float
    row: int | None = None
    """Of a packed file."""


@functools.lru_cache(maxsize=16)
def find_clips(source: Path) -> tuple[Clip, ...]:
    """Return every clip of a folder (and those in it) by name, of a manifest by line, or of a packed file by row.

    Each file's header is read once. Of a manifest's line, `offset` and `duration` may be left out, and other keys have
    no meaning here.
    """
    if is_packed(source):
        return tuple(_in_packed(source))
    from paceline.recipes.speech.audio.file import AudioUnreadable, probe

    clips, problems = [], []
    for path, offset_s, duration_s in _in_folder(source) if os.path.isdir(source) else _in_manifest(source):
        try:
            there_s = probe(path).seconds - offset_s
        except AudioUnreadable as unreadable:
            problems.append(str(unreadable))
            continue
        seconds = there_s if duration_s is None else min(duration_s, there_s)
        if seconds > 0:
            clips.append(Clip(path, offset_s, seconds))
        else:
            problems.append(f"{path}: has nothing at {offset_s:g} s")
    if problems:
        lines = "".join(f"\n{line}" for line in first_lines(problems, MOST_SHOWN))
        raise Unreadable(
            f"{source}: {counted(len(problems), 'file')} cannot be mixed in{lines}",
            hint=f"mend or remove them in {source}",
        )
    return tuple(clips)


def _in_packed(source: Path) -> Iterator[Clip]:
    from paceline.data.packed.reader import open_packed
    from paceline.recipes.speech.manifest.packed import no_audio

    packed = open_packed(source)
    audio, rate = packed.of_kind("audio"), packed.sample_rate
    if audio is None or rate is None:
        raise no_audio(source, packed)
    for row, length in enumerate(audio.lengths.tolist()):
        yield Clip(source, 0.0, length / rate, row)


def _in_folder(folder: Path) -> Iterator[tuple[Path, float, None]]:
    paths = audio_below(folder)
    if not paths:
        suffixes = ", ".join(sorted(SUFFIXES))
        raise NotFound(
            f"{folder}: holds no audio", hint=f"name a folder with files that end in {suffixes}, or a manifest of them"
        )
    return ((path, 0.0, None) for path in paths)


def _in_manifest(manifest: Path) -> Iterator[tuple[Path, float, float | None]]:
    found: list[tuple[Path, float, float | None]] = []
    bad = []
    for number, raw in read_lines(manifest):
        try:
            entry = parse_object(raw)
            path = resolve(manifest.parent, audio_of(entry))
            found.append((path, _seconds(entry, "offset") or 0.0, _seconds(entry, "duration")))
        except LineInvalid as invalid:
            bad.append(BadLine(manifest, number, invalid.why, beginning(raw)))
    if bad:
        raise BadManifest(bad)
    return iter(found)


def _seconds(entry: dict[str, Any], key: str) -> float | None:
    value = entry.get(key)
    if value is None:
        return None
    if type(value) not in (int, float) or not 0 <= value < float("inf"):
        raise LineInvalid(f'"{key}" is no number of seconds')
    return float(value)
