"""Decoding of log-probabilities per frame to label ids: the best path, or the best text among many paths."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from paceline.recipes.asr.text.pieces import Pieces


def transcripts(log_probs: Tensor, lengths: Sequence[int], labels: Pieces, beam_width: int | None) -> list[str]:
    """Return the text of each utterance, by greedy decoding or, with a width, by a beam; spaces only between words."""
    if beam_width is None:
        found = greedy(log_probs, lengths, labels.blank)
    else:
        found = beam_batch(log_probs, lengths, labels.blank, beam_width)
    return [" ".join(labels.decode(ids).split()) for ids in found]


def greedy(log_probs: Tensor, lengths: Sequence[int] | Tensor, blank: int) -> list[list[int]]:
    """Return the labels of the best path of each utterance: repeats collapsed, blanks removed.

    `log_probs` is (batch, frames, classes); frames at and after an utterance's length are never looked at.
    """
    best = log_probs.argmax(-1).cpu().numpy()  # (batch, frames)
    keep = (np.arange(best.shape[1]) < _lengths(lengths)[:, None]) & (best != blank)
    keep[:, 1:] &= best[:, 1:] != best[:, :-1]
    pieces = np.split(best[keep], np.cumsum(keep.sum(1))[:-1]) if len(best) else []
    return [piece.tolist() for piece in pieces]


class Hypothesis(NamedTuple):
    """A text that an utterance may be, and how probable it is: summed over the paths that the search kept."""

    ids: list[int]
    log_prob: float


def beam(log_probs: NDArray[Any], blank: int, width: int, *, prune: float | None = 10.0) -> list[Hypothesis]:
    """Return the most probable texts of one utterance, best first, by prefix beam search; `log_probs` is (frames,
    classes).

    After each frame the `width` most probable beginnings of a text are kept, each with the sum of all its paths, those
    that end in a blank counted apart from those that do not: only after a blank does a repeated label count twice.
    A label whose log-probability in a frame is more than `prune` below the best does not lengthen a text in that
    frame; with None every label does, and the result is exact where `width` is at least the number of beginnings.
    """
    if width < 1:
        raise ValueError(f"the width of a beam is at least 1, not {width}")
    scores = np.asarray(log_probs, np.float64)
    tree = _Prefixes()
    nodes = np.zeros(1, np.int64)  # the empty text
    ends_blank, ends_label = np.zeros(1), np.full(1, -np.inf)
    for frame in scores:
        total = np.logaddexp(ends_blank, ends_label)
        stay_blank = total + frame[blank]
        stay_label = ends_label + frame[tree.label[nodes]]

        symbols = np.arange(len(frame)) if prune is None else np.flatnonzero(frame >= frame.max() - prune)
        symbols = symbols[symbols != blank]
        repeats = tree.label[nodes][:, None] == symbols
        longer = np.where(repeats, ends_blank[:, None], total[:, None]) + frame[symbols]  # (prefix, symbol)

        # a prefix made longer may be one that is kept already: its paths belong there
        parents, columns = tree.places(nodes, symbols)
        known = np.flatnonzero((parents >= 0) & (columns >= 0))
        stay_label[known] = np.logaddexp(stay_label[known], longer[parents[known], columns[known]])
        longer[parents[known], columns[known]] = -np.inf

        candidates = np.concatenate([np.logaddexp(stay_blank, stay_label), longer.ravel()])
        chosen = _largest(candidates, width)
        stays = chosen[chosen < len(nodes)]
        origins, picked = np.divmod(chosen[len(stays) :] - len(nodes), max(len(symbols), 1))
        grown = tree.children(nodes[origins], symbols[picked])
        ends_blank = np.concatenate([stay_blank[stays], np.full(len(grown), -np.inf)])
        ends_label = np.concatenate([stay_label[stays], longer[origins, picked]])
        nodes = np.concatenate([nodes[stays], grown])
    total = np.logaddexp(ends_blank, ends_label)
    best_first = np.argsort(-total, kind="stable")
    return [Hypothesis(tree.text(int(nodes[number])), float(total[number])) for number in best_first]


def beam_batch(
    log_probs: Tensor, lengths: Sequence[int] | Tensor, blank: int, width: int, *, prune: float | None = 10.0
) -> list[list[int]]:
    """Return the ids of the best hypothesis of each utterance; `log_probs` is (batch, frames, classes)."""
    scores = log_probs.float().cpu().numpy()
    bests = [
        beam(one[:length], blank, width, prune=prune) for one, length in zip(scores, _lengths(lengths), strict=True)
    ]
    return [hypotheses[0].ids if hypotheses else [] for hypotheses in bests]


class _Prefixes:
    """All beginnings of texts that a search has kept, as a tree in arrays: node 0 is the empty one."""

    def __init__(self) -> None:
        self.label = np.full(1024, -1, np.int64)
        self._parent = np.full(1024, -1, np.int64)
        self._place = np.full(1024, -1, np.int64)  # of a node in the beam; the last belongs to no node, for "no parent"
        self._node_of: dict[tuple[int, int], int] = {}

    def places(
        self, nodes: NDArray[np.int64], symbols: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the place of each node's parent among `nodes` and of its label among the sorted `symbols`, or -1."""
        self._place[nodes] = np.arange(len(nodes))
        parents = self._place[self._parent[nodes]]
        self._place[nodes] = -1
        labels = self.label[nodes]
        columns = np.searchsorted(symbols, labels)
        found = np.append(symbols, -1)[columns] == labels
        return parents, np.where(found, columns, -1)

    def children(self, parents: NDArray[np.int64], labels: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the nodes one label further, made where they are new."""
        keys = list(zip(parents.tolist(), labels.tolist(), strict=True))
        nodes = [self._node_of.setdefault(key, len(self._node_of) + 1) for key in keys]
        while len(self._node_of) >= len(self.label) - 1:
            self.label, self._parent, self._place = (
                np.append(column, np.full_like(column, -1)) for column in (self.label, self._parent, self._place)
            )
        self._parent[nodes], self.label[nodes] = parents, labels
        return np.asarray(nodes, np.int64)

    def text(self, node: int) -> list[int]:
        ids: list[int] = []
        while node:
            ids.append(int(self.label[node]))
            node = int(self._parent[node])
        return ids[::-1]


def _largest(values: NDArray[np.float64], count: int) -> NDArray[np.int64]:
    """The places of the `count` largest values above -inf, in rising order; of equal ones the first."""
    if len(values) <= count:
        return np.flatnonzero(values > -np.inf)
    least = np.partition(values, len(values) - count)[len(values) - count]
    above = np.flatnonzero(values > least)
    equal = np.flatnonzero(values == least)[: count - len(above)] if least > -np.inf else above[:0]
    return np.sort(np.concatenate([above, equal]))


def _lengths(lengths: Sequence[int] | Tensor) -> NDArray[np.int64]:
    return np.asarray(lengths.cpu().numpy() if isinstance(lengths, Tensor) else lengths, np.int64)
