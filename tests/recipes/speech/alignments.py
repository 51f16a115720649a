"""CTC by hand: every path over the frames, one by one, in float64."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict

import numpy as np
from numpy.typing import NDArray


def collapse(path: tuple[int, ...], blank: int) -> tuple[int, ...]:
    """What a path writes: repeats once, blanks not at all."""
    return tuple(label for label, _ in itertools.groupby(path) if label != blank)


def log_prob_of_texts(log_probs: NDArray[np.float64], blank: int) -> dict[tuple[int, ...], float]:
    """The log-probability of every text that (frames, classes) can write."""
    frames, classes = log_probs.shape
    probability: dict[tuple[int, ...], list[float]] = defaultdict(list)
    for path in itertools.product(range(classes), repeat=frames):
        log_prob = math.fsum(log_probs[time, label] for time, label in enumerate(path))
        probability[collapse(path, blank)].append(math.exp(log_prob))
    return {text: math.log(math.fsum(parts)) for text, parts in probability.items() if math.fsum(parts) > 0}


def random_log_probs(dice: np.random.Generator, frames: int, classes: int, sharpness: float) -> NDArray[np.float64]:
    logits = sharpness * dice.standard_normal((frames, classes))
    return logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)
