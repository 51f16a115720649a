"""A step's items and draws, cut evenly into as many pieces as its batch has grains: who has which position.

`pieces` says which rank has which grain. Sizes differ by at most one, larger ones first, as a plan without lengths cuts
its batches, so the pieces do not depend on the number of ranks; only who has them does.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]
Pieces = tuple[int, ...]
"""The rank of each grain of a step."""


@dataclass(frozen=True)
class Cut:
    """The positions of one step, or of one draw."""

    ranks: Integers
    """Of each position."""
    counts: tuple[int, ...]
    """Positions of each rank."""
    mine: Integers
    """This rank's positions, ascending."""
    sizes: tuple[int, ...]
    """Of each of this rank's pieces."""


@lru_cache(maxsize=64)
def cut(num_positions: int, pieces: Pieces, rank: int, num_ranks: int) -> Cut:
    """Cut positions 0..n-1 into these pieces, as seen by one rank."""
    size, num_larger = divmod(num_positions, len(pieces))
    sizes = np.full(len(pieces), size)
    sizes[:num_larger] += 1
    ranks = np.repeat(np.array(pieces, np.int64), sizes)
    counts = np.bincount(ranks, minlength=num_ranks).tolist()
    own = tuple(int(size) for size, owner in zip(sizes, pieces, strict=True) if owner == rank)
    return Cut(ranks, tuple(counts), np.flatnonzero(ranks == rank), own)
