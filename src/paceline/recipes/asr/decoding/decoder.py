"""Beam decoding of a network's output to words: with a language model, hot words and times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Final, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.core.cloud.address import local_path
from paceline.core.cloud.file_copy import bring
from paceline.core.errors import PacelineError
from paceline.core.language import phrase
from paceline.recipes.asr.decoding.arpa import NoLanguageModel, read_arpa
from paceline.recipes.asr.decoding.kenlm_file import KenlmModel, is_kenlm
from paceline.recipes.asr.decoding.limits import Found, Limits, Weights
from paceline.recipes.asr.decoding.native import NativeSearch, why_not
from paceline.recipes.asr.decoding.ngram import END, START, UNKNOWN, LanguageModel
from paceline.recipes.asr.decoding.search import TensorSearch
from paceline.recipes.asr.decoding.words import Alphabet, word_table
from paceline.recipes.asr.text.pieces import WORD_START, Pieces

LEAST_SPELLED: Final = 0.1
"""Share of a language model's words that labels must be able to write."""


class WordsUnspelled(PacelineError):
    """A language model of words that the labels cannot write: in capitals, or of another language."""

    where: str
    share: float
    example: str
    labels: str
    sentence = "the labels can write {percent} of the words of {where}: not {example!r}, with the labels {labels}"
    hint = "{advice}"

    @property
    def percent(self) -> str:
        return f"{self.share:.1%}" if self.share else "none"

    @property
    def advice(self) -> str:
        return "make a model of text as the labels have it: `paceline lm train.json lm.arpa` takes the transcripts of a run's data"


class HotwordUnspelled(PacelineError):
    """A hot word that the labels cannot write."""

    word: str
    characters: str
    sentence = "the hot word {word!r} has characters that no label writes: {characters}"
    hint = "spell it as transcripts do: in their case, numbers as words"


class WrongBeam(PacelineError):
    """Numbers with which nothing can be searched."""

    name: str
    value: float
    why: str
    sentence = "`{name}` is {value}: {why}"
    hint = "the defaults are beam_width 16, lm_weight 0.5, word_bonus 1.5, hotword_weight 10"


@dataclass(frozen=True)
class Word:
    """A word with its place in the audio."""

    text: str
    start: int
    """First output frame."""
    end: int
    """Output frame behind the last."""
    score: float
    """Mean log-probability of its labels in its frames: 0 is certain."""


@dataclass(frozen=True)
class Hypothesis:
    """A text that an utterance may be."""

    text: str
    words: tuple[Word, ...]
    score: float
    """Acoustic log-probability, language model, word bonus and hot words together: what the search compares."""
    acoustic: float
    """Log-probability of the audio's labels, of all paths that were searched."""
    lm: float
    """Part of the language model, weighted, with the word bonus."""


class _Search(Protocol):
    def __call__(self, log_probs: Tensor, lengths: Sequence[int], num_wanted: int = 1) -> list[list[Found]]: ...


class BeamDecoder:
    """Beam search with a language model and hot words; scores and words are those of pyctcdecode 0.5.

    On a GPU a batch is searched there, all utterances at a time; on a CPU by compiled C, one thread per core.
    """

    def __init__(
        self,
        labels: Pieces,
        *,
        beam_width: int = 16,
        lm: str | Path | LanguageModel | None = None,
        lm_weight: float = 0.5,
        word_bonus: float = 1.5,
        hotwords: Sequence[str] = (),
        hotword_weight: float = 10.0,
        unknown_offset: float = -10.0,
        score_boundary: bool = True,
        beam_log_prob: float = -10.0,
        token_log_prob: float = -5.0,
        prune_history: bool = True,
    ) -> None:
        numbers = {"lm_weight": lm_weight, "word_bonus": word_bonus, "hotword_weight": hotword_weight}
        for name, value in numbers.items():
            if not np.isfinite(value):
                raise WrongBeam(name, value, phrase("it must be a number"))
        if beam_width < 1:
            raise WrongBeam("beam_width", beam_width, phrase("at least one hypothesis must be kept"))
        self.labels = labels
        self.model = load_language_model(lm) if isinstance(lm, str | Path) else lm
        where = str(lm) if isinstance(lm, str | Path) else "the language model"
        pieces = list(labels.pieces)
        self._joined_by = " "
        if self.model is not None and not any(piece.startswith(WORD_START) for piece in pieces):
            # Chinese, Thai, ...: no label parts words, so each is one, for a language model of characters.
            pieces = [WORD_START + piece if piece else piece for piece in pieces]
            self._joined_by = ""
        _check_words(self.model, hotwords, pieces, where)
        self._alphabet = Alphabet.of(pieces)
        self._weights = Weights(lm_weight, word_bonus, unknown_offset, hotword_weight, score_boundary)
        self._limits = Limits(beam_width, beam_log_prob, token_log_prob, prune_history)
        table = word_table(self.model, hotwords, hotword_weight)
        parts = (self._alphabet, table, self.model, self._weights, self._limits)
        reason = why_not()
        self.on_cpu: _Search = TensorSearch(*parts) if reason else NativeSearch(*parts)
        self.on_gpu: _Search = TensorSearch(*parts) if self.model is None or self.model.tables else self.on_cpu
        self.note = None if reason is None else f"the beam is searched without compiled C, many times slower: {reason}"
        """What users should know of how it is searched here; None if there is nothing."""

    def __call__(self, log_probs: Tensor, lengths: Sequence[int], num_best: int = 1) -> list[list[Hypothesis]]:
        """Return up to `num_best` hypotheses of each utterance, best first.

        `log_probs` is (batch, frames, classes), natural logarithms, the blank last; on a GPU it is searched there.
        """
        found = self._found(log_probs, lengths, num_best)
        rows = log_probs.detach().float().cpu().numpy()
        return [[self._hypothesis(each, row) for each in results] for results, row in zip(found, rows, strict=True)]

    def texts(self, log_probs: Tensor, lengths: Sequence[int]) -> list[str]:
        """Return the best text of each utterance."""
        found = self._found(log_probs, lengths, 1)
        return [self._joined_by.join(self._words(results[0].path)[0]) if results else "" for results in found]

    def _found(self, log_probs: Tensor, lengths: Sequence[int], num_best: int) -> list[list[Found]]:
        search = self.on_gpu if log_probs.is_cuda else self.on_cpu
        # On the GPU in one piece, elsewhere as it comes: results do not depend on what is searched together.
        return search(log_probs, list(lengths), num_best)

    def _hypothesis(self, found: Found, row: NDArray[np.float32]) -> Hypothesis:
        texts, spans = self._words(found.path)
        frames = np.arange(len(found.path))
        of_path = np.append(0.0, np.cumsum(row[frames, found.path], dtype=np.float64))
        words = [
            Word(text, begin, end, float(of_path[end] - of_path[begin]) / (end - begin))
            for text, (begin, end) in zip(texts, spans, strict=True)
        ]
        return Hypothesis(self._joined_by.join(texts), tuple(words), found.score, found.acoustic, found.lm)

    def _words(self, path: NDArray[np.int32]) -> tuple[list[str], list[tuple[int, int]]]:
        """Return the words of a path, and the frames of each: from its first label to behind its last."""
        alphabet = self._alphabet
        heard = np.flatnonzero(path != alphabet.blank)
        if not len(heard):
            return [], []
        is_new = np.append(True, (path[heard[1:]] != path[heard[:-1]]) | (np.diff(heard) > 1))
        labels = path[heard]
        is_start = is_new & alphabet.starts[labels]
        bounds = np.unique(np.concatenate([[0], np.flatnonzero(is_start), [len(heard)]]))
        texts, spans = [], []
        for first, last in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
            ids = labels[first:last][is_new[first:last]].tolist()
            text = self.labels.decode(ids).strip()
            if not text:
                continue
            inside = np.arange(first, last)
            if alphabet.space_is_silent:
                inside = inside[~alphabet.starts[labels[first:last]]]
            texts.append(text)
            spans.append((int(heard[inside[0]]), int(heard[inside[-1]]) + 1))
        return texts, spans


def load_language_model(path: str | Path) -> LanguageModel:
    """Return the model of an ARPA file (.arpa, .gz) or of a KenLM binary, from a path or an address."""
    where = local_path(path)
    bring(where)
    try:
        facts = where.stat()
    except OSError as error:
        raise NoLanguageModel(where, error.strerror or str(error)) from None
    return _loaded(where, facts.st_mtime_ns, facts.st_size)


@lru_cache(maxsize=2)
def _loaded(path: Path, changed: int, size: int) -> LanguageModel:
    return KenlmModel(path) if is_kenlm(path) else read_arpa(path)


def _check_words(
    model: LanguageModel | None, hotwords: Sequence[str], pieces: Sequence[str], where: str
) -> None:
    characters = set("".join(pieces)) - {WORD_START}
    if any(piece.startswith("<0x") for piece in pieces):
        return  # bytes write everything
    for word in hotwords:
        outside = {character: None for character in "".join(word.split()) if character not in characters}
        if outside:
            raise HotwordUnspelled(word, " ".join(outside))
    if model is None:
        return
    words = [word for word in model.words if word not in (START, END, UNKNOWN)]
    unspelled = [word for word in words if not characters.issuperset(word)]
    share = 1 - len(unspelled) / max(len(words), 1)
    if not words or share < LEAST_SPELLED:
        shown = "".join(sorted(characters))
        raise WordsUnspelled(where, share, unspelled[0] if unspelled else "", f"{shown[:40]}{'...' * (len(shown) > 40)}")
