"""Computation on whole tensors of which every rank has rows: each is brought to one rank, and its result back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

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
        rank, size = self._group.rank(), self._group.size()
        shapes = self.shapes(parameters)
        owners = owners_of([_work(shape) for shape in shapes], size)
        mine = [shape for shape, owner in zip(shapes, owners, strict=True) if owner == rank]
        order = [number for each in range(size) for number, owner in enumerate(owners) if owner == each]
        sent_sizes = [sum(pieces[number].numel() for number in order if owners[number] == each) for each in range(size)]
        row_counts = [[rows_of(shape[0], size, each) for shape in mine] for each in range(size)]
        received_sizes = [
            sum(rows * shape[1:].numel() for rows, shape in zip(counts, mine, strict=True)) for counts in row_counts
        ]
        sent = torch.cat([pieces[number].reshape(-1) for number in order])
        received = self._exchange(sent, received_sizes, sent_sizes)
        parts = [
            piece.split([rows * shape[1:].numel() for rows, shape in zip(counts, mine, strict=True)])
            for counts, piece in zip(row_counts, received.split(received_sizes), strict=True)
        ]
        wholes = [torch.cat([each[place] for each in parts]).view(shape) for place, shape in enumerate(mine)]
        results = compute(wholes) if wholes else []
        cut = [result.split([counts[place] for counts in row_counts]) for place, result in enumerate(results)]
        back = [each[other].reshape(-1) for other in range(size) for each in cut]
        returned = torch.cat(back) if back else received
        flat = self._exchange(returned, sent_sizes, received_sizes)
        made = dict(zip(order, flat.split([pieces[number].numel() for number in order]), strict=True))
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


def rows_of(rows: int, size: int, rank: int) -> int:
    """Return how many of a tensor's rows a rank has: equally many each, fewer or none on the last ranks."""
    share = -(-rows // size)
    return max(0, min(share, rows - rank * share))


def _work(shape: torch.Size) -> int:
    """Return how much a matrix takes, relative to others: the product with its own transpose, on the shorter side."""
    rows, columns = shape[0], shape[1:].numel()
    return rows * columns * min(rows, columns)
