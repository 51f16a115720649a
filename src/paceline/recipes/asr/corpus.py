"""Manifests opened for use: lines read and filtered, audio files looked at, texts brought to the labels.

What is wrong is found before training begins, all of it; it ends the run, or is left out and listed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from paceline.config.errors import PacelineError
from paceline.data.audio_check import check_all
from paceline.data.bad_line import BadLine, BadManifest, shown
from paceline.data.manifest import read_manifests
from paceline.data.manifest_columns import Manifest
from paceline.data.reading import Reading
from paceline.recipes.asr.network import NetworkSettings
from paceline.recipes.asr.settings import AsrSettings
from paceline.recipes.asr.text import EncodedTexts, Labels, TextReport, encode_all, required_frames

TRAINING = "train"
MOST_THREADS = 16
"""That look at audio files, on one rank."""


@dataclass(frozen=True)
class Part:
    """What a data set of the run is made of."""

    name: str
    paths: tuple[Path, ...]
    is_training: bool = False


@dataclass(frozen=True)
class Corpus:
    """A data set, ready to be read."""

    manifest: Manifest
    texts: EncodedTexts


class NamedTwice(PacelineError):
    """Two validation sets that would have one name."""

    hint = "name them yourself: `--val-manifest first=a/test.json,second=b/test.json`"

    def __init__(self, name: str) -> None:
        super().__init__(f"two validation sets are called {name!r}")


def name_sets(words: Sequence[str]) -> dict[str, Path]:
    """Validation sets by name: as `name=file.json` says, else by the file, with its folder where that is not enough."""
    named = [_name(word) for word in words]
    stems = [path.stem for name, path in named if name is None]
    sets: dict[str, Path] = {}
    for given, path in named:
        name = given or (path.stem if stems.count(path.stem) == 1 else f"{path.parent.name}-{path.stem}")
        if name in sets:
            raise NamedTwice(name)
        sets[name] = path
    return sets


def _name(word: str) -> tuple[str | None, Path]:
    match = re.fullmatch(r"([\w.-]+)=(.+)", word)
    return (None, Path(word)) if match is None or Path(word).exists() else (match[1], Path(match[2]))


def parts_of(settings: AsrSettings) -> list[Part]:
    """The data sets that a run with these settings uses."""
    parts = []
    if settings.mode in ("train", "train_eval"):
        parts.append(Part(TRAINING, settings.train_manifest, is_training=True))
    if settings.mode in ("eval", "train_eval"):
        parts += [Part(name, (path,)) for name, path in name_sets(settings.val_manifest).items()]
    return parts


class Opening:
    """Opens the data sets of a run. All ranks must do it together: each looks at its share of the audio."""

    def __init__(
        self,
        settings: AsrSettings,
        share: tuple[int, int],
        gather: Callable[[Any], list[Any]],
        say: Callable[[str], None],
    ) -> None:
        self._settings, self._share, self._gather, self._say = settings, share, gather, say
        self.bad: list[BadLine] = []
        """What was left out."""

    def open(self, parts: Sequence[Part]) -> dict[str, Corpus]:
        """By name. What is bad in any of them is reported together."""
        read: dict[str, tuple[Manifest, Reading]] = {}
        bad: list[BadLine] = []
        num_bad = 0
        for part in parts:
            try:
                read[part.name] = self._read(part)
            except BadManifest as error:
                bad += error.bad
                num_bad += error.total
                continue
            found = self._look(part, read[part.name][0])
            bad += found
            num_bad += len(found)
        if num_bad and self._settings.bad_data == "stop":
            raise BadManifest(bad, num_bad)
        self.bad += bad
        return {part.name: self._finish(part, *read[part.name], bad) for part in parts}

    def _read(self, part: Part) -> tuple[Manifest, Reading]:
        settings = self._settings
        limits: Mapping[str, Any] = {"min_seconds": 0.0}
        if part.is_training:
            limits = {
                "min_seconds": settings.min_seconds,
                "max_seconds": settings.max_seconds,
                "max_utterances": settings.max_utterances,
            }
        return read_manifests(part.paths, bad_data=settings.bad_data, **limits)

    def _look(self, part: Part, manifest: Manifest) -> list[BadLine]:
        """Lines of which the audio is at fault, seen by whichever rank, in their order."""
        if not self._settings.check_audio:
            return []
        rank, size = self._share
        threads = min(MOST_THREADS, 2 * len(os.sched_getaffinity(0)))
        mine = check_all(manifest, np.arange(rank, len(manifest), size), threads=threads)
        return sorted((line for lines in self._gather(mine) for line in lines), key=lambda line: line.row)

    def _finish(self, part: Part, manifest: Manifest, reading: Reading, bad: Sequence[BadLine]) -> Corpus:
        sources = set(part.paths)
        rows = [line.row for line in bad if line.row >= 0 and line.path in sources]
        self.bad += reading.bad
        for line in reading.lines():
            self._say(f"{part.name}: {line}" if not line.startswith(" ") else line)
        if rows:
            self._say(f"{part.name}: skipped {len(rows):,} with bad audio")
            for line in shown([line for line in bad if line.path in sources], len(rows)):
                self._say(line)
            is_good = np.ones(len(manifest), bool)
            is_good[rows] = False
            manifest = manifest.take(is_good)
            if not len(manifest):
                raise BadManifest([line for line in bad if line.path in sources], len(rows))
        texts, report = encode_all(_texts(manifest), Labels(self._settings.network.labels), self._settings.text_rules)
        for remark in remarks(report, manifest, texts, self._settings.network):
            self._say(f"{part.name}: {remark}")
        return Corpus(manifest, texts)


def _texts(manifest: Manifest) -> Any:
    return (manifest.text(row) for row in range(len(manifest)))


def remarks(report: TextReport, manifest: Manifest, texts: EncodedTexts, network: NetworkSettings) -> list[str]:
    """What a user should know of the transcripts."""
    found = [str(report)] if report.num_changed or report.dropped or report.num_empty else []
    samples = np.rint(manifest.durations * network.sample_rate).astype(np.int64)
    hop = round(network.features.stride_s * network.sample_rate)
    frames, where = np.unique(-(-samples // hop), return_inverse=True)
    outputs = np.array([network.output_length(int(number)) for number in frames])[where]
    num_short = int(np.count_nonzero(required_frames(texts) > outputs))
    if num_short:
        found.append(f"{num_short:,} too short for their transcripts add nothing to the loss")
    return found
