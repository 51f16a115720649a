"""Interface of the strategies that keep the models of all ranks equal: summed gradients, shards, averaged parameters.

The engine calls a strategy in a fixed order and never checks which one it has:

    begin(batch)       clear the gradients of the last step
    last_backward()    the next backward is this rank's last of the step
    end_grain()        the backward of a grain is done (or its replay was started)
    reduce(numbers)    make gradients and numbers of the step final: summed over the ranks, or this rank's own
    finish(step)       the update is done; return the record of the step
    sync()             between steps: make the models of the ranks equal, if they are not

A backward that is replayed from a CUDA graph calls no hooks. Before it is recorded, `gradient_groups` returns the
tensors to accumulate gradients in; after each replay is started, `replayed` (instead of a backward) tells which were.

A rank without grains in a step calls `reduce` directly and contributes zeros without calling the model. With sharded
weights the model itself communicates: `makeup` returns the grains a rank runs so that all ranks call it equally often.

| | gradients | weights of the ranks | a step is divided by |
|---|---|---|---|
| `Alone`, `AloneInTree` (`alone.py`) | this rank's | | its count |
| `Summed` (`summed.py`) | summed in buckets during backward | equal after each step | the count of all ranks |
| `Sharded` (`sharded/`) | summed, each rank keeps its shards | one model in pieces | the count of all ranks |
| `Averaged` (`averaged/`) | this rank's | averaged every N steps or seconds | this rank's count |

With `sums: exact`, the default, grains are added in the order of a fixed binary tree (`tree/`), on a rank and over the
ranks: `Summed` and `Sharded` are given an object that adds in this order (`TreeAdd`, `TreeShardAdd`) or in any order
(`FastAdd`, `FastShardAdd`); a single rank uses `AloneInTree` or `Alone`.
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
from paceline.parallel.step import Average, RankNumbers, Step, Sums

Part = TypeVar("Part")


class Mark(Protocol):
    """Event in a backward that is being replayed."""

    def wait(self) -> None:
        """Make the current stream wait until the replay has reached the event."""


class GlobalBatch(Protocol):
    """This rank's share of a global batch: the part of the interface that a strategy needs."""

    @property
    def grains(self) -> Sequence[Any]: ...

    @property
    def starts(self) -> Starts | None:
        """First grain of each rank, then the number of grains; None if ranks do not hold blocks of grains."""
        ...

    @property
    def count(self) -> float:
        """Count of the loss over all ranks, if it is known before the step."""
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
    """State of a strategy in a checkpoint, besides the model and the optimizer."""

    common: Mapping[str, Tensor] = field(default_factory=dict)
    """Tensors that are equal on all ranks."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """Plain values that are equal on all ranks."""
    local: Mapping[str, Tensor] | None = None
    """Tensors of this rank; None if ranks have no state of their own."""


class Strategy(ABC):
    """Base of the strategies.

    The defaults hold for every strategy whose weights are equal on all ranks after every step.
    """

    meets_on_host = False
    """True if ranks wait for each other on the host between steps."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        self.parameters = list(parameters)

    @property
    def order_s(self) -> float:
        """Host seconds that the fixed order of addition has cost so far, compared with a sum in any order."""
        return 0.0

    # -- a step --------------------------------------------------------------------------------------------------------

    @abstractmethod
    def begin(self, batch: GlobalBatch) -> None:
        """Begin a step: clear the gradients of the last one."""

    def divisor(self, batch: GlobalBatch) -> float:
        """Return the count that the losses of this step are divided by before backward."""
        return batch.count or 1

    def makeup(self, grains: Sequence[Any]) -> list[Any]:
        """Return grains to run after the rank's own with a loss of zero: all ranks call the model equally often."""
        return []

    @abstractmethod
    def last_backward(self) -> None:
        """Announce that the next backward is this rank's last of the step."""

    def gradient_groups(self) -> Sequence[Mapping[Tensor, Tensor]]:
        """Return the tensors that recorded backwards must add gradients to, by parameter; empty: no restriction.

        A group is sent as soon as all of its gradients are complete.
        """
        return ()

    def replayed(self, used: Collection[Tensor], marks: Sequence[Mark | None]) -> None:  # noqa: B027
        """Record that a replay of a backward was started: the parameters it has gradients for, and a mark per group.

        A mark is None if backward does not reach the group.
        """

    def end_grain(self) -> None:  # noqa: B027
        """Record that the backward of one of this rank's grains is done, or that its replay was started."""

    @abstractmethod
    def reduce(self, numbers: RankNumbers) -> Sums:
        """Make the gradients those of the whole step, and return the numbers that belong to them."""

    def updates(self, batch: GlobalBatch) -> bool:
        """Return True if this rank's weights are updated in this step."""
        return True

    def finish(self, step: Step) -> Step:
        """End a step after its update, and return its record."""
        return step

    # -- gradients -----------------------------------------------------------------------------------------------------

    def pull_gradients(self) -> None:  # noqa: B027
        """Copy changes of the model's gradients to the optimizer's tensors, if these are others."""

    def total_norm(self, gradients: Sequence[Tensor], norm: Callable[[Sequence[Tensor]], Tensor]) -> Tensor:
        """Return the norm of all gradients from those of this rank's optimizer; `norm` is for whole tensors."""
        return norm(gradients)

    def agree(self, number: Tensor) -> None:  # noqa: B027
        """Set `number`, for example a flag, in place to the maximum over the ranks that make one update."""

    # -- between steps -------------------------------------------------------------------------------------------------

    @property
    def is_together(self) -> bool:
        """True if the ranks' weights are equal, or will be once the average in flight is applied.

        False if `sync` would have to start an average.
        """
        return True

    def sync(self) -> Average | None:
        """Make the ranks' models equal. All ranks must call it. Return the average that was taken, if any."""
        return None

    def whole_weights(self) -> AbstractContextManager[None]:
        """Return a context in which each rank may call the model independently; all ranks must enter it."""
        return nullcontext()

    def detach(self) -> None:  # noqa: B027
        """Remove hooks from the parameters and destroy process groups."""

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def state(self) -> StrategyState:
        """Return the state for a checkpoint. The ranks' models must be equal."""
        return StrategyState()

    def load(self, state: StrategyState) -> None:  # noqa: B027
        """Restore `state`, after the model was restored. All ranks must call it."""

    def own_part(self, parts: Sequence[Part]) -> Part | None:
        """Return this rank's part of a checkpoint from those of all ranks; None if it uses none."""
        return None
