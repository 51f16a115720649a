"""Places at which each token of a vocabulary occurs: what an embedding's gradient is added up by, in a fixed order."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

PIECE = 32
"""Places that one program adds up, of one token."""


class Occurrences(NamedTuple):
    """Made on the host, of a batch's tokens; all of it has as many entries as there are tokens, whatever they are."""

    order: Tensor
    """(tokens) int32: places, those of each token together, in their order."""
    pieces: Tensor
    """(tokens + 1) int32: where pieces of at most `PIECE` places of one token begin in `order`, then its end."""
    of_tokens: Tensor
    """(tokens + 1) int32: where the pieces of each token that occurs begin, then their end."""
    tokens: Tensor
    """(tokens) int32: the tokens that occur, then zeros."""

    @classmethod
    def of(cls, tokens: NDArray[np.int64]) -> Occurrences:
        """Return those of a batch, on the CPU."""
        size = len(tokens)
        order = _stable_order(tokens)
        ordered = tokens[order]
        is_start = np.ones(size + 1, np.bool_)  # the end, too
        np.not_equal(ordered[1:], ordered[:-1], out=is_start[1:-1])
        bounds = np.flatnonzero(is_start)
        starts, counts = bounds[:-1], bounds[1:] - bounds[:-1]
        num_pieces = -(-counts // PIECE)
        of_tokens = np.zeros(len(bounds), np.int64)
        np.cumsum(num_pieces, out=of_tokens[1:])
        within = np.arange(of_tokens[-1]) - np.repeat(of_tokens[:-1], num_pieces)
        pieces = np.repeat(starts, num_pieces) + PIECE * within
        return cls(
            torch.from_numpy(order.astype(np.int32)),
            torch.from_numpy(_filled(pieces, size + 1, size)),
            torch.from_numpy(_filled(of_tokens, size + 1, int(of_tokens[-1]))),
            torch.from_numpy(_filled(ordered[starts], size, 0)),
        )


def _stable_order(tokens: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return what sorts tokens and leaves equal ones in their order: by 16 bits at a time, which numpy sorts in linear
    time."""
    order = np.argsort(tokens.astype(np.uint16), kind="stable")
    most = int(tokens.max(initial=0))
    for shift in range(16, most.bit_length(), 16):
        order = order[np.argsort((tokens[order] >> shift).astype(np.uint16), kind="stable")]
    return order


def _filled(values: NDArray[np.int64], size: int, rest: int) -> NDArray[np.int32]:
    filled = np.full(size, rest, np.int32)
    filled[: len(values)] = values
    return filled


def add_rows(table: Tensor, tokens: Tensor, rows: Tensor, occurrences: Occurrences, scale: float) -> None:
    """Add `scale` times each row to that of its token in (vocabulary, width)."""
    if table.is_cuda:
        from paceline.speed.layers.kernels import embedded_rows

        embedded_rows.add_rows(table, rows, occurrences, scale)
    else:
        table.index_add_(0, tokens, rows.to(table.dtype), alpha=scale)
