"""Greedy reading of a transducer: at each frame the best label is written until the best is to go on, a whole batch at
a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from paceline.core.errors import PacelineError
from paceline.core.together import Exclusion
from paceline.recipes.speech.decoding.decoder import Hypothesis, Word
from paceline.recipes.speech.decoding.words import Alphabet
from paceline.recipes.speech.network.transducer.decoder import State, TransducerDecoder
from paceline.recipes.speech.text.pieces import Pieces

MAX_SYMBOLS = 10
"""Labels in one frame at most, as in NeMo."""


class TransducersAreGreedy(PacelineError):
    """A beam for a transducer."""

    excludes = (
        Exclusion(
            "`--decoder beam`",
            "a transducer",
            "not written",
            "The search that is there joins texts of CTC, whose frames do not depend on the labels before.",
        ),
    )
    sentence = (
        "the network is a transducer, and `--decoder beam` searches outputs of CTC, which do not depend on the labels"
        " before"
    )
    hint = "set `--decoder greedy`, without `--lm` and `--hotwords`; for a language model train with `--head ctc`"


@dataclass
class Reading:
    """Texts of a batch while they are read: where the prediction network is, and what was written."""

    seen: Tensor
    """(batch, joint channels): what the joint network takes from the text so far."""
    state: State
    ids: list[list[int]]
    frames: list[list[int]]
    """Frame of each label."""
    scores: list[list[float]]
    """Log-probability of each label."""
    totals: list[float]
    """Log-probability of each path, with its blanks."""

    @classmethod
    def begin(cls, network: TransducerDecoder, batch: int) -> Reading:
        seen, state = network.begin(batch)
        nothing = range(batch)
        return cls(seen, state, [[] for _ in nothing], [[] for _ in nothing], [[] for _ in nothing], [0.0] * batch)


def read(
    network: TransducerDecoder,
    reading: Reading,
    outputs: Tensor,
    lengths: Sequence[int],
    *,
    max_symbols: int = MAX_SYMBOLS,
    first: int = 0,
) -> None:
    """Read frames (batch, frames, joint channels) into texts; `first` is the number of the first one.

    Each utterance is at its own frame: those whose best class is a label write it and stay, the others go on.
    """
    device, blank = outputs.device, network.num_classes - 1
    batch = torch.arange(len(lengths), device=device)
    ends = torch.tensor(list(lengths), dtype=torch.int64, device="cpu").to(device)
    frame, written = torch.zeros_like(ends), torch.zeros_like(ends)
    last = max(outputs.shape[1] - 1, 0)
    seen, state = reading.seen, reading.state
    steps: list[tuple[Tensor, ...]] = []
    while bool((is_heard := frame < ends).any()):
        scores = network.joint(outputs[batch, frame.clamp(max=last)] + seen)
        log_probs = scores.float().log_softmax(-1)
        best, label = log_probs.max(-1)
        writes = is_heard & (label != blank) & (written < max_symbols)
        of_path = torch.where(writes, best, log_probs[:, blank]).double()
        steps.append((torch.where(writes, label, -1), frame, torch.where(is_heard, of_path, 0.0)))
        if bool(writes.any()):
            after, new_state = network.go_on(torch.where(writes, label, blank), state)
            seen = torch.where(writes.unsqueeze(1), after, seen)
            state = state.updated(writes, new_state)
        written = torch.where(writes, written + 1, 0)
        frame = frame + (is_heard & ~writes)
    reading.seen, reading.state = seen, state
    if steps:
        _note(reading, [torch.stack(columns, 1).tolist() for columns in zip(*steps, strict=True)], first)


def _note(reading: Reading, paths: list[Any], first: int) -> None:
    """Add steps to texts: labels (-1: none), frames and log-probabilities, each by utterance and step."""
    for row, path in enumerate(zip(*paths, strict=True)):
        for label, frame, score in zip(*path, strict=True):
            reading.totals[row] += score
            if label >= 0:
                reading.ids[row].append(label)
                reading.frames[row].append(first + frame)
                reading.scores[row].append(score)


class TransducerReader:
    """The best label of each frame until the best is to go on. A `TextDecoder`."""

    note: str | None = None

    def __init__(
        self,
        network: TransducerDecoder,
        labels: Pieces,
        *,
        frame_seconds: float = 1.0,
        max_symbols: int = MAX_SYMBOLS,
    ) -> None:
        self.network, self.labels, self.max_symbols = network, labels, max_symbols
        self._alphabet, self._frame_seconds = Alphabet.of(labels.pieces), frame_seconds

    def __call__(self, outputs: Tensor, lengths: Sequence[int], num_best: int = 1) -> list[list[Hypothesis]]:
        """Return one hypothesis of each utterance; a word begins with the frame of its first label, and ends behind
        that of its last."""
        found = self._read(outputs, lengths)
        rows = zip(found.ids, found.frames, found.scores, found.totals, strict=True)
        return [[self._hypothesis(*row)] for row in rows]

    def texts(self, outputs: Tensor, lengths: Sequence[int]) -> list[str]:
        return [" ".join(self.labels.decode(ids).split()) for ids in self._read(outputs, lengths).ids]

    @torch.no_grad()
    def _read(self, outputs: Tensor, lengths: Sequence[int]) -> Reading:
        reading = Reading.begin(self.network, len(lengths))
        read(self.network, reading, outputs, lengths, max_symbols=self.max_symbols)
        return reading

    def _hypothesis(self, ids: list[int], frames: list[int], scores: list[float], total: float) -> Hypothesis:
        starts, seconds = self._alphabet.starts, self._frame_seconds
        begins = [place for place, label in enumerate(ids) if starts[label] and place]
        words = []
        for begin, end in pairwise([0, *begins, len(ids)]):
            text = self.labels.decode(ids[begin:end]).strip()
            if not text:
                continue
            # the label of a space is the gap before a word, a piece with a space in it is the word's first sound
            spoken = begin + int(self._alphabet.space_is_silent and bool(starts[ids[begin]]))
            score = sum(scores[begin:end]) / (end - begin)
            words.append(
                Word(text, round(frames[spoken] * seconds, 6), round((frames[end - 1] + 1) * seconds, 6), score)
            )
        return Hypothesis(" ".join(word.text for word in words), tuple(words), total, total, 0.0)
