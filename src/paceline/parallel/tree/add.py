"""Buckets of gradients that are added in a fixed order (`sums: exact`), whatever the number of ranks.

The order is the tree of `core/sum_tree.py`. On a rank grains are added like a binary counter: two grains that are
siblings in the tree share a buffer, and a sum that waits for its sibling is kept in a further one, so that 2^k grains
take k - 1 buffers more than one. The partial sums that are left on each rank are added by `TreeAllReduce`. Losses,
counts and the contributions of grains to batch-norm statistics are part of the last bucket and are added the same way.

Sums of zeros: a gradient that is -0.0 in all grains may be -0.0 on one rank and 0.0 on several.
"""

from __future__ import annotations

from time import perf_counter

import torch
from torch import Tensor

from paceline.parallel.step import RankNumbers
from paceline.parallel.strategy import GlobalBatch
from paceline.parallel.summed import Adder, BucketLayout, Buckets
from paceline.parallel.tree.all_reduce import TreeAllReduce
from paceline.parallel.tree.step_tree import StepTree, partial_tallies

ALIGN = 16
"""Alignment of gradients in a bucket, in elements. torch aligns its own so, and the kernels of norms depend on it."""


class TreeAdd(Adder):
    """Sums in the order of the tree, over the grains of this rank and over the ranks."""

    def __init__(self, all_reduce: TreeAllReduce, tally_dtype: torch.dtype, num_statistics: int = 0) -> None:
        """`num_statistics` is the length of a grain's contribution to batch-norm statistics."""
        self._all_reduce = all_reduce
        self.layout = BucketLayout(ALIGN, all_reduce.size, (tally_dtype,), tally_dtype, num_statistics)
        self._further: list[list[Tensor]] = []
        """Buffers besides the buckets themselves, each with a tensor per bucket."""
        self._num_done = 0
        """Grains of this rank that are done."""
        self._tallies: list[Tensor] = []
        """Tally of each partial sum of this rank."""
        self._adding_s = 0.0

    @property
    def order_s(self) -> float:  # type: ignore[override]
        return self._adding_s + self._all_reduce.order_s

    def begin(self, batch: GlobalBatch, buckets: Buckets) -> None:
        self._num_done = 0
        self._tree = StepTree.of(batch, self._all_reduce.rank, self._all_reduce.size)
        while len(self._further) < self._tree.schedule.num_buffers - 1:
            self._further.append([torch.zeros_like(bucket.flat) for bucket in buckets.all])

    def end_grain(self, buckets: Buckets) -> None:
        move = self._tree.schedule.moves[self._num_done]
        self._num_done += 1
        if not move.clears:  # the next grain is added to the same buffer, or this was the last one
            return
        began = perf_counter()
        for index, bucket in enumerate(buckets.all):
            bucket.collect()
            self._add(move.adds, index, buckets)
            if move.copies_to is not None:
                self._buffer(move.copies_to, index, buckets).copy_(bucket.flat)
            bucket.flat.zero_()
        self._adding_s += perf_counter() - began

    def poll(self) -> None:
        self._all_reduce.poll()

    def enter(self, numbers: RankNumbers, buckets: Buckets) -> None:
        self._tallies = partial_tallies(numbers, self._tree, buckets.tally, buckets.statistics_at)

    def start(self, index: int, buckets: Buckets) -> None:
        bucket, schedule = buckets.all[index], self._tree.schedule
        if schedule.moves and schedule.moves[-1].adds:
            began = perf_counter()
            self._add(schedule.moves[-1].adds, index, buckets)  # the tails are 0
            self._adding_s += perf_counter() - began
        partials = [self._buffer(place, index, buckets) for _, place in schedule.partials]
        if len(bucket.tail):
            for partial, tally in zip(partials[:-1], self._tallies[:-1], strict=True):
                partial[bucket.tail_at].copy_(tally)
        self._all_reduce.start(bucket.flat, partials, self._tree.layout)

    def start_tally(self, buckets: Buckets) -> None:
        self._all_reduce.start(buckets.tally, self._tallies, self._tree.layout)

    def finish(self) -> None:
        self._all_reduce.finish()

    def _add(self, adds: tuple[tuple[int, int], ...], index: int, buckets: Buckets) -> None:
        for to, source in adds:
            self._buffer(to, index, buckets).add_(self._buffer(source, index, buckets))

    def _buffer(self, place: int, index: int, buckets: Buckets) -> Tensor:
        """Return buffer `place` of the schedule, of one bucket; 0 is the bucket itself."""
        return self._further[place - 1][index] if place else buckets.all[index].flat
