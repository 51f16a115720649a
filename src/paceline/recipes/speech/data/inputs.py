"""Inputs to transcribe: audio files, folders of them, manifests, all as one data set."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from paceline.config.problems import first_lines
from paceline.core.errors import NotFound, PacelineError
from paceline.data.packed.errors import is_packed
from paceline.data.strings import Strings
from paceline.recipes.speech.audio.check import check_all, in_threads, measure
from paceline.recipes.speech.audio.file import AudioFacts, AudioUnreadable, audio_below
from paceline.recipes.speech.data.utterances import Utterances
from paceline.recipes.speech.manifest.bad_line import MOST_SHOWN, BadManifest
from paceline.recipes.speech.manifest.columns import Manifest
from paceline.recipes.speech.manifest.read import read_manifests
from paceline.recipes.speech.text.labels import EncodedTexts

THREADS = 8
SKIP_HINT = "mend them, leave them out, or add `--bad-data skip`"
NOTHING_LEFT = "without them nothing is left: give audio files, folders of them, manifests, or `-` for live audio"


class InputsUnreadable(PacelineError):
    """Recordings that cannot be transcribed, all of them."""

    problems: Sequence[str]
    total: int
    advice: str
    sentence = "{total:#recording} cannot be used{lines}"
    hint = "{advice}"

    @property
    def lines(self) -> str:
        return "".join(f"\n{line}" for line in first_lines(self.problems, MOST_SHOWN, self.total))


@dataclass
class _Problems:
    """Problems of all inputs."""

    listed: list[str] = field(default_factory=list)
    total: int = 0

    def add(self, found: Iterable[object], total: int) -> None:
        self.listed += map(str, found)
        self.total += total


def open_inputs(
    words: Sequence[str],
    sample_rate: int,
    *,
    skip_bad: bool,
    check_audio: bool,
    say: Callable[[str], None],
    trim: bool = False,
) -> Utterances:
    """The recordings that the words mean, in their order, without transcripts."""
    problems = _Problems()
    named = [_named(word) for word in words]
    loose = list(dict.fromkeys(file for files in named if isinstance(files, list) for file in files))
    measured = measure_all(loose)
    bad = [found for found in measured.values() if isinstance(found, AudioUnreadable)]
    problems.add(bad, len(bad))
    parts = [
        _of_files(each, measured) if isinstance(each, list) else _of_manifest(each, check_audio, problems)
        for each in named
    ]
    parts = [part for part in parts if len(part)]
    if problems.total and (not skip_bad or not parts):
        raise InputsUnreadable(problems.listed, problems.total, SKIP_HINT if parts else NOTHING_LEFT)
    for problem in problems.listed:
        say(f"skipped {problem}")
    manifest = Manifest.concat(parts)
    nothing = EncodedTexts(np.zeros(0, np.uint8), np.zeros(len(manifest) + 1, np.int64))
    return Utterances(manifest, nothing, sample_rate, trim=trim, skip_bad=skip_bad)


def measure_all(files: Sequence[Path]) -> dict[Path, AudioFacts | AudioUnreadable]:
    """Return the length of each file, or why it cannot be read."""
    return dict(zip(files, in_threads(_measure, files, THREADS), strict=True))


def _named(word: str) -> Path | list[Path]:
    """A manifest, or the audio files that a word stands for."""
    path = Path(word)
    if path.name.lower().removesuffix(".gz").endswith((".json", ".jsonl", ".tar")) or is_packed(path):
        return path
    if not os.path.isdir(path):  # also where a name is too long to be one
        return [path]
    files = audio_below(path)
    if not files:
        raise NotFound(
            f"{word}: there is no audio in this folder",
            hint="give audio files, folders of them, manifests (.json, .jsonl), shards (.tar) or packed files (.h5)",
        )
    return files


def _of_manifest(path: Path, check_audio: bool, problems: _Problems) -> Manifest:
    try:
        manifest, reading = read_manifests([path], needs_text=False, min_seconds=0.0, bad_data="skip")
    except BadManifest as error:
        problems.add(error.bad, error.total)
        return _of_files([], {})
    problems.add(reading.bad, reading.num_bad)
    bad = check_all(manifest, np.arange(len(manifest)), threads=THREADS) if check_audio else []
    problems.add(bad, len(bad))
    is_good = np.ones(len(manifest), bool)
    is_good[[line.row for line in bad]] = False
    return manifest.take(is_good)


def _measure(path: Path) -> AudioFacts | AudioUnreadable:
    try:
        return measure(path)
    except AudioUnreadable as error:
        return error


def _of_files(files: Sequence[Path], measured: Mapping[Path, AudioFacts | AudioUnreadable]) -> Manifest:
    """Those that can be read."""
    facts = [(file, found) for file in files if isinstance(found := measured[file], AudioFacts)]
    number = len(facts)
    return Manifest(
        [Path("command line")],
        audio_names=Strings.pack(str(file).encode("utf-8", "surrogateescape") for file, _ in facts),
        texts=Strings.pack(b"" for _ in facts),
        durations=np.array([found.seconds for _, found in facts], np.float64),
        offsets=np.full(number, np.nan),
        source_numbers=np.zeros(number, np.int32),
        lines=np.arange(1, number + 1, dtype=np.int32),
    )
