"""Computation on whole tensors of which every rank has rows: each is brought to one rank, and its result back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.parallel.tree_scatter import owners_of
from paceline.parallel.wire import goes_by_host
from paceline.world.failure.flight_recorder import trail


class WholeTensors:
    """Exchange of the pieces of sharded tensors, for an optimizer that needs whole ones (`join_matrices` of Muon).

    Two all-to-all per call, each of as many bytes as a rank has. A tensor has one owner, so a result is computed once,
    of the bits that one process would have.
    """

    def __init__(self, group: dist.ProcessGroup, shapes: Mapping[int, torch.Size]) -> None:
        """`shapes` has the shape of the whole tensor by the `id` of this rank's piece of the weight."""
        self._group, self._shapes = group, shapes

    def __call__(
        self, parameters: Sequence[Tensor], pieces: Sequence[Tensor], compute: Callable[[list[Tensor]], list[Tensor]]
    ) -> list[Tensor]:
        """Return the pieces of what `compute` makes of the whole tensors, in the same dtype. All ranks must call it."""
        deal = Deal.of(self.shapes(parameters), self._group.rank(), self._group.size())
        sizes = [piece.numel() for piece in pieces]
        sent_sizes, received_sizes = deal.sent_sizes(sizes), deal.received_sizes()
        sent = torch.cat([pieces[number].reshape(-1) for number in deal.order])
        received = self._exchange(sent, received_sizes, sent_sizes)
        wholes = deal.join(received)
        results = deal.cut(compute(wholes)) if wholes else received
        flat = self._exchange(results, sent_sizes, received_sizes)
        made = dict(zip(deal.order, flat.split([sizes[number] for number in deal.order]), strict=True))
        return [made[number].view(piece.shape) for number, piece in enumerate(pieces)]

    def shapes(self, parameters: Sequence[Tensor]) -> list[torch.Size]:
        """Return the shapes of the whole tensors."""
        return [self._shapes[id(parameter)] for parameter in parameters]

    def _exchange(self, sent: Tensor, received_sizes: list[int], sent_sizes: list[int]) -> Tensor:
        device = sent.device
        sent = sent.cpu() if goes_by_host(self._group, device) else sent
        received = torch.empty(sum(received_sizes), dtype=sent.dtype, device=sent.device)
        trail.note("all_to_all of matrices", sent)
        dist.all_to_all_single(received, sent, received_sizes, sent_sizes, group=self._group)
        return received.to(device)


@dataclass(frozen=True)
class Deal:
    """Which rank gets which of the tensors, and how its rows lie in what is sent."""

    owners: list[int]
    """Rank that gets each tensor."""
    shapes: list[torch.Size]
    """Shapes of the tensors that this rank gets."""
    size: int

    @classmethod
    def of(cls, shapes: Sequence[torch.Size], rank: int, size: int) -> Deal:
        """Deal tensors of these shapes out by the work that they are."""
        owners = owners_of([_work(shape) for shape in shapes], size)
        return cls(owners, [shape for shape, owner in zip(shapes, owners, strict=True) if owner == rank], size)

    @property
    def order(self) -> list[int]:
        """Numbers of the tensors as they are sent: those of the first rank, of the second, and so on."""
        return sorted(range(len(self.owners)), key=lambda number: self.owners[number])

    def sent_sizes(self, sizes: Sequence[int]) -> list[int]:
        """Return how many numbers go to each rank, of pieces of these sizes."""
        totals = [0] * self.size
        for owner, size in zip(self.owners, sizes, strict=True):
            totals[owner] += size
        return totals

    def received_sizes(self) -> list[int]:
        """Return how many numbers come from each rank."""
        return [sum(self._sizes_from(rank)) for rank in range(self.size)]

    def join(self, received: Tensor) -> list[Tensor]:
        """Return this rank's tensors from the rows of all ranks."""
        parts = [
            piece.split(self._sizes_from(rank)) for rank, piece in enumerate(received.split(self.received_sizes()))
        ]
        return [torch.cat([part[place] for part in parts]).view(shape) for place, shape in enumerate(self.shapes)]

    def cut(self, wholes: Sequence[Tensor]) -> Tensor:
        """Return the rows of such tensors, flat, as the ranks get them back."""
        ranks = range(self.size)
        rows = [whole.split([rows_of(len(whole), self.size, rank) for rank in ranks]) for whole in wholes]
        return torch.cat([each[rank].reshape(-1) for rank in ranks for each in rows])

    def _sizes_from(self, rank: int) -> list[int]:
        return [rows_of(shape[0], self.size, rank) * shape[1:].numel() for shape in self.shapes]


def rows_of(rows: int, size: int, rank: int) -> int:
    """Return how many of a tensor's rows a rank has: equally many each, fewer or none on the last ranks."""
    share = -(-rows // size)
    return max(0, min(share, rows - rank * share))


def _work(shape: torch.Size) -> int:
    """Return how much a matrix takes, relative to others: the product with its own transpose, on the shorter side."""
    rows, columns = shape[0], shape[1:].numel()
    return rows * columns * min(rows, columns)
