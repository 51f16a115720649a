"""Gradients summed over the ranks, each of which keeps its shard of them (`shard: full`).

Collectives happen inside the model's forward and backward, so all ranks must call it equally often: a rank with fewer
grains than another runs one again, and one without any borrows another's, with a loss that counts for nothing.
Gradients of a rank's grains are added up whole and reduced once, in the last backward of the step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from paceline.core.errors import PacelineError
from paceline.parallel.sharding import Shards
from paceline.parallel.strategy import Strategy, Tally
from paceline.world.link import Link


class UnevenUse(PacelineError):
    """Ranks used different parts of the model in one step, so their collectives were not of the same things."""

    hint = "let the loss use the same layers for every grain of a step, or train with `--shard none`"

    def __init__(self, names: list[str]) -> None:
        shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
        super().__init__(f"`shard` is full, but only some ranks had gradients for {shown}")
        self.names = names


class ShardedGradients(Strategy):
    """`reduce: grad` with `shard: full`."""

    def __init__(self, parameters: Sequence[nn.Parameter], link: Link, shards: Shards) -> None:
        super().__init__(parameters)
        self._link, self._shards = link, shards
        self._modules = [module for module in _modules(shards.model) if isinstance(module, FSDPModule)]
        self._tally: Tally = ()

    def make_up(self, grains: Sequence[Any]) -> list[Any]:
        own, rank, ranks = len(grains), self._link.world.rank, self._link.world.size
        numbers = torch.tensor([own, -own, -(rank if own else ranks)])  # on the CPU: no device is waited for
        self._link.all_reduce(numbers, "max")
        most, fewest, lender = int(numbers[0]), -int(numbers[1]), -int(numbers[2])
        if most == 0:
            return []
        lent = grains[-1] if grains else None
        if fewest == 0:
            lent = grains[0].to(torch.device("cpu")) if rank == lender else None
            lent = self._link.broadcast_object(lent, src=lender).to(self._link.device)
        return [lent] * (most - own)

    def start_step(self) -> None:
        self._shards.forget_gradients()
        self._shards.model.set_requires_gradient_sync(False)

    def arm(self, tally: Tally) -> None:
        self._tally = tally
        self._shards.model.set_requires_gradient_sync(True)

    def reduce(self) -> torch.Tensor:
        tally = torch.stack([torch.as_tensor(number, device=self._link.device).double() for number in self._tally])
        work = self._link.all_reduce(tally, async_op=True)
        marks = torch.tensor(self._shards.pull_gradients()).int()  # on the CPU, too
        self._link.all_reduce(marks)
        names = list(self._shards.tensors)
        uneven = [name for name, mark in zip(names, marks.tolist(), strict=True) if 0 < mark < self._link.world.size]
        if uneven:
            raise UnevenUse(uneven)
        if work is not None:
            work.wait()
        return tally

    def pull_gradients(self) -> None:
        self._shards.pull_gradients()

    def total_norm(self, norm: torch.Tensor) -> torch.Tensor:
        square = norm.double().square()
        self._link.all_reduce(square)
        return square.sqrt().to(norm.dtype)

    def agree(self, flag: torch.Tensor) -> None:
        self._link.all_reduce(flag, "max")

    @contextmanager
    def whole_weights(self) -> Iterator[None]:
        """Gathered once, so that ranks may then call the model as often as each likes."""
        for module in self._modules:
            module.set_reshard_after_forward(False, recurse=False)
            module.unshard()
        try:
            yield
        finally:
            for module in self._modules:
                module.set_reshard_after_forward(module is not self._shards.model, recurse=False)
                module.reshard()
            _forget_forwards(self._shards.model)

    def detach(self) -> None:
        self._shards.forget_gradients()


def _forget_forwards(model: FSDPModule) -> None:
    """Backward gathers ahead in the order of the forwards before it, those without a backward too.

    Ranks that have made unequally many of them would gather different things. torch's `reset_iter_state` does it too,
    but since 2.13 only, and not on a rank that has not called the model yet.
    """
    for module in _modules(model):
        group: Any = module._get_fsdp_state()._fsdp_param_group if isinstance(module, FSDPModule) else None
        if group is not None:
            group._post_forward_indices.clear()
            getattr(group.comm_ctx, "post_forward_order", []).clear()


def _modules(model: FSDPModule) -> Iterator[nn.Module]:
    assert isinstance(model, nn.Module)
    return model.modules()
