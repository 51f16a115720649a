"""Gradients and numbers of a step that are added in one order (`sums: exact`), whatever the number of ranks.

The order is the tree of `core/sum_tree.py`. Inside of a rank grains are added as a binary counter would: two grains
that are neighbours in the tree share a buffer, and a sum that waits for another one is put aside, so that 2^k grains
take k - 1 buffers more than one. What is then left on each rank is added by `TreeSum`. Losses, counts and what grains
contribute to batch-norm statistics take the same way at the end of the last bucket.

Sums of zeros: a gradient that is -0.0 in all grains may be -0.0 on one rank and 0.0 on several.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from paceline.core.sum_tree import Layout, Schedule, fold, layout, schedule
from paceline.core.torch_private import foreach_add_, foreach_copy_, foreach_zero_
from paceline.observe.clock import Clock
from paceline.parallel.step import RankNumbers, Sums, Tally
from paceline.parallel.strategy import Alone, GlobalBatch
from paceline.parallel.summed import BUCKET_BYTES, TALLY, Bucket, Summed, grouped, put
from paceline.parallel.tree_sum import TreeSum
from paceline.world.link import Link

ALIGN = 16
"""Numbers that gradients in a bucket are aligned to, as those are that torch makes: kernels add up norms by address."""
EXACT_COUNT = 2**24
"""Whole numbers below it are the same in any dtype that counts are added in."""


def tally_dtype(parameters: Sequence[Tensor]) -> torch.dtype:
    """Return the dtype that losses and counts are added in: the same on any number of ranks."""
    is_double = all(parameter.dtype == torch.float64 for parameter in parameters)
    return torch.float64 if is_double else torch.float32


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


class AloneInTree(Alone):
    """One rank, which adds its grains in the order in which several ranks would."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        super().__init__(parameters)
        self._dtype = tally_dtype(self.parameters)
        self._schedule: Schedule = schedule(0, 0, 0)
        self._place = 0
        self._aside: dict[int, list[Tensor | None]] = {}
        self._is_fixed = False
        """True if gradients have addresses that must not change: recorded backwards add to them."""

    def begin(self, batch: GlobalBatch) -> None:
        super().begin(batch)
        num_grains = len(batch.grains)
        self._schedule, self._place = schedule(num_grains, 0, num_grains), 0

    def gradient_groups(self) -> Sequence[Mapping[Tensor, Tensor]]:
        self._is_fixed = True
        return ()

    def end_grain(self) -> None:
        move = self._schedule.moves[self._place]
        self._place += 1
        if not move.adds and not move.clears:
            return
        began = perf_counter()
        gradients = [parameter.grad for parameter in self.parameters]
        for to, source in move.adds:
            if to == 0:
                for parameter, total in zip(self.parameters, _added(gradients, self._aside[source]), strict=True):
                    parameter.grad = total
                gradients = [parameter.grad for parameter in self.parameters]
            else:
                self._aside[to] = _added(self._aside[to], self._aside[source] if source else gradients)
        if move.copies_to is not None:
            self._aside[move.copies_to] = self._copied(gradients, move.copies_to) if self._is_fixed else gradients
        if move.clears:
            self._clear(gradients)
        self.order_s += perf_counter() - began

    def _copied(self, gradients: Sequence[Tensor | None], number: int) -> list[Tensor | None]:
        old = self._aside.get(number) or [None] * len(gradients)
        copies = [
            torch.empty_like(gradient) if copy is None and gradient is not None else copy
            for gradient, copy in zip(gradients, old, strict=True)
        ]
        known = [copy for copy in copies if copy is not None]
        present = [gradient for gradient in gradients if gradient is not None]
        if len(present) < len(known):  # parameters that this grain does not use, but one before did
            foreach_zero_(known)
        if present:
            pairs = zip(copies, gradients, strict=True)
            foreach_copy_([copy for copy, each in pairs if copy is not None and each is not None], present)
        return copies

    def _clear(self, gradients: Sequence[Tensor | None]) -> None:
        if not self._is_fixed:
            for parameter in self.parameters:
                parameter.grad = None
        elif present := [gradient for gradient in gradients if gradient is not None]:
            foreach_zero_(present)

    def reduce(self, numbers: RankNumbers) -> Sums:
        if not self._is_fixed:
            self._aside.clear()
        num_grains = len(numbers.grains)
        if num_grains == 0:
            return Sums(Tally(0.0, 0))
        if num_grains == 1 and not isinstance(
            numbers.grains[0].count, Tensor
        ):  # the usual step, without the arithmetic
            loss, count, statistics = numbers.grains[0]
            if -EXACT_COUNT < count < EXACT_COUNT and count == int(count):
                return Sums(Tally(loss.to(self._dtype), count), statistics)
        ((loss, count, statistics),) = fold_numbers(numbers, num_grains, 0, self._dtype)
        whole = numbers.in_turn().count
        if not isinstance(count, Tensor):
            count = whole if count == whole else float(count)
        return Sums(Tally(loss, count), statistics)


def _added(to: Sequence[Tensor | None], source: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Add gradients, in place; where one of two is missing the other stays."""
    pairs = [(a, b) for a, b in zip(to, source, strict=True) if a is not None and b is not None]
    if pairs:
        foreach_add_([a for a, _ in pairs], [b for _, b in pairs])
    return [b if a is None else a for a, b in zip(to, source, strict=True)]


class SummedInTree(Summed):
    """`reduce: grad` with `sums: exact` on several ranks."""

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        link: Link,
        tree_sum: TreeSum,
        *,
        num_statistics: int = 0,
        bucket_bytes: int = BUCKET_BYTES,
        clock: Clock | None = None,
    ) -> None:
        """`num_statistics` is the length of what a grain contributes to batch-norm statistics."""
        self._tree_sum, self._num_statistics = tree_sum, num_statistics
        self._dtype = tally_dtype(list(parameters))
        super().__init__(parameters, link, bucket_bytes, clock=clock)
        self._rank = link.world.rank
        self._adding_s = 0.0
        self._aside: list[list[Tensor]] = []
        """Further buffers, each with a tensor per bucket."""
        self._place = 0
        self._leaves = (0, 0)
        self._layout: Layout = layout(tuple(range(tree_sum.size + 1)))
        self._schedule: Schedule = schedule(0, 0, 0)
        self._partial_tallies: list[Tensor] = []

    def _make_buckets(self, bucket_bytes: int) -> list[Bucket]:
        groups = grouped(self.parameters, bucket_bytes)
        rides = groups[-1][0][1].dtype == self._dtype
        return [
            Bucket(
                group,
                self._num_extra if rides and number == len(groups) - 1 else 0,
                align=ALIGN,
                multiple_of=self._tree_sum.size,
            )
            for number, group in enumerate(groups)
        ]

    def _make_tally(self, device: torch.device) -> Tensor:
        return torch.zeros(self._tree_sum.pad(self._num_extra), dtype=self._dtype, device=device)

    @property
    def _num_extra(self) -> int:
        return TALLY + len(self.parameters) + self._num_statistics

    def begin(self, batch: GlobalBatch) -> None:
        super().begin(batch)
        self._place = 0
        num_grains, size = len(batch.grains), self._tree_sum.size
        if batch.starts is None:  # every rank has grains of its own, of which the others know nothing
            self._layout = layout(tuple(range(size + 1)))
            self._leaves, first, end = (0, num_grains), 0, num_grains
        else:
            self._layout = layout(batch.starts)
            first, end = batch.starts[self._rank : self._rank + 2]
            self._leaves = first, batch.starts[-1]
        self._schedule = schedule(self._leaves[1], first, end)
        while len(self._aside) < self._schedule.num_buffers - 1:
            self._aside.append([torch.zeros_like(bucket.flat) for bucket in self._buckets])

    def end_grain(self) -> None:
        move = self._schedule.moves[self._place]
        self._place += 1
        if not move.clears:  # goes on in the same buffer, or was the last
            return
        began = perf_counter()
        for number, bucket in enumerate(self._buckets):
            bucket.collect()
            for to, source in move.adds:
                self._buffer(to, number).add_(self._buffer(source, number))
            if move.copies_to is not None:
                self._buffer(move.copies_to, number).copy_(bucket.flat)
            bucket.flat.zero_()
        self._adding_s += perf_counter() - began

    def _buffer(self, place: int, bucket: int) -> Tensor:
        return self._aside[place - 1][bucket] if place else self._buckets[bucket].flat

    def _send(self, number: int) -> None:
        flat, is_last = self._buckets[number].flat, number == len(self._buckets) - 1
        if self._schedule.moves and self._schedule.moves[-1].adds:
            began = perf_counter()
            for to, source in self._schedule.moves[-1].adds:  # their tails are 0
                self._buffer(to, number).add_(self._buffer(source, number))
            self._adding_s += perf_counter() - began
        partials = [self._buffer(place, number) for _, place in self._schedule.partials]
        if is_last and self._tally_rides:
            for partial, tally in zip(partials[:-1], self._partial_tallies[:-1], strict=True):
                partial[self._buckets[number].tail_at].copy_(tally)
        self._tree_sum.start(flat, partials, self._layout)

    def _send_tally(self) -> None:
        self._tree_sum.start(self._tally, [*self._partial_tallies[:-1], self._tally], self._layout)

    def _poll(self) -> None:
        self._tree_sum.poll()

    def _enter(self, numbers: RankNumbers) -> None:
        """Put the numbers of each partial sum in its place: the last one's, and flags, where fast sums have theirs."""
        first, num_leaves = self._leaves
        parts = fold_numbers(numbers, num_leaves, first, self._dtype)
        assert len(parts) <= len(self._schedule.partials)
        self._tally.zero_()
        self._partial_tallies = [torch.zeros_like(self._tally) for _ in parts[1:]] + [self._tally]
        for part, tally in zip(parts, self._partial_tallies, strict=False):
            put(tally[0], part.loss)
            put(tally[1], part.count)
            if part.statistics is not None:
                self._statistics_of(tally).copy_(part.statistics)
        put(self._tally_places[2], numbers.has_data)
        put(self._tally_places[3], numbers.wants_stop)

    def _wait(self) -> None:
        self._tree_sum.finish()
        self.order_s = self._adding_s + self._tree_sum.order_s

    def reduce(self, numbers: RankNumbers) -> Sums:
        tally, _ = super().reduce(numbers)
        return Sums(tally, self._statistics_of(self._tally).clone() if self._num_statistics else None)

    def _statistics_of(self, tally: Tensor) -> Tensor:
        start = TALLY + len(self.parameters)
        return tally[start : start + self._num_statistics]
