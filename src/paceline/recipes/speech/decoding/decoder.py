"""Beam decoding of a network's output to words: with a language model, hot words and times."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.core.cloud.address import local_path
from paceline.core.cloud.file_copy import bring
from paceline.core.errors import Conflict, InvalidSetting, PacelineError
from paceline.core.terminal import warn
from paceline.core.torch_private import can_compile_cuda
from paceline.recipes.speech.decoding.arpa import NoLanguageModel, read_arpa
from paceline.recipes.speech.decoding.kenlm_file import KenlmModel, is_kenlm
from paceline.recipes.speech.decoding.limits import Found, Limits, Weights, check_outputs
from paceline.recipes.speech.decoding.native import CannotCompile, KernelSearch, NativeSearch, why_not
from paceline.recipes.speech.decoding.ngram import END, START, UNKNOWN, LanguageModel
from paceline.recipes.speech.decoding.search import PlainSearch
from paceline.recipes.speech.decoding.words import Alphabet, word_table
from paceline.recipes.speech.text.decode import greedy
from paceline.recipes.speech.text.pieces import WORD_START, Pieces

LEAST_SPELLED: Final = 0.1
"""Share of a language model's words that labels must be able to write."""


MOST_HYPOTHESES = 10_000
MOST_CHARACTERS = 1000
"""Of a hot word: all of its beginnings are kept."""


class WrongBeam(PacelineError):
    """Numbers with which nothing can be searched."""

    name: str
    value: Any
    why: str
    sentence = "`{name}` is {value}: {why}"
    hint = "the defaults are beam_width 16, lm_weight 0.5, word_bonus 1.5, hotword_weight 10"


@dataclass(frozen=True)
class Word:
    """A word with its place in the audio."""

    text: str
    start: float
    """Seconds from the beginning of the audio, of the first frame (frames, where a decoder does not know seconds)."""
    end: float
    """Behind its last frame."""
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

    def later(self, seconds: float) -> Hypothesis:
        """Return the same, of audio before which so much was cut off: words count from before the cut."""
        words = (
            replace(word, start=round(word.start + seconds, 6), end=round(word.end + seconds, 6)) for word in self.words
        )
        return replace(self, words=tuple(words)) if seconds else self


class _Search(Protocol):
    def __call__(self, log_probs: Tensor, lengths: Sequence[int], num_wanted: int = 1) -> list[list[Found]]: ...


class TextDecoder(Protocol):
    """Reads texts off a network's output."""

    note: str | None
    """Remark for users on how it is done here; None if there is nothing."""

    def __call__(self, outputs: Tensor, lengths: Sequence[int], /, num_best: int = 1) -> list[list[Hypothesis]]:
        """Return up to `num_best` hypotheses of each utterance, best first."""
        ...

    def texts(self, outputs: Tensor, lengths: Sequence[int], /) -> list[str]:
        """Return the best text of each utterance; of CTC, `outputs` are log-probabilities (batch, frames, classes), the
        blank last, of a transducer what its decoder returns."""
        ...


class GreedyDecoder:
    """The best label of each frame, repeats and blanks taken out."""

    note: str | None = None

    def __init__(self, labels: Pieces, *, frame_seconds: float = 1.0) -> None:
        self.labels = labels
        self._paths = _Paths(labels, Alphabet.of(labels.pieces), " ", frame_seconds)

    def __call__(self, log_probs: Tensor, lengths: Sequence[int], num_best: int = 1) -> list[list[Hypothesis]]:
        best, labels = log_probs.max(-1)
        scores, paths = best.double().cpu().numpy(), labels.to(torch.int32).cpu().numpy()
        results = []
        for score, path, length in zip(scores, paths, lengths, strict=True):
            total = float(score[:length].sum())
            results.append([self._paths.hypothesis(Found(path[:length], total, total, 0.0), score[:length])])
        return results

    def texts(self, log_probs: Tensor, lengths: Sequence[int]) -> list[str]:
        found = greedy(log_probs, lengths, self.labels.blank)
        return [" ".join(self.labels.decode(ids).split()) for ids in found]


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
        frame_seconds: float = 1.0,
    ) -> None:
        numbers = {"lm_weight": lm_weight, "word_bonus": word_bonus, "hotword_weight": hotword_weight}
        _check_arguments(beam_width, numbers, hotwords)
        self.labels = labels
        self.model = load_language_model(lm) if isinstance(lm, str | Path) else lm
        where = str(lm) if isinstance(lm, str | Path) else "the language model"
        pieces = list(labels.pieces)
        between = " "
        if self.model is not None and not any(piece.startswith(WORD_START) for piece in pieces):
            # Chinese, Thai, ...: no label parts words, so each is one, for a language model of characters.
            pieces = [WORD_START + piece if piece else piece for piece in pieces]
            between = ""
        _check_words(self.model, hotwords, pieces, where)
        alphabet = Alphabet.of(pieces)
        weights = Weights(lm_weight, word_bonus, unknown_offset, hotword_weight, score_boundary)
        limits = Limits(beam_width, beam_log_prob, token_log_prob, prune_history)
        table = word_table(self.model, hotwords, hotword_weight)
        self._paths = _Paths(labels, alphabet, between, frame_seconds)
        parts = (alphabet, table, self.model, weights, limits)
        reason = why_not()
        self.on_cpu: _Search = PlainSearch(*parts) if reason else NativeSearch(*parts)
        self.on_gpu: _Search = self.on_cpu
        if can_compile_cuda() and (self.model is None or self.model.tables is not None):
            self.on_gpu = KernelSearch(*parts)
        self.note = None if reason is None else f"the beam is searched without compiled C, which is slow: {reason}"

    def __call__(self, log_probs: Tensor, lengths: Sequence[int], num_best: int = 1) -> list[list[Hypothesis]]:
        """Return up to `num_best` hypotheses of each utterance, best first.

        `log_probs` is (batch, frames, classes), natural logarithms, the blank last; on a GPU it is searched there.
        """
        found = self._found(log_probs, lengths, num_best)
        rows = log_probs.detach().float().cpu().numpy()
        return [[self._hypothesis(each, row) for each in results] for results, row in zip(found, rows, strict=True)]

    def texts(self, log_probs: Tensor, lengths: Sequence[int]) -> list[str]:
        """Return the best text of each utterance."""
        return [self._paths.text(results[0].path) if results else "" for results in self._found(log_probs, lengths, 1)]

    def _found(self, log_probs: Tensor, lengths: Sequence[int], num_best: int) -> list[list[Found]]:
        check_outputs(log_probs, lengths, self.labels.blank + 1)
        # Results do not depend on what is searched together, nor on where.
        if not log_probs.is_cuda:
            return self.on_cpu(log_probs, list(lengths), num_best)
        try:
            return self.on_gpu(log_probs, list(lengths), num_best)
        except CannotCompile as error:
            warn(f"the beam is searched on the CPU, which is slower than on the GPU: {error}\n")
            self.on_gpu = self.on_cpu
            return self.on_gpu(log_probs, list(lengths), num_best)

    def _hypothesis(self, found: Found, row: NDArray[np.float32]) -> Hypothesis:
        return self._paths.hypothesis(found, row[np.arange(len(found.path)), found.path])


@dataclass(frozen=True)
class _Paths:
    """Paths of labels over frames as words with times."""

    labels: Pieces
    alphabet: Alphabet
    between: str
    """Stands between words."""
    frame_seconds: float

    def text(self, path: NDArray[np.int32]) -> str:
        is_new = path != self.alphabet.blank
        is_new[1:] &= path[1:] != path[:-1]
        return self.between.join(self.labels.decode(path[is_new].tolist()).split())

    def hypothesis(self, found: Found, of_path: NDArray[np.floating[Any]]) -> Hypothesis:
        """Return a result in words; `of_path` has the log-probability of the path's label in each frame."""
        summed = np.append(0.0, np.cumsum(of_path, dtype=np.float64))
        words = [
            Word(
                text,
                round(begin * self.frame_seconds, 6),
                round(end * self.frame_seconds, 6),
                float(summed[end] - summed[begin]) / (end - begin),
            )
            for text, begin, end in self._words(found.path)
        ]
        text = self.between.join(word.text for word in words)
        return Hypothesis(text, tuple(words), found.score, found.acoustic, found.lm)

    def _words(self, path: NDArray[np.int32]) -> list[tuple[str, int, int]]:
        """Return the words of a path, and the frames of each: from its first label to behind its last."""
        alphabet = self.alphabet
        heard = np.flatnonzero(path != alphabet.blank)
        if not len(heard):
            return []
        labels = path[heard]
        is_new = np.append(True, (labels[1:] != labels[:-1]) | (np.diff(heard) > 1))
        bounds = [0, *np.flatnonzero(is_new & alphabet.starts[labels]).tolist(), len(heard)]
        words = []
        for first, last in pairwise(bounds):
            text = self.labels.decode(labels[first:last][is_new[first:last]].tolist()).strip()
            if not text:
                continue
            # the label of a space is the gap before a word, a piece with a space in it is the word's first sound
            skipped = int(np.count_nonzero(alphabet.starts[labels[first:last]])) if alphabet.space_is_silent else 0
            words.append((text, int(heard[first + skipped]), int(heard[last - 1]) + 1))
        return words


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


def _check_arguments(beam_width: Any, numbers: Mapping[str, Any], hotwords: Iterable[Any]) -> None:
    """Raise for arguments of a search that are of another kind, or beyond what can be searched."""
    for name, value in numbers.items():
        if not isinstance(value, int | float | np.number) or not np.isfinite(value):
            raise WrongBeam(name, value, "it must be a number")
    if not isinstance(beam_width, int | np.integer) or beam_width > MOST_HYPOTHESES:
        why = f"it must be a whole number, up to {MOST_HYPOTHESES:,}"
        raise WrongBeam("beam_width", beam_width, why)
    if beam_width < 1:
        raise WrongBeam("beam_width", beam_width, "at least one hypothesis must be kept")
    for word in hotwords:
        if not isinstance(word, str) or len(word) > MOST_CHARACTERS:
            shown = word[:20] + "..." if isinstance(word, str) else word
            why = f"a hot word is a text of up to {MOST_CHARACTERS:,} characters"
            raise WrongBeam("hotwords", repr(shown), why)


def _check_words(model: LanguageModel | None, hotwords: Sequence[str], pieces: Sequence[str], where: str) -> None:
    characters = set("".join(pieces)) - {WORD_START}
    if any(piece.startswith("<0x") for piece in pieces):
        return  # bytes write everything
    for word in hotwords:
        outside = {character: None for character in "".join(word.split()) if character not in characters}
        if outside:
            raise InvalidSetting(
                f"the hot word {word!r} has characters that no label writes: {' '.join(outside)}",
                hint="spell it as transcripts do: in their case, numbers as words",
            )
    if model is None:
        return
    words = [word for word in model.words if word not in (START, END, UNKNOWN)]
    unspelled = [word for word in words if not characters.issuperset(word)]
    share = 1 - len(unspelled) / max(len(words), 1)
    if not words or share < LEAST_SPELLED:
        shown = "".join(sorted(characters))
        raise Conflict(
            f"the labels can write {f'{share:.1%}' if share else 'none'} of the words of {where}: not "
            f"{unspelled[0] if unspelled else ''!r}, with the labels {shown[:40]}{'...' * (len(shown) > 40)}",
            hint="make a model of text that is written as the labels are: `paceline lm train.json lm.arpa`",
        )
