"""Sharded training: every rank keeps its piece of weights, gradients and optimizer state (`shard: full` or `node`).

The optimizer holds pieces as plain tensors: an elementwise update is exact on pieces, one that needs the norms of whole
tensors or whole matrices is given functions that compute them over the ranks (`use_shards`).

Collectives run inside the model's forward and backward, so all ranks must call it equally often: a rank with fewer
grains than another runs one again, and one without any borrows another's, with a loss of zero. How gradients and
numbers are added is the job of a `ShardAdder`: `TreeShardAdd` (`sums: exact`, the default) adds grains in the order of
a fixed tree; `FastShardAdd` accumulates the gradients of a rank's grains and reduces them in the last backward.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from paceline.core.errors import PacelineError
from paceline.core.torch_private import BatchNorm, forget_forwards
from paceline.observe.clock import Clock
from paceline.parallel.sharded.shards import Shards
from paceline.parallel.step import NUM_TALLY, RankNumbers, Sums, Tally
from paceline.parallel.strategy import GlobalBatch, Strategy
from paceline.parallel.tree.all_reduce import TreeAllReduce
from paceline.parallel.tree.reduce_scatter import TreeSteps
from paceline.parallel.tree.step_tree import StepTree, partial_tallies
from paceline.world.link import Link


class UnevenUse(PacelineError):
    """Ranks used different parts of the model in one step, so their collectives were not of the same things."""

    names: list[str]
    sentence = "`shard` is set, but only some ranks had gradients for {shown}"
    hint = "let the loss use the same layers for every grain of a step, or train with `--shard none`"

    @property
    def shown(self) -> str:
        return ", ".join(self.names[:3]) + (", ..." if len(self.names) > 3 else "")


class ShardAdder(ABC):
    """Addition of a sharded model's gradients and of the numbers of a step. Methods are in the order of a step."""

    @abstractmethod
    def begin(self, batch: GlobalBatch) -> None:
        """Begin a step."""

    @abstractmethod
    def end_grain(self) -> None:
        """Handle the end of a grain's backward."""

    @abstractmethod
    def last_backward(self) -> None:
        """Prepare for the last backward of the step, in which gradients are reduced."""

    @abstractmethod
    def start(self, numbers: RankNumbers) -> None:
        """Start the sum of the numbers over the ranks."""

    @abstractmethod
    def finish(self) -> Sums:
        """Wait for the sum of the numbers."""

    @abstractmethod
    def total_norm(self, gradients: Sequence[Tensor], norm: Callable[[Sequence[Tensor]], Tensor]) -> Tensor:
        """Return the norm of all gradients from this rank's pieces; `norm` is for whole tensors."""


class Sharded(Strategy):
    """`reduce: grad` with `shard: full` or `node`."""

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        link: Link,
        shards: Shards,
        adder: ShardAdder,
        clock: Clock | None = None,
    ) -> None:
        super().__init__(parameters)
        self._link, self._shards, self._adder, self._clock = link, shards, adder, clock
        self._modules = [module for module in _modules(shards.model) if isinstance(module, FSDPModule)]

    def makeup(self, grains: Sequence[Any]) -> list[Any]:
        num_grains, rank, ranks = len(grains), self._link.world.rank, self._link.world.size
        # On the CPU: the host does not wait for a device.
        numbers = torch.tensor([num_grains, -num_grains, -(rank if num_grains else ranks)], device="cpu")
        self._link.all_reduce(numbers, "max")
        most, fewest, lender = int(numbers[0]), -int(numbers[1]), -int(numbers[2])
        if most == 0:
            return []
        lent = grains[-1] if grains else None
        if fewest == 0:
            lent = grains[0].to(torch.device("cpu")) if rank == lender else None
            lent = self._link.broadcast_object(lent, src=lender).to(self._link.device)
        return [lent] * (most - num_grains)

    def begin(self, batch: GlobalBatch) -> None:
        self._shards.forget_gradients()
        self._adder.begin(batch)

    def end_grain(self) -> None:
        self._adder.end_grain()

    def last_backward(self) -> None:
        self._adder.last_backward()

    def reduce(self, numbers: RankNumbers) -> Sums:
        self._adder.start(numbers)
        self._check_use()
        sums = self._adder.finish()
        if self._clock is not None:
            self._clock.meet()
        return sums

    def _check_use(self) -> None:
        """Give the pieces their gradients; raise `UnevenUse` unless all ranks have those of the same parameters."""
        marks = torch.tensor(self._shards.pull_gradients(), device="cpu").int()  # on the CPU, too
        self._link.all_reduce(marks)
        names = list(self._shards.tensors)
        uneven = [name for name, mark in zip(names, marks.tolist(), strict=True) if 0 < mark < self._link.world.size]
        if uneven:
            raise UnevenUse(uneven)

    def pull_gradients(self) -> None:
        self._shards.pull_gradients()

    def total_norm(self, gradients: Sequence[Tensor], norm: Callable[[Sequence[Tensor]], Tensor]) -> Tensor:
        return self._adder.total_norm(gradients, norm)

    def agree(self, number: Tensor) -> None:
        self._link.all_reduce(number, "max")

    @contextmanager
    def whole_weights(self) -> Iterator[None]:
        """Gather the weights once; ranks may then call the model a different number of times."""
        for module in self._modules:
            module.set_reshard_after_forward(False, recurse=False)
            module.unshard()
        try:
            yield
        finally:
            for module in self._modules:
                is_kept = module is self._shards.model or isinstance(module, BatchNorm)
                module.set_reshard_after_forward(not is_kept, recurse=False)
                module.reshard()
            _forget_forwards(self._shards.model)

    def detach(self) -> None:
        self._shards.forget_gradients()


class TreeShardAdd(ShardAdder):
    """Sums in the order of the tree. FSDP calls `TreeReduceScatter` for each block, which adds the gradients."""

    def __init__(
        self,
        shards: Shards,
        steps: TreeSteps,
        all_reduce: TreeAllReduce,
        tally_dtype: torch.dtype,
        num_statistics: int = 0,
    ) -> None:
        """`num_statistics` is the length of a grain's contribution to batch-norm statistics."""
        self._shards, self._steps, self._all_reduce = shards, steps, all_reduce
        self._length = NUM_TALLY + num_statistics
        device = next(iter(shards.tensors.values())).device
        self._tally = torch.zeros(all_reduce.pad(self._length), dtype=tally_dtype, device=device)

    def begin(self, batch: GlobalBatch) -> None:
        self._tree = StepTree.of(batch, self._all_reduce.rank, self._all_reduce.size)
        self._steps.begin(self._tree)
        self._shards.model.set_requires_gradient_sync(self._steps.hands_over)

    def end_grain(self) -> None:
        self._steps.end_grain()
        if not self._steps.is_final:
            self._shards.model.set_requires_gradient_sync(self._steps.hands_over)

    def last_backward(self) -> None:
        self._steps.last_backward()
        self._shards.model.set_requires_gradient_sync(True)

    def start(self, numbers: RankNumbers) -> None:
        tallies = partial_tallies(numbers, self._tree, self._tally, slice(NUM_TALLY, self._length))
        self._all_reduce.start(self._tally, tallies, self._tree.layout)

    def finish(self) -> Sums:
        self._all_reduce.finish()
        tally, statistics = self._tally[: self._length].clone().tensor_split([NUM_TALLY])
        return Sums(Tally(*tally.unbind()), statistics if len(statistics) else None)

    def total_norm(self, gradients: Sequence[Tensor], norm: Callable[[Sequence[Tensor]], Tensor]) -> Tensor:
        """Return the norm of all gradients as one rank that has all of them would compute it."""
        total: Tensor = torch.linalg.vector_norm(self._shards.whole_norms(gradients), 2)
        return total


class FastShardAdd(ShardAdder):
    """Sums in the fastest order: FSDP accumulates the grains of a rank and reduces them in the last backward."""

    def __init__(self, shards: Shards, link: Link) -> None:
        self._shards, self._link = shards, link
        self._work: dist.Work | None = None

    def begin(self, batch: GlobalBatch) -> None:
        self._shards.model.set_requires_gradient_sync(False)

    def end_grain(self) -> None:
        pass

    def last_backward(self) -> None:
        self._shards.model.set_requires_gradient_sync(True)

    def start(self, numbers: RankNumbers) -> None:
        tally, device = numbers.in_turn(), self._link.device
        self._sums = torch.stack([torch.as_tensor(number, dtype=torch.float64, device=device) for number in tally])
        self._work = self._link.all_reduce(self._sums, async_op=True)

    def finish(self) -> Sums:
        if self._work is not None:
            self._work.wait()
        return Sums(Tally(*self._sums.unbind()))

    def total_norm(self, gradients: Sequence[Tensor], norm: Callable[[Sequence[Tensor]], Tensor]) -> Tensor:
        return self._shards.whole_norm(norm(gradients))


def _forget_forwards(model: FSDPModule) -> None:
    """Reset the state of forwards without a backward: after unequal numbers of them ranks gather different weights."""
    for module in _modules(model):
        if isinstance(module, FSDPModule):
            forget_forwards(module)


def _modules(model: FSDPModule) -> Iterator[nn.Module]:
    assert isinstance(model, nn.Module)
    return model.modules()
