"""Samples of a WebDataset shard as lines of a manifest: audio, and its text from `.txt` or `.json`.

Files of one sample follow each other in the tar and differ in what comes behind the first dot of their name:
`0001.flac`, `0001.txt`, `0001.json`. Each shard is looked at once: lengths are measured and kept in the cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.core.cloud.file_copy import alone
from paceline.core.disk import CannotWrite, replacing
from paceline.core.json_text import json_text, parse_json
from paceline.core.paths import near
from paceline.recipes.speech.audio.check import measure
from paceline.recipes.speech.audio.file import SUFFIXES, AudioUnreadable
from paceline.recipes.speech.manifest.line import AUDIO_KEYS
from paceline.recipes.speech.shards.tar_index import Member, ShardUnreadable, cache_path, open_member, tar_index

TEXTS = ("txt", "text", "transcript")
_DIGITS = 6
"""A microsecond is less than a sample at any rate of speech."""
MOST_TEXT_BYTES = 1 << 20
_NOT_TAKEN = frozenset(
    (*AUDIO_KEYS, "duration", "offset", "shard_id", "text_filepath", "unusable", "supervisions", "recording", "type")
)
"""Keys of a sample's `.json` that mean something in a manifest: there they are about other files, or a cut."""


@dataclass
class Sample:
    """Files of one name."""

    key: str
    audio: list[str] = field(default_factory=list)
    others: dict[str, Member] = field(default_factory=dict)
    """By what follows the first dot."""


def shard_lines(path: Path) -> Path:
    """Return a file with a line for each sample of a shard, made when it is asked for the first time.

    Names of audio are paths from the shard's folder: `shard-0.tar/0001.flac`. A sample that cannot be used has a line
    that says why, under the key `unusable`.
    """
    index = tar_index(path)  # also finds what is wrong with it
    lines = cache_path(path, ".jsonl")
    if lines.is_file():
        return lines
    with alone(lines):
        if not lines.is_file():
            try:
                with replacing(lines, "wb") as file:
                    number = 0
                    for sample in group(index.rows()):
                        file.write(json_text(_line(path, sample)).encode() + b"\n")
                        number += 1
                    if not number:
                        advice = "a sample is audio and its text, such as 0001.flac and 0001.txt"
                        raise ShardUnreadable(path, "holds no samples", advice)
            except OSError as error:
                raise CannotWrite(lines, error) from error
    return lines


def group(members: Iterator[tuple[str, Member]]) -> Iterator[Sample]:
    """Yield samples: neighbours of one name, whatever their kind. Those without a dot belong to none."""
    sample: Sample | None = None
    for name, member in members:
        folder, slash, file = name.rpartition("/")
        stem, dot, kind = file.partition(".")
        if not stem or not dot:
            continue
        key = f"{folder}{slash}{stem}"
        if sample is None or sample.key != key:
            if sample is not None:
                yield sample
            sample = Sample(key)
        if f".{kind.rpartition('.')[2].lower()}" in SUFFIXES:
            sample.audio.append(name)
        else:
            sample.others[kind.lower()] = member
    if sample is not None:
        yield sample


def _line(path: Path, sample: Sample) -> dict[str, Any]:
    """Return the line of a sample, or one that says why there is none."""
    name = f"{path.name}/{sample.audio[0] if sample.audio else sample.key}"
    if len(sample.audio) != 1:
        what = f"{sample.key} has no audio"
        if sample.audio:
            what = f"{sample.key} has several audio files: {', '.join(sample.audio)}"
        return {"audio_filepath": name, "unusable": str(what)}
    try:
        about = _about(path, sample)
        return {
            "audio_filepath": name,
            "duration": round(measure(path / sample.audio[0]).seconds, _DIGITS),
            **about,
        }
    except AudioUnreadable as unreadable:
        if isinstance(unreadable.__cause__, OSError | ShardUnreadable):
            raise _not_now(path, unreadable.why) from unreadable.__cause__
        return {"audio_filepath": name, "unusable": f"{near(unreadable.path)}: {unreadable.why}"}
    except OSError as error:
        raise _not_now(path, f"cannot be read: {error.strerror}") from error
    except ValueError as error:
        return {"audio_filepath": name, "unusable": f"{sample.key}: {error}"}


def _not_now(path: Path, why: str) -> ShardUnreadable:
    """Return the error of a disk or a network: what it stops may be readable the next time, and is not kept."""
    return ShardUnreadable(path, why, "try again; if it happens again, copy it again from where it was made")


def _about(path: Path, sample: Sample) -> dict[str, Any]:
    """Return what the files beside the audio say; of the length, the audio itself is believed."""
    about: dict[str, Any] = {}
    if "json" in sample.others:
        found = parse_json(_read(path, sample.others["json"]))
        if not isinstance(found, dict):
            raise ValueError("its .json holds no object")
        about |= {key: value for key, value in found.items() if key not in _NOT_TAKEN}
    for kind in TEXTS:
        if kind in sample.others:
            about["text"] = _read(path, sample.others[kind]).strip()
    return about


def _read(path: Path, member: Member) -> str:
    if member.size > MOST_TEXT_BYTES:
        raise ValueError(f"a text of {member.size:,} bytes is too long to be one")
    with open_member(path, member) as file:
        return file.read().decode("utf-8-sig")
