"""Collectives of sharded training whose sums have one order: they take the place of those of FSDP2.

FSDP2 hands the gradients of a block, cut into a piece per rank, to a reduce-scatter of ours. Grains of a rank that are
neighbours in the tree are accumulated by FSDP; each such pair then comes here, is put aside or added to what was, and
only the last one of a step is sent: all ranks' pieces by all-to-all, added as the tree says. FSDP gets zeros before.
With `shard: node` what a machine's ranks have added up goes on to the other machines, in the same tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.core.sum_tree import Layout, Schedule, combine, partial_spans, schedule
from paceline.core.torch_private import foreach_norm
from paceline.parallel.tree_sum import TreeSum, add_rows, exchange, pieces
from paceline.parallel.wire import goes_by_host, reduce_scatter_flat
from paceline.world.failure.flight_recorder import trail


class TreeSteps:
    """State of a step that the strategy shares with the collectives of all blocks."""

    def __init__(self, machines: Sequence[Sequence[int]], rank: int, across: TreeSum | None) -> None:
        """`machines` are the ranks that have the pieces of a model, each time."""
        self._machines, self._rank = machines, rank
        self.across = across
        """Sums over the machines, of this rank's piece; None with one."""
        self.place = 0
        """Grains of this rank that are done."""
        self.is_final = False
        self.begin(tuple(range(sum(map(len, machines)) + 1)), schedule(0, 0, 0), own=True)

    def begin(self, starts: tuple[int, ...], own_schedule: Schedule, *, own: bool = False) -> None:
        """Begin a step; with `own` every rank is a leaf."""
        self.place, self.is_final, self.schedule = 0, False, own_schedule
        spans = [((rank, rank + 1),) if own else partial_spans(starts, rank) for rank in range(len(starts) - 1)]
        inside = [combine(tuple(spans[rank] for rank in ranks), starts[-1]) for ranks in self._machines]
        self.inside: Layout = next(
            each for each, ranks in zip(inside, self._machines, strict=True) if self._rank in ranks
        )
        self.between: Layout = combine(tuple(each.spans for each in inside), starts[-1])


class TreeReduceScatter:
    """Sum of a block's gradients, of which each rank gets its piece."""

    def __init__(self, steps: TreeSteps, by_host: bool, timeout: timedelta) -> None:
        self._steps, self._by_host, self._timeout = steps, by_host, timeout
        self._aside: dict[int, Tensor] = {}
        self.left: list[Tensor] = []
        """Nodes that the machine has added up, where there are others."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        partials = self.take(input_tensor)
        if partials:
            self._sum(output_tensor, partials, group, op)
        else:
            output_tensor.zero_()

    def take(self, gradients: Tensor) -> list[Tensor]:
        """Put gradients aside, or add them to what was; return this rank's partial sums after its last grain."""
        steps, moves = self._steps, self._steps.schedule.moves
        if not steps.is_final:
            move = moves[steps.place]
            for to, source in move.adds:
                self._aside[to].add_(self._aside[source] if source else gradients)
            if move.copies_to is not None:
                self._aside[move.copies_to] = gradients.clone()
            return []
        for _, source in moves[-1].adds if moves else ():
            gradients.add_(self._aside[source])
        partials = [self._aside[place] if place else gradients for _, place in steps.schedule.partials]
        self._aside.clear()
        return partials

    def _sum(self, output: Tensor, partials: list[Tensor], group: dist.ProcessGroup, op: Any) -> None:
        inside = self._steps.inside
        trail.note("sum of gradients", partials[0])
        if inside.is_plain and not self._by_host:
            reduce_scatter_flat(output, partials[0], group=group, op=op)
            self.left = [output]
            return
        sent = pieces(partials, group.size())
        sent = sent.cpu() if self._by_host else sent
        received = torch.empty(sum(inside.rows), output.numel(), dtype=sent.dtype, device=sent.device)
        exchange(received, sent, inside, len(partials), group, self._timeout)
        self.left = add_rows(received, inside)
        output.copy_(self.left[0].view_as(output))


class TreeSumAcross:
    """Sum of a machine's gradients over the machines, of the piece that a rank has; called in the last backward.

    Where a machine has one rank, FSDP calls no reduce-scatter, and the gradients of grains come here.
    """

    def __init__(self, steps: TreeSteps, scatter: TreeReduceScatter, *, is_only: bool) -> None:
        self._steps, self._scatter, self._is_only = steps, scatter, is_only

    def __call__(self, gradients: Tensor) -> None:
        if self._is_only:
            self._scatter.left = self._scatter.take(gradients)
        if not self._steps.is_final:
            gradients.zero_()
        elif self._steps.across is not None:
            self._sum(gradients, self._steps.across)
        self._scatter.left = []

    def _sum(self, gradients: Tensor, tree_sum: TreeSum) -> None:
        length = tree_sum.pad(gradients.numel())
        rows = [torch.zeros(length, dtype=gradients.dtype, device=gradients.device) for _ in self._scatter.left]
        for row, part in zip(rows, self._scatter.left, strict=True):
            row[: gradients.numel()].copy_(part.view(-1))
        tree_sum.start(rows[-1], rows, self._steps.between)
        tree_sum.finish()
        gradients.copy_(rows[-1][: gradients.numel()].view_as(gradients))
        if gradients.is_cuda:
            # It was made on the stream of the reduce-scatter, which must not give its memory away before this is done.
            gradients.record_stream(torch.cuda.current_stream(gradients.device))


def whole_norms(tensors: Sequence[Tensor], dtype: torch.dtype | None, group: dist.ProcessGroup) -> Tensor:
    """Return the norms of whole tensors, of which every rank has a piece, as one rank would compute them.

    Every tensor is brought together on one rank, whose numbers all get: as many bytes as a rank has, and no more
    memory than the largest tensors take. All ranks must call it.
    """
    rank, size = group.rank(), group.size()
    device = tensors[0].device
    road = torch.device("cpu") if goes_by_host(group, device) else device
    lengths = torch.tensor([tensor.numel() for tensor in tensors], dtype=torch.int64, device="cpu")
    everyone = [torch.empty_like(lengths) for _ in range(size)]
    trail.note("gather of sizes")
    dist.all_gather(everyone, lengths, group=group)
    table = torch.stack(everyone)  # (ranks, tensors)
    owners = owners_of(table.sum(0).tolist(), size)
    owned = [[number for number, owner in enumerate(owners) if owner == each] for each in range(size)]
    order = [number for numbers in owned for number in numbers]
    sent = torch.cat([tensors[number].detach().reshape(-1) for number in order]).to(road)
    send_sizes = [int(lengths[numbers].sum()) for numbers in owned]
    receive_sizes = [int(table[other, owned[rank]].sum()) for other in range(size)]
    received = torch.empty(sum(receive_sizes), dtype=sent.dtype, device=road)
    trail.note("all_to_all of norms", sent)
    dist.all_to_all_single(received, sent, receive_sizes, send_sizes, group=group)
    parts = [
        piece.split(table[other, owned[rank]].tolist())
        for other, piece in enumerate(received.to(device).split(receive_sizes))
    ]
    kind = dtype or tensors[0].dtype
    norms = torch.zeros(len(tensors), dtype=kind, device=device)
    for place, number in enumerate(owned[rank]):
        whole = torch.cat([each[place] for each in parts])
        norms[number] = foreach_norm([whole], 2, dtype)[0]
    dist.all_reduce(norms, group=group)  # one rank has each of them, the others 0
    return norms


def owners_of(sizes: Sequence[int], num_ranks: int) -> list[int]:
    """Return a rank for each tensor, the largest first, each to the rank that has least."""
    loads, owners = [0] * num_ranks, [0] * len(sizes)
    for number in sorted(range(len(sizes)), key=lambda number: -sizes[number]):
        owners[number] = loads.index(min(loads))
        loads[owners[number]] += sizes[number]
    return owners
