"""Pieces of a sharded model that a rank holds: weights, gradients, and their exchange with whole tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from paceline.core.torch_private import foreach_norm
from paceline.parallel.sharded.redistribute import WholeTensors, whole_norms
from paceline.parallel.tree.reduce_scatter import TreeSteps
from paceline.parallel.wire import all_gather_flat, goes_by_host
from paceline.world.failure.flight_recorder import trail


class Shards:
    """This rank's piece of every parameter, by name. The optimizer holds the pieces instead of the parameters."""

    def __init__(
        self,
        model: FSDPModule,
        mesh: DeviceMesh,
        optimizer: torch.optim.Optimizer,
        before: Mapping[str, Tensor],
        steps: TreeSteps | None = None,
    ) -> None:
        assert isinstance(model, nn.Module)
        self.model: FSDPModule = model
        self.steps = steps
        """State of a step that the strategy shares with the collectives of the blocks; None with `sums: fast`."""
        self._mesh = mesh
        self._parameters: dict[str, DTensor] = {
            name: parameter for name, parameter in model.named_parameters() if isinstance(parameter, DTensor)
        }
        self.tensors: dict[str, Tensor] = {
            name: parameter.to_local().detach() for name, parameter in self._parameters.items()
        }
        """Plain tensors in the memory of the sharded parameters."""
        exchange = {id(before[name]): tensor for name, tensor in self.tensors.items()}
        for group in optimizer.param_groups:
            group["params"] = [exchange[id(parameter)] for parameter in group["params"]]

    @property
    def place(self) -> tuple[int, int]:
        """(index of this rank's piece of every parameter, number of pieces)"""
        return self._mesh.get_local_rank(), self._mesh.size()

    def shapes(self) -> dict[str, torch.Size]:
        """Return the shapes of the whole parameters."""
        return {name: parameter.shape for name, parameter in self._parameters.items()}

    def pull_gradients(self) -> list[bool]:
        """Give the pieces the gradients of the parameters; return which parameters have one."""
        for name, parameter in self._parameters.items():
            gradient: Any = parameter.grad
            self.tensors[name].grad = None if gradient is None else gradient.to_local()
        return [parameter.grad is not None for parameter in self._parameters.values()]

    def forget_gradients(self) -> None:
        for name, parameter in self._parameters.items():
            parameter.grad = self.tensors[name].grad = None

    def whole_norm(self, norms: Tensor) -> Tensor:
        """Return norms of whole tensors from those of this rank's pieces: squares of norms add up.

        All ranks must call it.
        """
        squares = norms.double().square()
        trail.note("all_reduce of norms", squares)
        dist.all_reduce(squares, group=self._mesh.get_group())
        return squares.sqrt().to(norms.dtype)

    def whole_norms(self, tensors: Sequence[Tensor], dtype: torch.dtype | None = None) -> Tensor:
        """Return norms of whole tensors from this rank's pieces; with `sums: exact` in a fixed order of addition.

        All ranks must call it.
        """
        if self.steps is None:
            return self.whole_norm(torch.stack(foreach_norm(list(tensors), 2, dtype)))
        return whole_norms(tensors, dtype, self._mesh.get_group())

    def whole_tensors(self) -> WholeTensors:
        """Return the exchange of pieces for an optimizer that needs whole tensors."""
        shapes = {id(self.tensors[name]): parameter.shape for name, parameter in self._parameters.items()}
        return WholeTensors(self._mesh.get_group(), shapes)

    @torch.no_grad()
    def whole(self, tensors: Mapping[str, Tensor], name_of: Callable[[str], str] = str) -> dict[str, Tensor]:
        """Return whole tensors from the pieces of all ranks, in main memory of rank 0; other ranks only get non-pieces.

        All ranks must call it. `name_of` maps the key of an entry to the name of its parameter. Scalars (counts of
        steps) and entries that belong to no parameter are not pieces.
        """
        whole: dict[str, Tensor] = {}
        is_first = self._mesh.get_rank() == 0
        has_first = 0 in self._mesh.mesh.tolist()  # other groups need not gather
        for key, tensor in tensors.items():
            parameter = self._parameters.get(name_of(key))
            if parameter is None or tensor.ndim == 0:
                whole[key] = tensor
            elif has_first:
                joined = self._joined(tensor.detach(), parameter.shape)
                if is_first:
                    whole[key] = joined.cpu()
        return whole

    def _joined(self, piece: Tensor, shape: torch.Size) -> Tensor:
        """Return the whole tensor: ranks have equally many rows, the last ones fewer or none.

        `DTensor.full_tensor` is not used: it passes addresses of GPU memory to gloo, which crashes the process.
        """
        group = self._mesh.get_group()
        num_rows = -(-shape[0] // self._mesh.size())
        road = torch.device("cpu") if goes_by_host(group, piece.device) else piece.device
        sent = torch.zeros(num_rows, *shape[1:], dtype=piece.dtype, device=road)
        sent[: len(piece)] = piece
        joined = torch.empty(num_rows * self._mesh.size(), *shape[1:], dtype=piece.dtype, device=road)
        trail.note("all_gather of pieces", joined)
        all_gather_flat(joined.view(-1).view(torch.uint8), sent.view(-1).view(torch.uint8), group=group)
        return joined if len(joined) == shape[0] else joined[: shape[0]].clone()

    def pieces(self, tensors: Mapping[str, Tensor], name_of: Callable[[str], str] = str) -> dict[str, Tensor]:
        """Return this rank's pieces of whole tensors: the inverse of `whole`."""
        rank, size = self.place
        pieces: dict[str, Tensor] = {}
        for key, tensor in tensors.items():
            if name_of(key) in self._parameters and tensor.ndim > 0:
                parts = tensor.chunk(size)
                # Copied, so that the other ranks' pieces are freed.
                pieces[key] = (parts[rank] if rank < len(parts) else tensor[:0]).clone()
            else:
                pieces[key] = tensor
        return pieces
