"""Data sets of a run, opened for use: read, encoded and filtered; what is wrong or dropped is said."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline.config.named_sets import NamedTwice, name_sets
from paceline.core.errors import InvalidData
from paceline.core.units import counted
from paceline.recipes.translation.data.pairs import Encoded, Lines, Pairs
from paceline.recipes.translation.settings import TranslationSettings
from paceline.recipes.translation.text.parallel import ParallelText, TextFiles, read_parallel
from paceline.recipes.translation.text.vocabulary import Vocabulary

TRAINING = "train"


@dataclass(frozen=True)
class Limits:
    """Lengths of training pairs, in tokens without marks."""

    min_tokens: int = 1
    max_tokens: int | None = None
    max_ratio: float | None = None
    max_pairs: int | None = None

    @classmethod
    def of(cls, settings: TranslationSettings) -> Limits:
        return cls(settings.min_tokens, settings.max_tokens, settings.max_ratio, settings.max_pairs)

    def keep(self, source: NDArray[np.int64], target: NDArray[np.int64]) -> tuple[NDArray[np.int64], dict[str, int]]:
        """Return the rows that stay, and how many were dropped for which reason; a pair is dropped for one."""
        shorter, longer = np.minimum(source, target), np.maximum(source, target)
        reasons = {f"shorter than {counted(self.min_tokens, 'token')}": shorter < self.min_tokens}
        if self.max_tokens is not None:
            reasons[f"longer than {counted(self.max_tokens, 'token')}"] = longer > self.max_tokens
        if self.max_ratio is not None:
            reasons[f"of lengths in a ratio above {self.max_ratio:g}"] = longer > self.max_ratio * shorter
        is_kept = np.ones(len(source), bool)
        dropped: dict[str, int] = {}
        for reason, is_wrong in reasons.items():
            number = int(np.count_nonzero(is_kept & is_wrong))
            if number:
                dropped[reason] = number
            is_kept &= ~is_wrong
        rows = np.flatnonzero(is_kept)
        if self.max_pairs is not None and len(rows) > self.max_pairs:
            dropped[f"behind the first {self.max_pairs:,}"] = len(rows) - self.max_pairs
            rows = rows[: self.max_pairs]
        return rows, dropped


def train_files(settings: TranslationSettings) -> TextFiles:
    return TextFiles(
        TRAINING,
        settings.train_source,
        settings.train_target,
        settings.train_pairs,
        (settings.source_lang, settings.target_lang),
        settings.reverse,
    )


def val_files(settings: TranslationSettings) -> list[TextFiles]:
    """Return the files of each validation set."""
    languages = settings.source_lang, settings.target_lang
    named = [
        TextFiles(name, paths, (target,), (), languages)
        for (name, paths), target in zip(name_sets(settings.val_source).items(), settings.val_target, strict=True)
    ]
    named += [
        TextFiles(name, (), (), paths, languages, settings.reverse)
        for name, paths in name_sets(settings.val_pairs).items()
    ]
    names = [files.name for files in named]
    for name in names:
        if names.count(name) > 1:
            raise NamedTwice(name)
    return named


class Corpus:
    """Reads the data sets of a run with one vocabulary."""

    def __init__(self, settings: TranslationSettings, say: Callable[[str], None]) -> None:
        self._settings, self._say = settings, say
        self._train: ParallelText | None = None

    def train_text(self) -> ParallelText:
        """Return what is trained on as it was read; once."""
        if self._train is None:
            self._train = self._read(train_files(self._settings))
        return self._train

    def train(self, vocabulary: Vocabulary) -> Pairs:
        """Return training pairs within the limits."""
        text, settings = self.train_text(), self._settings
        source, target = _encode(vocabulary, text)
        rows, dropped = Limits.of(settings).keep(source.lengths, target.lengths)
        said = ", ".join(f"{number:,} {reason}" for reason, number in dropped.items())
        if not len(rows):
            raise InvalidData(
                f"no training pair is left: dropped {said}",
                hint="raise `--max-tokens`, `--max-ratio`, or lower `--min-tokens`",
            )
        if dropped:
            self._say(f"{TRAINING}: {len(rows):,} of {counted(len(text), 'pair')}; dropped {said}")
            source, target = source.take(rows), target.take(rows)
        self._train = None
        return Pairs(source, target, multiple=settings.pad_multiple)

    def texts(self) -> dict[str, ParallelText]:
        """Return all data sets by name as they were read, for packing."""
        return {TRAINING: self.train_text(), **{files.name: self._read(files) for files in val_files(self._settings)}}

    def val(self, vocabulary: Vocabulary) -> dict[str, Pairs]:
        """Return validation sets by name, all of their lines."""
        sets = {}
        for files in val_files(self._settings):
            text = self._read(files)
            sets[files.name] = Pairs(*_encode(vocabulary, text), text.source, text.target)
        return sets

    def _read(self, files: TextFiles) -> ParallelText:
        text = read_parallel(files, skip_bad=self._settings.bad_data == "skip")
        if text.num_bad:
            self._say(f"{files.name}: left out {counted(text.num_bad, 'bad line')}")
            for bad in text.bad:
                self._say(f"  {bad}")
        return text


def as_lines(vocabulary: Vocabulary, texts: list[str]) -> Lines:
    """Return sentences as a data set to predict."""
    source = Encoded.pack(vocabulary.encode(texts))
    nothing = Encoded.pack([[]] * len(texts))
    return Lines(source, nothing)


def _encode(vocabulary: Vocabulary, text: ParallelText) -> tuple[Encoded, Encoded]:
    source, target = (
        Encoded.pack(vocabulary.encode(side[row] for row in range(len(side)))) for side in (text.source, text.target)
    )
    return source, target
