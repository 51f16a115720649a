"""How ranks come to one model: the interface that gradient and parameter reduction share.

A step speaks to it in a fixed order: `start_step`, then for each grain forward and backward (with `arm` before the
rank's last backward), then `reduce`; after the optimizer `stepped`. A rank without a grain in the step goes straight
to `arm` and `reduce` and contributes zeros without calling the model. Where ranks step apart (`averages`), there is
neither `arm` nor `reduce`: `stepped` decides whether they come together. Where weights are sharded, the model itself
communicates: `make_up` says what a rank runs so that all call it equally often.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch

Tally = tuple[torch.Tensor | float, ...]
TALLY = 4
"""Numbers summed over the ranks with the gradients: loss sum, loss count, ranks with more data, ranks told to stop."""


class StepRecord(Protocol):
    """What a step has to say; where ranks step apart, completed when they have come together."""

    loss_sum: Any
    count: Any
    ranks_with_data: Any
    ranks_to_stop: Any
    is_local: bool
    """Loss and count are of this rank alone, so far."""
    notes: dict[str, float]


class Strategy(ABC):
    """One way of keeping the ranks' models together."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        self.parameters = list(parameters)

    @property
    def is_together(self) -> bool:
        """All ranks have the same weights, or will once `sync` returns, without one more average."""
        return True

    @abstractmethod
    def start_step(self) -> None:
        """Forget the last step's gradients."""

    @abstractmethod
    def arm(self, tally: Tally) -> None:
        """The next backward, if any, is this rank's last of the step; `tally` holds the rank's final numbers."""

    @abstractmethod
    def reduce(self) -> torch.Tensor:
        """Gradients become sums over all ranks; returns the summed tally, (TALLY,)."""

    def make_up(self, grains: Sequence[Any]) -> list[Any]:
        """Grains to run beside the rank's own, for nothing, where all ranks must call the model equally often."""
        return []

    def pull_gradients(self) -> None:  # noqa: B027
        """Take over what became of the model's gradients, where the optimizer holds other tensors."""

    def total_norm(self, norm: torch.Tensor) -> torch.Tensor:
        """The norm of all gradients, from that of the gradients of this rank's optimizer."""
        return norm

    def agree(self, flag: torch.Tensor) -> None:  # noqa: B027
        """What any rank has found in its gradients (1.0), all have, where each has other gradients."""

    def whole_weights(self) -> AbstractContextManager[None]:
        """The model in a form that a rank may call on its own; all ranks must enter."""
        return nullcontext()

    def stepped(self, step: StepRecord, expected: float, has_next: bool, wants_stop: bool, is_last: bool) -> None:
        """A step is done, with or without an update; `expected` is its count over all ranks."""
        raise AssertionError("only where ranks step apart")

    def sync(self) -> None:  # noqa: B027
        """Make the ranks' models one, if they are not. All ranks must call it."""

    def detach(self) -> None:  # noqa: B027
        """Take any hooks off the parameters."""


class Alone(Strategy):
    """One rank: nothing to reduce."""

    def start_step(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    def arm(self, tally: Tally) -> None:
        pass

    def reduce(self) -> torch.Tensor:
        raise AssertionError("one rank has its sums already")
