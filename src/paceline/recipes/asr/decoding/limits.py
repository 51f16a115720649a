"""What a search weighs and what it keeps, and what it finds."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

FLOOR: Final = math.log(1e-15)
"""Smallest log-probability of a label in a frame; less counts as this."""


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
    """What is kept after each frame; the defaults are pyctcdecode's, but for the width."""

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
