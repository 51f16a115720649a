"""The search of search.c in plain Python, for machines without a C compiler: same words, same scores, much slower.

Prefix beam search over CTC log-probabilities, as pyctcdecode 0.5 does it, with the same scores. A beam is a text, the
word that is being written, and the last label (or blank). In each frame every beam is continued by every label that is
probable enough; beams that became the same text, word and last label are one, their probabilities added. A beam's
score is its acoustic log-probability, that of its finished words in the language model (times a weight, with a bonus
for each word), and that of its unfinished word, which only says whether any known word begins so. The best
`beam_width` beams are kept, without those far below the best one and those whose last words are a better one's, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from heapq import nlargest
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from paceline.recipes.speech.decoding.limits import FLOOR, Found, Limits, Weights
from paceline.recipes.speech.decoding.ngram import LanguageModel
from paceline.recipes.speech.decoding.words import Alphabet, WordTable

_LN10: Final = 2.302585092994045684
_MASK: Final = (1 << 64) - 1


@dataclass(slots=True)
class _Beam:
    state: int
    """State of the language model after `text`."""
    text: tuple[int, ...] = ()
    """Hashes of the finished words."""
    part: int = 0
    """Hash of the unfinished word."""
    part_length: int = 0
    part_word: int = -1
    """Number of the known word that the unfinished one is already, or -1."""
    part_is_hot: bool = False
    partial: float = 0.0
    """Score of the unfinished word."""
    lm: float = 0.0
    hot: float = 0.0
    acoustic: float = 0.0
    """Log-probability of all paths that write the text."""
    path: float = 0.0
    """Log-probability of the best of these paths, whose times are told."""
    last: int = -1
    trace: tuple[Any, int] | None = None
    """Labels of the best path, the last first: (all before, label)."""

    def score(self) -> float:
        return self.acoustic + self.lm + self.hot + self.partial

    def hear(self, label: int, log_prob: float) -> None:
        self.acoustic += log_prob
        self.path += log_prob
        self.last, self.trace = label, (self.trace, label)

    def join(self, other: _Beam) -> None:
        """Add the paths of another beam that writes the same."""
        self.acoustic = _log_add(self.acoustic, other.acoustic)
        if other.path > self.path:
            self.path, self.trace = other.path, other.trace


class PlainSearch:
    """Search of utterances, one after the other."""

    def __init__(
        self, alphabet: Alphabet, table: WordTable, model: LanguageModel | None, weights: Weights, limits: Limits
    ) -> None:
        self._weights, self._limits, self._blank = weights, limits, alphabet.blank
        self._hashes, self._powers = _unsigned(alphabet.hashes), _unsigned(alphabet.powers)
        self._lengths, self._starts = alphabet.lengths.tolist(), alphabet.starts.tolist()
        columns = (table.words.tolist(), table.is_hot.tolist(), table.partials.tolist())
        self._words = dict(zip(_unsigned(table.hashes), zip(*columns, strict=True), strict=True))
        self._model = model
        self._advance = None if model is None else remembered(model)
        self._num_history = 1 if model is None else max(1, model.order - 1)

    def __call__(self, log_probs: Tensor, lengths: Sequence[int], num_wanted: int = 1) -> list[list[Found]]:
        """Return the best results of each utterance; `log_probs` is (batch, frames, classes)."""
        rows = log_probs.detach().float().cpu().numpy().astype(np.float64)
        return [self._search(row[:length], num_wanted) for row, length in zip(rows, lengths, strict=True)]

    def _search(self, frames: NDArray[np.float64], num_wanted: int) -> list[Found]:
        beams = [_Beam(state=self._first_state())]
        before: list[int] = []
        for frame in frames:
            labels = np.flatnonzero(frame >= self._limits.token_log_prob).tolist() or [int(frame.argmax())]
            log_probs = frame[labels].clip(FLOOR, 0.0).tolist()
            if len(labels) == 1 and labels == before:  # every beam ends in this label: only scores change
                for beam in beams:
                    beam.hear(labels[0], log_probs[0])
            else:
                beams = self._step(beams, list(zip(labels, log_probs, strict=True)))
            before = labels
        return [
            Found(_labels(beam.trace, len(frames)), beam.score(), beam.acoustic, beam.lm)
            for beam in self._finish(beams)[:num_wanted]
        ]

    def _step(self, beams: Sequence[_Beam], labels: Iterable[tuple[int, float]]) -> list[_Beam]:
        """Return the best beams after a frame."""
        found: dict[tuple[int, tuple[int, ...], int], _Beam] = {}
        for label, log_prob in labels:
            for beam in beams:
                after = self._written(beam, label)
                after.hear(label, log_prob)
                known = found.setdefault((label, after.text, after.part), after)
                if known is not after:
                    known.join(after)
        best = self._best(found.values())
        if not self._limits.prune_history:
            return best
        by_history: dict[tuple[tuple[int, ...], int, int], _Beam] = {}
        for beam in best:
            by_history.setdefault((beam.text[-self._num_history :], beam.part, beam.last), beam)
        return list(by_history.values())

    def _best(self, beams: Iterable[_Beam]) -> list[_Beam]:
        best = nlargest(self._limits.beam_width, beams, key=_Beam.score)
        return [beam for beam in best if beam.score() >= best[0].score() + self._limits.beam_log_prob]

    def _written(self, beam: _Beam, label: int) -> _Beam:
        """Return a copy of a beam with what a label adds to its text."""
        if label in (self._blank, beam.last):
            return replace(beam)
        if self._starts[label]:
            beam = self._with_word(beam)
        part = (beam.part * self._powers[label] + self._hashes[label]) & _MASK
        length = beam.part_length + self._lengths[label]
        word, is_hot, partial = self._look_up(part, length)
        return replace(beam, part=part, part_length=length, part_word=word, part_is_hot=is_hot, partial=partial)

    def _look_up(self, part: int, length: int) -> tuple[int, bool, float]:
        known = self._words.get(part) if length else None
        if known is not None:
            return known
        is_unknown = self._model is not None and length > 0
        return -1, False, self._weights.unknown_offset * max(1.0, length / 6) if is_unknown else 0.0

    def _with_word(self, beam: _Beam) -> _Beam:
        """Return a beam with its word finished."""
        if not beam.part_length:
            return beam
        lm, state = self._word_score(beam)
        return _Beam(
            state,
            (*beam.text, beam.part),
            lm=beam.lm + lm,
            hot=beam.hot + self._weights.hotword_weight * beam.part_is_hot,
            acoustic=beam.acoustic,
            path=beam.path,
            last=beam.last,
            trace=beam.trace,
        )

    def _word_score(self, beam: _Beam, *, is_last: bool = False) -> tuple[float, int]:
        """Return what the unfinished word gives as a whole one, and the state after it."""
        if self._model is None or self._advance is None:
            return 0.0, beam.state
        weights, is_unknown = self._weights, beam.part_word < 0
        log_prob, state = self._advance(beam.state, self._model.unknown if is_unknown else beam.part_word)
        log_prob += weights.unknown_offset * is_unknown
        if is_last and weights.boundary:
            log_prob += self._advance(state, self._model.end)[0]
        return weights.lm_weight * log_prob * _LN10 + weights.word_bonus, state

    def _finish(self, beams: Iterable[_Beam]) -> list[_Beam]:
        """Return the results, best first."""
        found: dict[tuple[int, ...], _Beam] = {}
        for beam in beams:
            ended = replace(self._with_word(beam))
            # Of texts that become one the last is scored: it may end in a space, then its last word is none.
            ended.lm = beam.lm + self._word_score(beam, is_last=True)[0]
            if (known := found.get(ended.text)) is not None:
                ended.join(known)
            found[ended.text] = ended
        return self._best(found.values())

    def _first_state(self) -> int:
        if self._model is None:
            return 0
        return self._model.start if self._weights.boundary else self._model.empty


def remembered(model: LanguageModel) -> Callable[[int, int], tuple[float, int]]:
    """Return a function for the log-probability (base 10) of a word after a state, and the next state."""
    answers: dict[tuple[int, int], tuple[float, int]] = {}

    def advance(state: int, word: int) -> tuple[float, int]:
        answer = answers.get((state, word))
        if answer is None:
            log_probs, states = model.advance(np.array([state]), np.array([word]))
            answer = answers[state, word] = float(log_probs[0]), int(states[0])
        return answer

    return advance


def _log_add(one: float, other: float) -> float:
    high, low = max(one, other), min(one, other)
    return high + math.log1p(math.exp(low - high))


def _labels(trace: tuple[Any, int] | None, num_frames: int) -> NDArray[np.int32]:
    labels = np.empty(num_frames, np.int32)
    for frame in range(num_frames - 1, -1, -1):
        assert trace is not None  # each frame adds a label
        trace, labels[frame] = trace
    return labels


def _unsigned(values: NDArray[np.int64]) -> list[int]:
    numbers: list[int] = np.ascontiguousarray(values).view(np.uint64).tolist()
    return numbers
