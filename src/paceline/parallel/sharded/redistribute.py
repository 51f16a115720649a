"""Redistribution of sharded tensors: each is gathered on one rank, and its result is returned in pieces."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.core.torch_private import foreach_norm
from paceline.parallel.wire import goes_by_host
from paceline.world.failure.flight_recorder import trail


class WholeTensors:
    """Computation on whole tensors, for an optimizer that needs them (Muon).

    Each call takes two all-to-all, each of as many bytes as a rank has. A tensor has one owner, so each result is
    computed once and has the bits that one process would compute.
    """

    def __init__(self, group: dist.ProcessGroup, shapes: Mapping[int, torch.Size]) -> None:
        """`shapes` are the shapes of whole tensors, by `id` of this rank's piece of the weight."""
        self._group, self._shapes = group, shapes

    def __call__(
        self, parameters: Sequence[Tensor], pieces: Sequence[Tensor], compute: Callable[[list[Tensor]], list[Tensor]]
    ) -> list[Tensor]:
        """Return the pieces of the results that `compute` returns for whole tensors. All ranks must call it."""
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
    """Assignment of tensors to ranks, and the layout of their rows in the messages."""

    owners: list[int]
    """Rank that gets each tensor."""
    shapes: list[torch.Size]
    """Shapes of the tensors that this rank gets."""
    size: int

    @classmethod
    def of(cls, shapes: Sequence[torch.Size], rank: int, size: int) -> Deal:
        """Assign tensors of these shapes so that all ranks have about the same work."""
        owners = owners_of([_work(shape) for shape in shapes], size)
        return cls(owners, [shape for shape, owner in zip(shapes, owners, strict=True) if owner == rank], size)

    @property
    def order(self) -> list[int]:
        """Indices of the tensors in the order in which they are sent: sorted by owner."""
        return sorted(range(len(self.owners)), key=lambda number: self.owners[number])

    def sent_sizes(self, sizes: Sequence[int]) -> list[int]:
        """Return the number of elements sent to each rank, for pieces of these sizes."""
        totals = [0] * self.size
        for owner, size in zip(self.owners, sizes, strict=True):
            totals[owner] += size
        return totals

    def received_sizes(self) -> list[int]:
        """Return the number of elements received from each rank."""
        return [sum(self._sizes_from(rank)) for rank in range(self.size)]

    def join(self, received: Tensor) -> list[Tensor]:
        """Return this rank's tensors from the rows of all ranks."""
        parts = [
            piece.split(self._sizes_from(rank)) for rank, piece in enumerate(received.split(self.received_sizes()))
        ]
        return [torch.cat([part[place] for part in parts]).view(shape) for place, shape in enumerate(self.shapes)]

    def cut(self, wholes: Sequence[Tensor]) -> Tensor:
        """Return the rows of these tensors in one flat tensor, in the order in which the ranks get them back."""
        ranks = range(self.size)
        rows = [whole.split([rows_of(len(whole), self.size, rank) for rank in ranks]) for whole in wholes]
        return torch.cat([each[rank].reshape(-1) for rank in ranks for each in rows])

    def _sizes_from(self, rank: int) -> list[int]:
        return [rows_of(shape[0], self.size, rank) * shape[1:].numel() for shape in self.shapes]


def rows_of(rows: int, size: int, rank: int) -> int:
    """Return the number of a tensor's rows on a rank: equal on all ranks, fewer or none on the last ones."""
    share = -(-rows // size)
    return max(0, min(share, rows - rank * share))


def _work(shape: torch.Size) -> int:
    """Return the relative cost of a matrix: that of the product with its own transpose, on the shorter side."""
    rows, columns = shape[0], shape[1:].numel()
    return rows * columns * min(rows, columns)


def whole_norms(tensors: Sequence[Tensor], dtype: torch.dtype | None, group: dist.ProcessGroup) -> Tensor:
    """Return the norms of whole tensors from the pieces of all ranks, with the bits that one rank would compute.

    Every tensor is gathered on one rank, which sends its norm to all: as many bytes as a rank has, and no more memory
    than the largest tensors take. All ranks must call it.
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
    dist.all_reduce(norms, group=group)  # each is 0 on all ranks but one
    return norms


def owners_of(sizes: Sequence[int], num_ranks: int) -> list[int]:
    """Assign each tensor to a rank: the largest first, each to the rank with the smallest load."""
    loads, owners = [0] * num_ranks, [0] * len(sizes)
    for number in sorted(range(len(sizes)), key=lambda number: -sizes[number]):
        owners[number] = loads.index(min(loads))
        loads[owners[number]] += sizes[number]
    return owners
