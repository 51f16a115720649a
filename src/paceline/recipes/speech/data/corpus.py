"""Manifests opened for use: lines read and filtered, audio files looked at, texts brought to the labels.

What is wrong is found before training begins, all of it; it ends the run, or is left out and listed.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from paceline.config.mode import Purpose
from paceline.config.named_sets import name_sets
from paceline.config.problems import first_lines
from paceline.core.errors import InvalidData, PacelineError
from paceline.core.run_folder import RunFolder
from paceline.observe.bars import SideBar
from paceline.recipes.speech.audio.check import check_all
from paceline.recipes.speech.data.packing import check_packed
from paceline.recipes.speech.head import head_of
from paceline.recipes.speech.manifest.bad_line import BadLine, BadManifest, shown
from paceline.recipes.speech.manifest.columns import Manifest
from paceline.recipes.speech.manifest.read import Reading, read_manifests
from paceline.recipes.speech.network.config import NetworkSettings
from paceline.recipes.speech.settings import AsrSettings
from paceline.recipes.speech.sound.features import LogMel
from paceline.recipes.speech.sound.perturb import is_active
from paceline.recipes.speech.text.labels import (
    EncodedTexts,
    EncodingLabels,
    Labels,
    LabelsLackLetters,
    TextReport,
    encode_all,
    lost_letters,
)
from paceline.train.checkpoint.format import listed

TRAINING = "train"
BAD_DATA = "bad-data.txt"
"""In the run folder: the lines that `bad_data: skip` left out."""
MOST_THREADS = 16
"""That look at audio files, on one rank."""


@dataclass(frozen=True)
class Part:
    """Files and settings of one data set of the run."""

    name: str
    paths: tuple[Path, ...]
    is_training: bool = False


@dataclass(frozen=True)
class Corpus:
    """A data set, ready to be read."""

    manifest: Manifest
    texts: EncodedTexts


@dataclass(frozen=True)
class _Look:
    """A data set after a first look: what it holds, and what of it cannot be used."""

    manifest: Manifest | None
    """None where not one line can be used."""
    reading: Reading | None
    bad: Sequence[BadLine]
    """By file and line; of lines that are no utterances, those that reading lists."""
    num_bad: int


def parts_of(settings: AsrSettings, purpose: Purpose) -> list[Part]:
    """Return the data sets that are used for a purpose."""
    parts = []
    if purpose == "train":
        parts.append(Part(TRAINING, settings.train_manifest, is_training=True))
    if purpose != "train" or settings.validation:
        parts += [Part(name, paths) for name, paths in name_sets(settings.val_manifest).items()]
    return parts


@dataclass(frozen=True)
class BadLines:
    """Lines that a run leaves out."""

    listed: tuple[BadLine, ...] = ()
    """The first of them."""
    total: int = 0

    def and_also(self, lines: Iterable[BadLine]) -> BadLines:
        """Return these lines and those of `lines` that are not listed yet."""
        new = tuple(line for line in dict.fromkeys(lines) if line not in self.listed)
        return BadLines(self.listed + new, self.total + len(new))

    def write(self, folder: Path) -> None:
        """Write the list into the folder of a run."""
        text = "".join(f"{line}\n" for line in first_lines(self.listed, len(self.listed), self.total, margin=""))
        (folder / BAD_DATA).write_text(text, encoding="utf-8", errors="surrogateescape")


@dataclass(frozen=True)
class Corpora:
    """All data sets of a run."""

    by_part: Mapping[Part, Corpus]
    bad: BadLines
    """Lines of all data sets that were left out."""

    @property
    def training(self) -> Corpus:
        return next(corpus for part, corpus in self.by_part.items() if part.is_training)

    @property
    def validation(self) -> dict[str, Corpus]:
        """The other data sets by name."""
        return {part.name: corpus for part, corpus in self.by_part.items() if not part.is_training}


class Opening:
    """Opens the data sets of a run. All ranks must do it together: each looks at its share of the audio."""

    def __init__(
        self,
        settings: AsrSettings,
        share: tuple[int, int],
        gather: Callable[[Any], list[Any]],
        say: Callable[[str], None],
        find_labels: Callable[[Manifest | None], EncodingLabels],
    ) -> None:
        """`find_labels` returns what transcripts are written in, and may learn it from those of training."""
        self._settings, self._share, self._gather, self._say = settings, share, gather, say
        self._find_labels = find_labels

    def open(self, parts: Sequence[Part]) -> Corpora:
        """Return the data sets, ready to be read. Bad lines of all of them are reported together."""
        looks = {part: self._look(part) for part in parts}
        self._refuse_bad(looks.values())
        labels = self._find_labels(next((look.manifest for part, look in looks.items() if part.is_training), None))
        finished = {part: self._finish(part, look, labels) for part, look in looks.items()}
        self._check_labels({part: report for part, (_, report) in finished.items()}, labels)
        corpora = {part: corpus for part, (corpus, _) in finished.items()}
        bad = tuple(line for look in looks.values() for line in look.bad)
        return Corpora(corpora, BadLines(bad, sum(look.num_bad for look in looks.values())))

    def _refuse_bad(self, looks: Iterable[_Look]) -> None:
        """Raise `BadManifest` unless bad lines may be left out, and some good ones are left then."""
        is_stopped = self._settings.bad_data == "stop"
        refused = [look for look in looks if look.num_bad and (is_stopped or look.manifest is None)]
        if refused:
            bad = [line for look in refused for line in look.bad]
            is_all = any(look.manifest is None for look in refused)
            raise BadManifest(bad, sum(look.num_bad for look in refused), is_all=is_all)

    def _look(self, part: Part) -> _Look:
        settings = self._settings
        is_perturbed = part.is_training and is_active(settings)
        check_packed(part.paths, settings.network, is_perturbed=is_perturbed, is_training=part.is_training)
        limits: Mapping[str, Any] = {"min_seconds": 0.0}
        if part.is_training:
            limits = {
                "min_seconds": settings.min_seconds,
                "max_seconds": settings.max_seconds,
                "max_utterances": settings.max_utterances,
            }
        try:
            # Bad lines are only collected here: the audio of the others may have faults that belong beside them.
            manifest, reading = read_manifests(part.paths, bad_data="skip", **limits)
        except BadManifest as error:
            return _Look(None, None, error.bad, error.total)
        audio = self._check_audio(manifest)
        order = {path: number for number, path in enumerate(manifest.sources)}
        bad = sorted([*reading.bad, *audio], key=lambda line: (order[line.path], line.line))
        is_good = np.ones(len(manifest), bool)
        is_good[[line.row for line in audio]] = False
        kept = manifest.take(is_good) if audio else manifest
        return _Look(kept if len(kept) else None, reading, bad, reading.num_bad + len(audio))

    def _check_audio(self, manifest: Manifest) -> list[BadLine]:
        """Lines of which the audio is at fault, seen by whichever rank."""
        if not self._settings.check_audio:
            return []
        rank, size = self._share
        threads = min(MOST_THREADS, 2 * len(os.sched_getaffinity(0)))
        rows = np.arange(rank, len(manifest), size)
        with SideBar("audio files") if rank == 0 else nullcontext() as bar:
            progress = None if bar is None else partial(bar.show, total=len(rows))
            mine = check_all(manifest, rows, threads=threads, progress=progress)
        return [line for lines in self._gather(mine) for line in lines]

    def _finish(self, part: Part, look: _Look, labels: EncodingLabels) -> tuple[Corpus, TextReport]:
        manifest, reading = look.manifest, look.reading
        assert manifest is not None
        assert reading is not None
        for line in reading.lines():
            self._say(f"{part.name}: {line}" if not line.startswith(" ") else line)
        audio = [line for line in look.bad if line.row >= 0]
        if audio:
            self._say(f"{part.name}: skipped {len(audio):,} with bad audio")
            for line in shown(audio, len(audio)):
                self._say(line)
        network = self._settings.network
        texts, report = encode_all(texts_of(manifest), labels, self._settings.text_rules)
        if report.num_changed or report.dropped or report.num_empty:
            self._say(f"{part.name}: {report}")
        num_short = too_short(manifest, texts, network)
        if num_short:
            self._say(f"{part.name}: {num_short:,} too short for their transcripts add nothing to the loss")
        if part.is_training and num_short > self._settings.max_too_short * len(manifest):
            self._refuse_new(_too_long(num_short / len(manifest), network, are_characters=isinstance(labels, Labels)))
        return Corpus(manifest, texts), report

    def _check_labels(self, reports: Mapping[Part, TextReport], labels: EncodingLabels) -> None:
        """Refuse transcripts that the labels cannot write."""
        settings = self._settings
        names = [part.name for part, report in reports.items() if report.lost_share > settings.max_lost_words]
        if not names:
            return
        together = TextReport()
        for part, report in reports.items():
            if part.name in names:
                together.add(report)
        is_training = any(part.is_training for part in reports)
        is_learned = settings.vocabulary is not None
        training = [report for part, report in reports.items() if part.is_training]
        refused = LabelsLackLetters(
            ", ".join(names),
            together,
            labels.letters,
            settings.text_rules,
            is_training,
            is_given=settings.tokenizer is not None,
            learned_from=Labels(settings.network.labels) if is_learned else None,
            taught=frozenset(character for report in training for character in lost_letters(report)),
        )
        self._refuse_new(refused)

    def _refuse_new(self, refused: PacelineError) -> None:
        """Raise, or say it of a run that goes on: it has been trained on this data already."""
        settings = self._settings
        goes_on = settings.resume != "no" and settings.out is not None and listed(RunFolder(settings.out).checkpoints)
        if not goes_on:
            raise refused
        self._say(f"{refused}\n  {refused.hint}")


def _too_long(share: float, network: NetworkSettings, *, are_characters: bool) -> InvalidData:
    """Return the error for transcripts that CTC cannot learn: it writes one label per frame at most."""
    frames = 100_000
    frame_ms = 1000 * network.features.stride_s * frames / network.output_length(frames)
    advice = (
        "write subwords, which are fewer: `--vocabulary 128`"
        if are_characters
        else "write longer subwords (a larger `--vocabulary`), or take a network that keeps more frames"
    )
    accepted = min(1.0, math.ceil(100 * share + 1) / 100)
    return InvalidData(
        f"train: {share:.1%} of the utterances have fewer frames than their transcripts have labels, and would add "
        f"nothing: the network has a frame per {frame_ms:.0f} ms at its output",
        hint=f"{advice}; `--max-too-short {accepted:g}` continues with the others",
    )


def texts_of(manifest: Manifest) -> Iterator[str]:
    """Yield the transcripts, as they are."""
    return (manifest.text(row) for row in range(len(manifest)))


def too_short(manifest: Manifest, texts: EncodedTexts, network: NetworkSettings) -> int:
    """Return the number of utterances with fewer frames at the network's output than their texts need."""
    samples = np.rint(manifest.durations * network.sample_rate).astype(np.int64)
    num_frames = LogMel(network.features, network.sample_rate).frame_rule
    frames, where = np.unique(num_frames(samples), return_inverse=True)
    outputs = np.array([network.output_length(int(number)) for number in frames])[where]
    return int(np.count_nonzero(head_of(network).required_frames(texts) > outputs))
