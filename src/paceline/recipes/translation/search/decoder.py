"""Writing: the best next token (greedy), or the best of several beginnings (beam search), for a batch of sentences."""

from __future__ import annotations

from typing import Protocol, TypeVar

import torch
from torch import Tensor

from paceline.recipes.translation.text.vocabulary import BEGIN, END, PAD


class State(Protocol):
    """Position of sentences that are being written, one per row."""

    def select(self, rows: Tensor) -> None:
        """Keep these rows, in this order; a row may be there several times."""

    def reorder(self, rows: Tensor) -> None:
        """Put rows in another order that exchanges only rows of one source."""


S = TypeVar("S", bound=State)


class Writer(Protocol[S]):
    """A network that writes one token after the other."""

    def begin(self, source: Tensor) -> S: ...

    def step(self, tokens: Tensor, state: S) -> Tensor:
        """Return scores of the token that follows, (rows, vocabulary)."""


def most_tokens(source: Tensor, ratio: float, extra: int = 10) -> Tensor:
    """Return how many tokens may be written for each source, the end not counted."""
    return ((source != PAD).sum(1) * ratio).long() + extra


def greedy(model: Writer[S], source: Tensor, longest: Tensor) -> list[list[int]]:
    """Return the tokens of each sentence, always the likeliest next, at most so many."""
    state = model.begin(source)
    written: list[list[int]] = [[] for _ in range(len(source))]
    rows, limits = list(range(len(source))), longest.tolist()
    tokens = torch.full((len(source),), BEGIN, dtype=torch.int64, device=source.device)
    while rows:
        tokens = _without_marks(model.step(tokens, state)).argmax(1)
        going: list[int] = []
        for place, token in enumerate(tokens.tolist()):
            line = written[rows[place]]
            if token != END and len(line) < limits[rows[place]]:
                line.append(token)
                going.append(place)
        if len(going) < len(rows):
            rows = [rows[place] for place in going]
            kept = torch.tensor(going, dtype=torch.long, device=source.device)
            tokens = tokens[kept]
            if rows:
                state.select(kept)
    return written


def length_penalty(length: Tensor | float, alpha: float) -> Tensor | float:
    """Return the divisor of a sum of log-probabilities (Wu et al. 2016): ((5 + length) / 6) ** alpha."""
    return ((5.0 + length) / 6.0) ** alpha


def beam_search(
    model: Writer[S], source: Tensor, longest: Tensor, beam: int, alpha: float = 0.6
) -> list[tuple[list[int], float]]:
    """Return the tokens and the score of the best hypothesis of each sentence.

    A score is the log-probability, with that of the end, over the length penalty of all tokens. A sentence is done when
    no hypothesis that goes on can still become better than the best that has ended, so that a beam as wide as there are
    beginnings finds what an exhaustive search finds.
    """
    device, number = source.device, len(source)
    state = model.begin(source)
    state.select(torch.arange(number, device=device).repeat_interleave(beam))
    sentences = list(range(number))
    best: list[tuple[list[int], float]] = [([], -float("inf"))] * number
    limits = longest.to(device)
    log_probs = torch.full((number, beam), -float("inf"), dtype=torch.float32, device=device)
    log_probs[:, 0] = 0.0
    lines = torch.full((number, beam, 1), BEGIN, dtype=torch.int64, device=device)
    while sentences:
        length = lines.shape[2]  # of what is written after this step, the end counted
        scores = _without_marks(model.step(lines[:, :, -1].flatten(), state).float().log_softmax(1))
        totals = log_probs.unsqueeze(2) + scores.unflatten(0, (-1, beam))  # (sentences, beam, vocabulary)
        is_last = limits < length
        ended = totals[:, :, END] / length_penalty(float(length), alpha)
        top_ended, place = ended.max(1)
        _note_ended(best, sentences, lines, top_ended.tolist(), place.tolist())
        totals[:, :, END] = -float("inf")
        vocabulary = totals.shape[2]
        log_probs, chosen = totals.flatten(1).topk(beam, dim=1)
        parents, tokens = chosen // vocabulary, chosen % vocabulary
        lines = torch.cat([lines.gather(1, parents.unsqueeze(2).expand(-1, -1, length)), tokens.unsqueeze(2)], 2)
        # The most that a hypothesis can still reach: no further loss, and the longest that it may become.
        bounds = (log_probs[:, 0] / length_penalty((limits + 1).float(), max(alpha, 0.0))).tolist()
        going = [
            at
            for at, (bound, last) in enumerate(zip(bounds, is_last.tolist(), strict=True))
            if not last and bound > best[sentences[at]][1]
        ]
        rows = torch.arange(len(sentences), device=device).unsqueeze(1) * beam + parents
        if len(going) == len(sentences):
            state.reorder(rows.flatten())
            continue
        kept = torch.tensor(going, dtype=torch.long, device=device)
        sentences = [sentences[at] for at in going]
        log_probs, lines, limits = log_probs[kept], lines[kept], limits[kept]
        if sentences:
            state.select(rows[kept].flatten())
    return best


def _note_ended(
    best: list[tuple[list[int], float]],
    sentences: list[int],
    lines: Tensor,
    scores: list[float],
    places: list[int],
) -> None:
    """Remember the hypotheses that end now and are better than what has ended before."""
    better = [at for at, score in enumerate(scores) if score > best[sentences[at]][1]]
    for at in better:
        best[sentences[at]] = lines[at, places[at], 1:].tolist(), scores[at]


def _without_marks(scores: Tensor) -> Tensor:
    """Return scores in which padding and the beginning cannot be written."""
    scores = scores.clone()
    scores[:, PAD] = -float("inf")
    scores[:, BEGIN] = -float("inf")
    return scores
