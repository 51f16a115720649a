"""Reduce-scatter of FSDP2 whose sums have a fixed order (`sums: exact` with sharded weights).

FSDP2 passes the gradients of a block, divided into a piece per rank, to a reduce-scatter that we provide. FSDP itself
accumulates grains of a rank that are siblings in the tree; each such pair then arrives here and is kept, or added to a
kept sum. Only the last one of a step is sent: the pieces of all ranks by all-to-all, added in the order of the tree.
Before that, FSDP gets zeros. With `shard: node` the sums of a machine's ranks are then added over the machines, in the
same tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.core.sum_tree import Layout, combine, partial_spans, schedule
from paceline.parallel.tree.all_reduce import TreeAllReduce, add_rows, exchange, pieces
from paceline.parallel.tree.step_tree import StepTree
from paceline.parallel.wire import reduce_scatter_flat
from paceline.world.failure.flight_recorder import trail


class TreeSteps:
    """State of a step that the strategy shares with the collectives of all blocks."""

    def __init__(self, machines: Sequence[Sequence[int]], rank: int, across: TreeAllReduce | None) -> None:
        """`machines` are groups of ranks, each of which holds all pieces of the model."""
        self._machines, self._rank = machines, rank
        self.across = across
        """Sum of this rank's piece over the machines; None with one machine."""
        self.num_done = 0
        """Grains of this rank that are done."""
        self.is_final = False
        """True in the last backward of the step."""
        self.schedule = schedule(0, 0, 0)

    def begin(self, tree: StepTree) -> None:
        """Begin a step."""
        self.num_done, self.is_final, self.schedule = 0, False, tree.schedule
        spans = [
            ((rank, rank + 1),) if tree.is_per_rank else partial_spans(tree.starts, rank)
            for rank in range(len(tree.starts) - 1)
        ]
        num_leaves = tree.starts[-1]
        inside = [combine(tuple(spans[rank] for rank in ranks), num_leaves) for ranks in self._machines]
        self.inside: Layout = next(
            layout for layout, ranks in zip(inside, self._machines, strict=True) if self._rank in ranks
        )
        """Partial sums of the ranks of this machine."""
        self.between: Layout = combine(tuple(layout.spans for layout in inside), num_leaves)
        """Partial sums of the machines."""

    def end_grain(self) -> None:
        """Count a grain whose backward is done."""
        self.num_done += 1

    def last_backward(self) -> None:
        """Let the next backward send the sums."""
        self.is_final = True

    @property
    def hands_over(self) -> bool:
        """True if FSDP must hand over the gradients after the next grain: it completes a pair, or has no sibling."""
        moves = self.schedule.moves
        return self.num_done < len(moves) and moves[self.num_done].clears


class TreeReduceScatter:
    """Reduce-scatter of one block's gradients."""

    def __init__(self, steps: TreeSteps, by_host: bool, timeout: timedelta) -> None:
        """`by_host`: copy through main memory."""
        self._steps, self._by_host, self._timeout = steps, by_host, timeout
        self._kept: dict[int, Tensor] = {}
        """Sums that wait for others, by the number of their buffer in the schedule."""
        self._nodes: list[Tensor] = []
        """Partial sums of the ranks of this machine, added as far as possible."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        partials = self.add_grain(input_tensor)
        if partials:
            self._sum(output_tensor, partials, group, op)
        else:
            output_tensor.zero_()

    def add_grain(self, gradients: Tensor) -> list[Tensor]:
        """Keep gradients, or add them to a kept sum; return this rank's partial sums after its last grain."""
        steps, moves = self._steps, self._steps.schedule.moves
        if not steps.is_final:
            move = moves[steps.num_done]
            for to, source in move.adds:
                self._kept[to].add_(self._kept[source] if source else gradients)
            if move.copies_to is not None:
                self._kept[move.copies_to] = gradients.clone()
            return []
        for _, source in moves[-1].adds if moves else ():
            gradients.add_(self._kept[source])
        partials = [self._kept[place] if place else gradients for _, place in steps.schedule.partials]
        self._kept.clear()
        return partials

    def pop_nodes(self) -> list[Tensor]:
        """Return the partial sums of this machine, once."""
        nodes, self._nodes = self._nodes, []
        return nodes

    def _sum(self, output: Tensor, partials: list[Tensor], group: dist.ProcessGroup, op: Any) -> None:
        inside = self._steps.inside
        trail.note("sum of gradients", partials[0])
        if inside.is_plain and not self._by_host:
            reduce_scatter_flat(output, partials[0], group=group, op=op)
            self._nodes = [output]
            return
        sent = pieces(partials, group.size())
        sent = sent.cpu() if self._by_host else sent
        received = torch.empty(sum(inside.rows), output.numel(), dtype=sent.dtype, device=sent.device)
        exchange(received, sent, inside, len(partials), group, self._timeout)
        self._nodes = add_rows(received, inside)
        output.copy_(self._nodes[0].view_as(output))


class TreeSumAcross:
    """Sum of this rank's piece of a block's gradients over the machines; called in the last backward.

    If a machine has one rank, FSDP calls no reduce-scatter, and the gradients of grains arrive here.
    """

    def __init__(self, steps: TreeSteps, scatter: TreeReduceScatter, *, is_only: bool) -> None:
        self._steps, self._scatter, self._is_only = steps, scatter, is_only

    def __call__(self, gradients: Tensor) -> None:
        nodes = self._scatter.add_grain(gradients) if self._is_only else self._scatter.pop_nodes()
        if not self._steps.is_final:
            gradients.zero_()
        elif self._steps.across is not None:
            self._sum(gradients, nodes, self._steps.across)

    def _sum(self, gradients: Tensor, nodes: Sequence[Tensor], all_reduce: TreeAllReduce) -> None:
        length = all_reduce.pad(gradients.numel())
        rows = [torch.zeros(length, dtype=gradients.dtype, device=gradients.device) for _ in nodes]
        for row, node in zip(rows, nodes, strict=True):
            row[: gradients.numel()].copy_(node.view(-1))
        all_reduce.start(rows[-1], rows, self._steps.between)
        all_reduce.finish()
        gradients.copy_(rows[-1][: gradients.numel()].view_as(gradients))
        if gradients.is_cuda:
            # Allocated on the stream of the reduce-scatter, which must not reuse the memory before this is done.
            gradients.record_stream(torch.cuda.current_stream(gradients.device))
