"""Tree of sums of one step as a rank sees it, and the numbers of a rank's grains added in its order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from paceline.core.sum_tree import Layout, Schedule, Starts, fold, layout, schedule
from paceline.parallel.step import NUM_TALLY, RankNumbers, write
from paceline.parallel.strategy import GlobalBatch


def tally_dtype(parameters: Sequence[Tensor]) -> torch.dtype:
    """Return the dtype in which losses and counts are added; it is the same on any number of ranks."""
    is_double = all(parameter.dtype == torch.float64 for parameter in parameters)
    return torch.float64 if is_double else torch.float32


class StepTree(NamedTuple):
    """Tree of a step. Its leaves are the grains of all ranks, if ranks hold consecutive blocks of them.

    Otherwise (every rank has its own stream of grains) each rank adds a tree of its own grains, and the ranks are the
    leaves of a second one.
    """

    starts: Starts
    """First leaf of each rank, then the number of leaves."""
    is_per_rank: bool
    """True if every rank has a tree of its own grains."""
    first: int
    """First leaf of this rank in the tree that it adds its grains in."""
    num_leaves: int
    schedule: Schedule
    """How this rank adds its grains."""
    layout: Layout
    """How the partial sums of the ranks are added."""

    @classmethod
    def of(cls, batch: GlobalBatch, rank: int, num_ranks: int) -> StepTree:
        """Return the tree of a batch, for one rank."""
        if batch.starts is None:
            starts, num_grains = tuple(range(num_ranks + 1)), len(batch.grains)
            return cls(starts, True, 0, num_grains, schedule(num_grains, 0, num_grains), layout(starts))
        first, end = batch.starts[rank : rank + 2]
        num_leaves = batch.starts[-1]
        return cls(batch.starts, False, first, num_leaves, schedule(num_leaves, first, end), layout(batch.starts))


class PartialNumbers(NamedTuple):
    """Sums of losses, counts and statistics over the grains of a node."""

    loss: Any
    count: Any
    statistics: Tensor | None


def fold_numbers(numbers: RankNumbers, num_leaves: int, first: int, dtype: torch.dtype) -> list[PartialNumbers]:
    """Add the numbers of a rank's grains, the first of which is leaf `first`, as far as the tree allows."""
    grains = numbers.grains
    scalar = np.float64 if dtype == torch.float64 else np.float32
    counts = [grain.count.to(dtype) if isinstance(grain.count, Tensor) else scalar(grain.count) for grain in grains]
    losses = fold([grain.loss.to(dtype) for grain in grains], num_leaves, first)
    statistics = [grain.statistics for grain in grains]
    sums: Sequence[Tensor | None] = [None] * len(losses)
    if statistics and statistics[0] is not None:
        sums = fold(statistics, num_leaves, first)
    return [PartialNumbers(*each) for each in zip(losses, fold(counts, num_leaves, first), sums, strict=True)]


def partial_tallies(numbers: RankNumbers, tree: StepTree, last: Tensor, statistics_at: slice) -> list[Tensor]:
    """Return a tally for each of this rank's partial sums; `last`, which is overwritten, is that of the last one.

    The flags of the rank are only in the last one.
    """
    parts = fold_numbers(numbers, tree.num_leaves, tree.first, last.dtype)
    assert len(parts) <= len(tree.schedule.partials)
    last.zero_()
    tallies = [torch.zeros_like(last) for _ in parts[1:]] + [last]
    for part, tally in zip(parts, tallies, strict=False):
        write(tally[0], part.loss)
        write(tally[1], part.count)
        if part.statistics is not None:
            tally[statistics_at].copy_(part.statistics)
    *_, with_data, to_stop = last[:NUM_TALLY].unbind()
    write(with_data, numbers.has_data)
    write(to_stop, numbers.wants_stop)
    return tallies
