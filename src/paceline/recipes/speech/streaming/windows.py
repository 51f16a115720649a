"""Text while audio arrives: windows with context on both sides, of which the middle is kept.

Windows begin at multiples of an output frame, so that a frame of a window is a frame of the whole recording. What is
kept of a window has heard `left` before it and `right` behind it; it is final, and the text only grows. What lies in
the last `right` is read, too, and shown as a guess that the next window replaces.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.recipes.speech.network.model import AcousticModel
from paceline.recipes.speech.sound.arrays import as_samples
from paceline.recipes.speech.sound.features import STD_GUARD
from paceline.recipes.speech.text.pieces import WORD_START, Pieces

Norm = Literal["file", "running", "window"]
PAUSE_S = 0.5
MEMORY_S = 60.0
"""Seconds of audio that running statistics remember: about as many count, older ones fade."""
_PROBE_FRAMES = 5040
"""A multiple of every stride that networks have."""


class Word(NamedTuple):
    """A word and when it was spoken, in seconds."""

    text: str
    start_s: float
    end_s: float


@dataclass
class Statistics:
    """Sums over frames of log-energies, by mel filter: mean and deviation of what was heard."""

    count: float = 0.0
    mean: NDArray[np.float64] | None = None
    squares: NDArray[np.float64] | None = None
    """Sum of squared distances from the mean."""
    most: float = float("inf")
    """Frames that count at most: beyond, older ones weigh less."""

    def add(self, energies: NDArray[np.float64]) -> None:
        """Add (frame, mel)."""
        number = len(energies)
        if not number:
            return
        mean = energies.mean(0)
        squares = np.square(energies - mean).sum(0)
        if self.mean is None or self.squares is None:
            self.count, self.mean, self.squares = float(number), mean, squares
        else:  # two sets joined (Chan, Golub and LeVeque, 1979)
            total = self.count + number
            shift = mean - self.mean
            self.squares = self.squares + squares + np.square(shift) * (self.count * number / total)
            self.mean = self.mean + shift * (number / total)
            self.count = total
        if self.count > self.most:
            self.squares *= self.most / self.count
            self.count = self.most

    def values(self, normalize: str) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return mean and deviation, per filter or for all together."""
        assert self.mean is not None
        assert self.squares is not None
        if normalize == "all_features":
            mels = len(self.mean)
            whole = self.mean.mean()
            squares = self.squares.sum() + self.count * np.square(self.mean - whole).sum()
            deviation = np.sqrt(squares / max(self.count * mels - 1, 1))
            return np.full(mels, whole), np.full(mels, deviation + STD_GUARD)
        return self.mean, np.sqrt(self.squares / max(self.count - 1, 1)) + STD_GUARD


@dataclass
class Reading:
    """Labels read off frames one after the other, as words with times."""

    labels: Pieces
    pause: int = 1 << 60
    """Frames without a label that end a word."""
    words: list[tuple[list[int], int, int]] = field(default_factory=list)
    """Labels of each word, and its first frame and the one behind its last."""
    before: int = -1
    """Best class of the frame before."""

    def read(self, best: Sequence[int], first: int) -> None:
        """Read the best class of frames that begin with number `first`."""
        for frame, label in enumerate(best, first):
            if label != self.labels.blank:
                if label != self.before:
                    self._add(label, frame)
                elif self.words and self.words[-1][0]:
                    ids, start, _ = self.words[-1]
                    self.words[-1] = (ids, start, frame + 1)
            self.before = label

    def _add(self, label: int, frame: int) -> None:
        piece = self.labels.pieces[label]
        if (
            self.words
            and self.words[-1][0]
            and (piece.startswith(WORD_START) or frame - self.words[-1][2] >= self.pause)
        ):
            self.words.append(([], frame, frame))
        if piece == WORD_START or not piece:
            return
        if not self.words:
            self.words.append(([], frame, frame))
        ids, start, _ = self.words[-1]
        self.words[-1] = ([*ids, label], start if ids else frame, frame + 1)

    def copy(self) -> Reading:
        return Reading(self.labels, self.pause, list(self.words), self.before)

    def whole_words(self) -> int:
        """Return the number of words that nothing can be added to: all but the last."""
        return max(0, len(self.words) - 1)

    def text(self, words: Sequence[tuple[list[int], int, int]]) -> str:
        return " ".join(filter(None, (self.labels.decode(ids) for ids, _, _ in words)))


class Listener:
    """Hears samples as they come, and writes what they say."""

    def __init__(
        self,
        model: AcousticModel,
        labels: Pieces,
        *,
        step_s: float,
        left_s: float,
        right_s: float,
        pause_s: float = PAUSE_S,
        norm: Norm = "running",
        statistics: Statistics | None = None,
    ) -> None:
        """`step_s` of every window are kept, with `left_s` before and `right_s` behind.

        A pause of `pause_s` ends a word (0: no pause does), as the end of an utterance does, which networks are trained
        on one by one. Features are normalized by `statistics` (`file`), by those of what was heard so far (`running`),
        or of each window alone (`window`).
        """
        self._model, self._front, self._labels = model, model.features, labels
        self.sample_rate = self._front.sample_rate
        stride = _PROBE_FRAMES // model.output_frames(_PROBE_FRAMES)
        self.unit = stride * self._front.hop_samples
        """Samples of an output frame."""
        self._stride = stride
        self._step, self._left, self._right = (self._units(seconds) for seconds in (step_s, left_s, right_s))
        self._step = max(1, self._step)
        self._norm: Norm = norm
        most = MEMORY_S * self.sample_rate / self._front.hop_samples
        self._statistics = statistics or Statistics(most=most)
        self._samples: NDArray[np.int16] = np.zeros(0, np.int16)
        self._first = 0  # unit that the samples begin with
        self._next = 0  # unit that the next window keeps from
        self._counted = 0  # frames that the statistics know
        pause = max(1, self._units(pause_s)) if pause_s else 1 << 60
        self._final, self._guess = Reading(labels, pause), Reading(labels, pause)

    @property
    def latency_s(self) -> float:
        """Longest time from a sound to its final text, computation not counted."""
        return (self._step + self._right) * self.unit / self.sample_rate

    @property
    def heard_s(self) -> float:
        """Seconds of audio that are final."""
        return self._next * self.unit / self.sample_rate

    def feed(self, samples: NDArray[Any]) -> str:
        """Hear samples at the model's rate, int16 or floats between -1 and 1; return the text so far, with what is not
        final yet."""
        self._samples = np.concatenate([self._samples, as_samples(samples)])
        while len(self._samples) >= (self._next - self._first + self._step + self._right) * self.unit:
            self._hear(is_last=False)
        return self.text

    def finish(self) -> str:
        """Hear the rest; return the whole text."""
        if len(self._samples) > (self._next - self._first) * self.unit:
            self._hear(is_last=True)
        self._guess = self._final.copy()
        return self.text

    @property
    def text(self) -> str:
        """Text so far; its end may still change."""
        return self._guess.text(self._guess.words)

    @property
    def final(self) -> str:
        """Whole words that cannot change any more."""
        return self._final.text(self._final.words[: self._final.whole_words()])

    @property
    def partial(self) -> str:
        """Text behind `final`, as it looks now."""
        return self._guess.text(self._guess.words[self._final.whole_words() :])

    def take_final(self) -> list[Word]:
        """Return the words that have become final since this was called last, and forget them: the memory of a stream
        that is read like this does not grow."""
        number = self._final.whole_words()
        taken = self._timed(self._final.words[:number])
        del self._final.words[:number], self._guess.words[:number]
        return taken

    def words(self) -> list[Word]:
        """Return all words that were not taken, with times; the last ones may still change."""
        return self._timed(self._guess.words)

    def _timed(self, words: Sequence[tuple[list[int], int, int]]) -> list[Word]:
        frame_s = self.unit / self.sample_rate
        timed = [Word(self._labels.decode(ids), start * frame_s, end * frame_s) for ids, start, end in words]
        return [word for word in timed if word.text]

    def _units(self, seconds: float) -> int:
        return -(-round(seconds * self.sample_rate) // self.unit)

    @torch.inference_mode()
    def _hear(self, *, is_last: bool) -> None:
        """Read one window: the middle becomes final, the rest is a guess."""
        begin = max(self._first, self._next - self._left)
        end = None if is_last else (self._next + self._step + self._right - self._first) * self.unit
        window = self._samples[(begin - self._first) * self.unit : end]
        energies = self._front.log_energies(torch.from_numpy(np.ascontiguousarray(window)))  # (frame, mel)
        best = self._best(self._normalized(energies, begin, is_last=is_last))
        kept = len(best) if is_last else min(len(best), self._next - begin + self._step)
        self._final.read(best[self._next - begin : kept].tolist(), self._next)
        self._guess = self._final.copy()
        self._guess.read(best[kept:].tolist(), begin + kept)
        self._next = begin + kept
        keep_from = max(self._first, self._next - self._left)
        self._samples = self._samples[(keep_from - self._first) * self.unit :]
        self._first = keep_from
        if is_last:
            self._samples, self._first = self._samples[:0], self._next

    def _normalized(self, energies: Tensor, begin: int, *, is_last: bool) -> Tensor:
        """(frame, mel) float64 -> float32, normalized as this stream is."""
        normalize = self._front.settings.normalize
        if normalize == "none":
            return energies.float()
        values = energies.numpy()
        statistics = self._statistics
        if self._norm == "window":
            statistics = Statistics()
            statistics.add(values)
        elif self._norm == "running":
            first = begin * self._stride
            # The last frames of a window look beyond it, unless the audio ends there.
            certain = first + len(values) - (0 if is_last else self._front.edge_frames)
            new = values[max(0, self._counted - first) : max(0, certain - first)]
            statistics.add(new)
            self._counted = max(self._counted, certain)
            if statistics.mean is None:
                statistics.add(values)
        mean, deviation = statistics.values(normalize)
        return ((energies - torch.from_numpy(mean)) / torch.from_numpy(deviation)).float()

    def _best(self, features: Tensor) -> NDArray[np.int64]:
        """Return the best class of each output frame."""
        if not len(features):
            return np.zeros(0, np.int64)
        device = next(self._model.parameters()).device
        lengths = torch.tensor([len(features)], device=device)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            log_probs = self._model(features[None].to(device), lengths)
        best: NDArray[np.int64] = log_probs[0, : self._model.output_frames(len(features))].argmax(-1).cpu().numpy()
        return best
