"""Weights and limits of a search, and its results."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.core.errors import PacelineError

FLOOR: Final = math.log(1e-15)
"""Smallest log-probability of a label in a frame; less counts as this."""
MOST: Final = 0.05
"""Largest value that is still taken for a log-probability: rounding to 16 bits may put one above 0."""


class WrongOutputs(PacelineError):
    """A network's output that cannot be searched: of another shape, or no log-probabilities."""

    why: str
    sentence = "`log_probs` cannot be searched: {why}"
    hint = (
        "give logarithms of probabilities (`log_softmax(-1)`) as (batch, frames, labels + 1), the blank last, and the "
        "number of frames of each utterance"
    )


def not_log_probs() -> WrongOutputs:
    return WrongOutputs("the probabilities of a frame are together more than 1")


def check_outputs(log_probs: Tensor, lengths: Sequence[int], classes: int) -> None:
    """Raise for what no search may read: beyond its end, or other numbers than log-probabilities."""
    shape = tuple(log_probs.shape)
    if len(shape) != 3 or shape[-1] != classes:
        why = f"its shape is {shape}; labels, the blank among them: {classes}"
        raise WrongOutputs(why)
    if len(lengths) != shape[0]:
        raise WrongOutputs(f"utterances: {shape[0]}, lengths: {len(lengths)}")
    wrong = next((length for length in lengths if not 0 <= length <= shape[1]), None)
    if wrong is not None:
        raise WrongOutputs(f"the length {wrong} is not one of {shape[1]} frames")
    if not log_probs.numel():
        return
    is_frame = (
        torch.arange(shape[1], device="cpu") < torch.tensor(list(lengths), dtype=torch.int64, device="cpu")[:, None]
    )
    if bool(((log_probs.detach().amax(-1) > MOST) & is_frame.to(log_probs.device)).any()):
        raise not_log_probs()


@dataclass(frozen=True)
class Weights:
    """Parts of a score beside the acoustic one; the defaults are pyctcdecode's."""

    lm_weight: float = 0.5
    """Factor of the language model's log-probability."""
    word_bonus: float = 1.5
    """Added for each word that the language model scores."""
    unknown_offset: float = -10.0
    """Added, before the weight, to the base-10 logarithm of words that the language model does not know, and to the
    score of unfinished ones."""
    hotword_weight: float = 10.0
    """Added for each hot word; in parts while it is unfinished."""
    boundary: bool = True
    """Score the end of a sentence, and the first word as the first."""


@dataclass(frozen=True)
class Limits:
    """Limits of what is kept after each frame; the defaults are pyctcdecode's, but for the width."""

    beam_width: int = 16
    beam_log_prob: float = -10.0
    """Hypotheses that are so much below the best are dropped."""
    token_log_prob: float = -5.0
    """Labels below this in a frame are not tried, but for the best one."""
    prune_history: bool = True
    """Of hypotheses that end in the same words, as far as the language model looks back, keep the best."""


class Found(NamedTuple):
    """A result of a search."""

    path: NDArray[np.int32]
    """Label of each frame."""
    score: float
    acoustic: float
    lm: float
