"""N-gram language model with back-off, as an automaton in arrays: a context is a node, a word leads to the next one.

The probability of a word in a context is that of the longest n-gram that the model has; each context that is given up
on the way costs its back-off weight. Numbers are base-10 logarithms, as in ARPA files.

Node 0 is the empty context, node 1 + w the context of word w alone; longer contexts follow in the order of their
n-grams, which are sorted by (node of the context, last word). So the n-grams of each order lie together, and their keys
rise over all orders.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

START, END, UNKNOWN = "<s>", "</s>", "<unk>"
MISSING_UNKNOWN = -100.0
"""Probability of unknown words in a model that has none for them, as KenLM has it."""
MAX_ORDER = 10


@dataclass(frozen=True)
class Tables:
    """Arrays of an n-gram model, for those who look up by themselves: the search in C and on GPUs."""

    num_words: int
    unigrams: NDArray[np.float32]
    """Log-probability of each word in the empty context; it leads to node 1 + word."""
    keys: NDArray[np.int64]
    """context * num_words + word of all longer n-grams, rising."""
    log_probs: NDArray[np.float32]
    nexts: NDArray[np.int32]
    """Node after an n-gram: its own, or that of its longest ending which is a context."""
    backoffs: NDArray[np.float32]
    fails: NDArray[np.int32]
    """Of each node, the node of its longest proper ending."""


class LanguageModel(Protocol):
    """Model that gives words probabilities after other words, the state being a number."""

    order: int
    words: Sequence[str]
    """Word of each id; those of `start`, `end` and `unknown` among them."""
    start: int
    """State at the beginning of a sentence."""
    empty: int
    """State without any words before."""
    end: int
    """Word that ends a sentence."""
    unknown: int
    """Word that stands for all others."""
    tables: Tables | None
    """None where only `advance` can tell."""

    def advance(
        self, states: NDArray[np.int64], words: NDArray[np.int64]
    ) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """Return the log-probability (base 10) of each word after its state, and the states then."""
        ...


class Ngrams:
    """Language model in tables, from the n-grams of an ARPA file or of `kneser_ney`."""

    def __init__(self, words: list[str], levels: Sequence[Level]) -> None:
        self.words: Sequence[str] = words
        self.order = len(levels)
        ids = {word: number for number, word in enumerate(words)}
        self.end, self.unknown = ids[END], ids[UNKNOWN]
        self._tables = _tables(len(words), levels)
        self.tables: Tables | None = self._tables
        self.start, self.empty = (1 + ids[START] if self.order > 1 else 0), 0

    def advance(
        self, states: NDArray[np.int64], words: NDArray[np.int64]
    ) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        return advance(self._tables, states, words, self.order)

    def log_probs(self, sentences: Sequence[Sequence[str]]) -> list[NDArray[np.float64]]:
        """Return the base-10 logarithms of the probabilities of each sentence's words and of its end."""
        return [found for found, _ in _scored(self, sentences)]


class Fit(NamedTuple):
    """Score of a model on a text."""

    perplexity: float
    """Of words and ends of sentences, 10 to the minus mean logarithm."""
    known_perplexity: float
    """The same without the words that the model does not know."""
    log10_prob: float
    sentences: int
    words: int
    unknown_words: int


def measure(model: LanguageModel, sentences: Sequence[Sequence[str]]) -> Fit:
    """Return how well a model predicts sentences."""
    pairs = _scored(model, sentences)
    scores = np.concatenate([found for found, _ in pairs])
    is_unknown = np.concatenate([words for _, words in pairs]) == model.unknown
    known = scores[~is_unknown]
    return Fit(
        float(10 ** -scores.mean()),
        float(10 ** -known.mean()) if len(known) else float("nan"),
        float(scores.sum()),
        len(pairs),
        len(scores) - len(pairs),
        int(is_unknown.sum()),
    )


def _scored(
    model: LanguageModel, sentences: Sequence[Sequence[str]]
) -> list[tuple[NDArray[np.float64], NDArray[np.int64]]]:
    """Return log-probabilities and ids of each sentence's words and of its end, a place in all sentences at a time."""
    ids = {word: number for number, word in enumerate(model.words)}
    rows = [[*(ids.get(word, model.unknown) for word in sentence), model.end] for sentence in sentences]
    order = sorted(range(len(rows)), key=lambda number: -len(rows[number]))
    scores = [np.empty(len(row)) for row in rows]
    states = np.full(len(rows), model.start, np.int64)
    for place in range(len(rows[order[0]]) if rows else 0):
        while len(rows[order[len(states) - 1]]) <= place:  # the shortest have ended
            states = states[:-1]
        words = np.array([rows[number][place] for number in order[: len(states)]], np.int64)
        found, states = model.advance(states, words)
        for number, score in zip(order, found.tolist(), strict=False):
            scores[number][place] = score
    return [(score, np.array(row, np.int64)) for score, row in zip(scores, rows, strict=True)]


@dataclass(frozen=True)
class Level:
    """All n-grams of one order."""

    ids: NDArray[np.int64]
    """(n-grams, order): word ids, in any order; of order 1 each word once, in the order of the ids."""
    log_probs: NDArray[np.float64]
    backoffs: NDArray[np.float64]


def advance(
    tables: Tables, states: NDArray[np.int64], words: NDArray[np.int64], order: int
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Return log-probabilities and next states by the back-off rule, all at once."""
    state = states.astype(np.int64, copy=True)
    result = np.zeros(state.shape)
    nexts = np.full(state.shape, -1, np.int64)
    for _ in range(order - 1):
        places, is_there = find(tables.keys, state * tables.num_words + words)
        is_hit = is_there & (nexts < 0) & (state > 0)
        result[is_hit] += tables.log_probs[places[is_hit]]
        nexts[is_hit] = tables.nexts[places[is_hit]]
        backs = (nexts < 0) & (state > 0)
        result[backs] += tables.backoffs[state[backs]]
        state[backs] = tables.fails[state[backs]]
    rest = nexts < 0
    result[rest] += tables.unigrams[words[rest]]
    nexts[rest] = 1 + words[rest] if order > 1 else 0
    return result, nexts


def find(keys: NDArray[Any], wanted: NDArray[Any]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return the place of each value in sorted keys, and True where it is there."""
    if not len(keys):
        return np.zeros(wanted.shape, np.int64), np.zeros(wanted.shape, bool)
    places = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return places, keys[places] == wanted


def _tables(num_words: int, levels: Sequence[Level]) -> Tables:
    first = levels[0]
    keys, probs = np.zeros(0, np.int64), np.zeros(0, np.float64)
    backoffs = np.concatenate([[0.0], first.backoffs])
    fails = np.zeros(1 + num_words, np.int64)
    begin = 1  # first node of the order below
    nexts = np.zeros(0, np.int64)
    unigrams = first.log_probs
    for order in range(2, len(levels) + 1):
        level = levels[order - 1]
        ids, level_probs, level_backoffs = level.ids, level.log_probs, level.backoffs
        contexts = _contexts(ids[:, :-1], keys, num_words)
        if contexts is None:
            return _tables(num_words, _with_beginnings(levels))
        level_keys = contexts * num_words + ids[:, -1]
        by_key = np.argsort(level_keys, kind="stable")
        level_keys, level_probs, level_backoffs = level_keys[by_key], level_probs[by_key], level_backoffs[by_key]
        contexts, last = contexts[by_key], ids[by_key, -1]
        lower = Tables(num_words, unigrams, keys, probs, nexts, backoffs, fails)  # type: ignore[arg-type]
        # An ending's probability is known by now, so n-grams that only lead to longer ones get theirs by back-off.
        below, endings = advance(lower, fails[contexts], last, order)
        implied = np.isnan(level_probs)
        level_probs[implied] = backoffs[contexts[implied]] + below[implied]
        is_last = order == len(levels)
        begin = 1 + num_words + len(keys)
        keys, probs = np.concatenate([keys, level_keys]), np.concatenate([probs, level_probs])
        nexts = np.concatenate([nexts, endings if is_last else begin + np.arange(len(level_keys))])
        if not is_last:
            backoffs, fails = np.concatenate([backoffs, level_backoffs]), np.concatenate([fails, endings])
    return Tables(
        num_words,
        unigrams.astype(np.float32),
        keys,
        probs.astype(np.float32),
        nexts.astype(np.int32),
        backoffs.astype(np.float32),
        fails.astype(np.int32),
    )


def _contexts(ids: NDArray[np.int64], keys: NDArray[np.int64], num_words: int) -> NDArray[np.int64] | None:
    """Return the node of each context, word by word from its beginning; None if one is not there."""
    nodes = 1 + ids[:, 0]
    for column in ids.T[1:]:
        places, is_there = find(keys, nodes * num_words + column)
        if not is_there.all():
            return None
        nodes = 1 + num_words + places
    return nodes


def _with_beginnings(levels: Sequence[Level]) -> list[Level]:
    """Return levels with all beginnings of longer n-grams: pruned models lack some. Their probabilities are not known
    yet."""
    complete = list(levels)
    for order in range(len(levels) - 1, 1, -1):
        level, longer = complete[order - 1], complete[order].ids[:, :-1]
        present = set(map(tuple, level.ids.tolist()))
        missing = [row for row in np.unique(longer, axis=0).tolist() if tuple(row) not in present]
        if missing:
            complete[order - 1] = Level(
                np.concatenate([level.ids, np.array(missing, np.int64)]),
                np.append(level.log_probs, np.full(len(missing), np.nan)),
                np.append(level.backoffs, np.zeros(len(missing))),
            )
    return complete
