"""Interface of the ways in which ranks come to one model: summed gradients, sharding, averaged parameters.

The engine calls a strategy in a fixed order and never asks which one it has:

    begin(batch)       forget the last gradients
    last_backward()    the next backward is this rank's last of the step
    end_grain()        a grain's backward is done (or its replay was started)
    reduce(numbers)    gradients and numbers of the step are final: summed over the ranks, or this rank's own
    finish(step)       the update is done; returns the record of the step
    sync()             between steps: make the ranks' models equal, if they are not

A backward that is replayed from a CUDA graph calls no hooks. Before it is recorded, `gradient_groups` says where
gradients have to be added; after each replay is started, `replayed` (instead of a backward) says which have been.

A rank without grains in a step goes straight to `reduce` and contributes zeros without calling the model. Where weights
are sharded the model itself communicates: `makeup` gives the grains that a rank runs so that all call it equally often.

| | gradients | ranks' weights | a step is divided by |
|---|---|---|---|
| `Alone` | this rank's | | its count |
| `AloneInTree` | this rank's, added in the order of the tree | | its count |
| `Summed` | summed in buckets during backward | equal after each step | the count of all ranks |
| `SummedInTree` | the same, added in the order of the tree | equal after each step | the count of all ranks |
| `Sharded` | summed, each rank keeps its shards | one model in pieces | the count of all ranks |
| `Averaged` | this rank's | averaged now and then | this rank's count |
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from paceline.core.sum_tree import Starts
from paceline.parallel.step import Average, RankNumbers, Step, Sums, Tally

Part = TypeVar("Part")


class Mark(Protocol):
    """A place in a backward that is being replayed."""

    def wait(self) -> None:
        """Let the current stream wait until the replay has come here."""


class GlobalBatch(Protocol):
    """This rank's share of a global batch, as far as a strategy needs it."""

    @property
    def grains(self) -> Sequence[Any]: ...

    @property
    def starts(self) -> Starts | None:
        """First grain of each rank, and the number of grains, where ranks hold blocks of grains."""
        ...

    @property
    def count(self) -> float:
        """Count of the loss over all ranks, as far as it is known before the step."""
        ...

    @property
    def own_count(self) -> float:
        """This rank's part of `count`."""
        ...

    @property
    def is_last(self) -> bool:
        """True if no rank has data after this batch."""
        ...


@dataclass(frozen=True)
class StrategyState:
    """Part of a checkpoint that a strategy needs beside the model and the optimizer."""

    common: Mapping[str, Tensor] = field(default_factory=dict)
    """Tensors that all ranks have alike."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """Plain values that all ranks have alike."""
    local: Mapping[str, Tensor] | None = None
    """Tensors that only this rank has; None if ranks have nothing of their own."""


class Strategy(ABC):
    """One way of keeping the ranks' models together.

    What is implemented here holds wherever the ranks' weights are equal after every step.
    """

    order_s = 0.0
    """Seconds of the host that adding in one order has taken so far, beyond a sum in any order."""
    meets_on_host = False
    """True if ranks wait for each other on the host, between steps."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        self.parameters = list(parameters)

    # -- a step --------------------------------------------------------------------------------------------------------

    @abstractmethod
    def begin(self, batch: GlobalBatch) -> None:
        """Begin a step: forget the gradients of the last one."""

    def divisor(self, batch: GlobalBatch) -> float:
        """Return the count that the losses of this step are divided by before backward."""
        return batch.count or 1

    def makeup(self, grains: Sequence[Any]) -> list[Any]:
        """Return grains to run after the rank's own, with a loss of zero, so that all ranks call the model equally."""
        return []

    @abstractmethod
    def last_backward(self) -> None:
        """Announce that the next backward is this rank's last of the step."""

    def gradient_groups(self) -> Sequence[Mapping[Tensor, Tensor]]:
        """Return the tensors that recorded backwards must add gradients to, by parameter; none: anywhere.

        They come in groups: each is wanted as soon as all of its gradients are complete.
        """
        return ()

    def replayed(self, used: Collection[Tensor], marks: Sequence[Mark | None]) -> None:  # noqa: B027
        """Take note of a backward whose replay was started: parameters that it has gradients for, a mark per group.

        A mark is None where backward does not reach the group.
        """

    def end_grain(self) -> None:  # noqa: B027
        """Take note that the backward of one of this rank's grains is done, or that its replay was started."""

    @abstractmethod
    def reduce(self, numbers: RankNumbers) -> Sums:
        """Make the gradients those of the step, and return the numbers that belong to them."""

    def updates(self, batch: GlobalBatch) -> bool:
        """Return True if this rank's weights are updated in this step."""
        return True

    def finish(self, step: Step) -> Step:
        """End a step after its update, and return its record."""
        return step

    # -- gradients -----------------------------------------------------------------------------------------------------

    def pull_gradients(self) -> None:  # noqa: B027
        """Take over changes of the model's gradients, where the optimizer holds other tensors."""

    def total_norm(self, gradients: Sequence[Tensor], norm: Callable[[Sequence[Tensor]], Tensor]) -> Tensor:
        """Return the norm of all gradients, from those that this rank's optimizer has; `norm` is of whole tensors."""
        return norm(gradients)

    def agree(self, number: Tensor) -> None:  # noqa: B027
        """Raise `number`, in place, to the largest of the ranks whose gradients make one update: a flag, for one."""

    # -- between steps -------------------------------------------------------------------------------------------------

    @property
    def is_together(self) -> bool:
        """True if the ranks' weights are equal, or will be once the average in flight is applied.

        False if `sync` would have to start an average of its own.
        """
        return True

    def sync(self) -> Average | None:
        """Make the ranks' models equal. All ranks must call it. Return the average that it took, if any."""
        return None

    def whole_weights(self) -> AbstractContextManager[None]:
        """Return a context in which a rank may call the model on its own; all ranks must enter it."""
        return nullcontext()

    def detach(self) -> None:  # noqa: B027
        """Remove hooks from the parameters and give up process groups."""

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def state(self) -> StrategyState:
        """Return what a checkpoint has to hold of the strategy. The ranks' models must be equal."""
        return StrategyState()

    def load(self, state: StrategyState) -> None:  # noqa: B027
        """Go on from `state`, with the model as it was just restored. All ranks must call it."""

    def own_part(self, parts: Sequence[Part]) -> Part | None:
        """Return the part of a checkpoint that was this rank's own, of those of all ranks; None if it takes none."""
        return None


class Alone(Strategy):
    """One rank: there is nothing to reduce."""

    def begin(self, batch: GlobalBatch) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    def last_backward(self) -> None:
        pass

    def reduce(self, numbers: RankNumbers) -> Sums:
        tally = numbers.in_turn()
        return Sums(Tally(tally.loss_sum, tally.count))
