"""Decoding of log-probabilities per frame to label ids along the best path. Beams are in `asr/decoding`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor


def greedy(log_probs: Tensor, lengths: Sequence[int] | Tensor, blank: int) -> list[list[int]]:
    """Return the labels of the best path of each utterance: repeats collapsed, blanks removed.

    `log_probs` is (batch, frames, classes); frames at and after an utterance's length are never looked at.
    """
    best = log_probs.argmax(-1).cpu().numpy()  # (batch, frames)
    keep = (np.arange(best.shape[1]) < _lengths(lengths)[:, None]) & (best != blank)
    keep[:, 1:] &= best[:, 1:] != best[:, :-1]
    pieces = np.split(best[keep], np.cumsum(keep.sum(1))[:-1]) if len(best) else []
    return [piece.tolist() for piece in pieces]


def _lengths(lengths: Sequence[int] | Tensor) -> NDArray[np.int64]:
    return np.asarray(lengths.cpu().numpy() if isinstance(lengths, Tensor) else lengths, np.int64)
