"""Strategy of sharded training whose sums have one order (`sums: exact` with `shard: full` or `node`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from paceline.core.sum_tree import layout, schedule
from paceline.observe.clock import Clock
from paceline.parallel.in_tree import fold_numbers, tally_dtype
from paceline.parallel.sharded import Sharded, Shards
from paceline.parallel.step import RankNumbers, Sums, Tally
from paceline.parallel.strategy import GlobalBatch
from paceline.parallel.summed import TALLY, put
from paceline.parallel.tree_scatter import TreeSteps
from paceline.parallel.tree_sum import TreeSum
from paceline.world.link import Link


class ShardedInTree(Sharded):
    """`reduce: grad` with `shard: full` or `node`, and `sums: exact`."""

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        link: Link,
        shards: Shards,
        steps: TreeSteps,
        tree_sum: TreeSum,
        *,
        num_statistics: int = 0,
        clock: Clock | None = None,
    ) -> None:
        super().__init__(parameters, link, shards, clock)
        self._steps, self._tree_sum, self._num_statistics = steps, tree_sum, num_statistics
        self._dtype = tally_dtype(self.parameters)
        self._leaves = (0, 0)
        self._layout = layout(tuple(range(link.world.size + 1)))

    def begin(self, batch: GlobalBatch) -> None:
        super().begin(batch)
        num_grains, size, rank = len(batch.grains), self._link.world.size, self._link.world.rank
        if batch.starts is None:  # every rank has grains of its own, of which the others know nothing
            self._leaves = 0, num_grains
            starts, own = tuple(range(size + 1)), schedule(num_grains, 0, num_grains)
        else:
            starts = batch.starts
            self._leaves, own = (starts[rank], starts[-1]), schedule(starts[-1], *starts[rank : rank + 2])
        self._layout = layout(starts)
        self._steps.begin(starts, own, own=batch.starts is None)
        self._set_sync()

    def end_grain(self) -> None:
        self._steps.place += 1
        if not self._steps.is_final:
            self._set_sync()

    def _set_sync(self) -> None:
        """Let FSDP hand over the gradients of the next grain if it is the second of two neighbours, or has none."""
        moves, place = self._steps.schedule.moves, self._steps.place
        self._shards.model.set_requires_gradient_sync(place < len(moves) and moves[place].clears)

    def last_backward(self) -> None:
        self._steps.is_final = True
        super().last_backward()

    def reduce(self, numbers: RankNumbers) -> Sums:
        first, num_leaves = self._leaves
        length = TALLY + self._num_statistics
        parts = fold_numbers(numbers, num_leaves, first, self._dtype)
        rows = [self._row(length) for _ in parts] or [self._row(length)]
        for row, part in zip(rows, parts, strict=False):
            put(row[0], part.loss)
            put(row[1], part.count)
            if part.statistics is not None:
                row[TALLY:length].copy_(part.statistics)
        put(rows[-1][2], numbers.has_data)
        put(rows[-1][3], numbers.wants_stop)
        self._tree_sum.start(rows[-1], rows, self._layout)
        self._check_use()
        self._tree_sum.finish()
        if self._clock is not None:
            self._clock.meet()
        return Sums(Tally(*rows[-1][:TALLY].unbind()), rows[-1][TALLY:length] if self._num_statistics else None)

    def _row(self, length: int) -> Tensor:
        return torch.zeros(self._tree_sum.pad(length), dtype=self._dtype, device=self._link.device)

    def total_norm(self, gradients: Sequence[Tensor], norm: Callable[[Sequence[Tensor]], Tensor]) -> Tensor:
        """Return the norm of all gradients as one rank that has all of them would compute it."""
        whole: Tensor = torch.linalg.vector_norm(self._shards.whole_norms(gradients), 2)
        return whole
