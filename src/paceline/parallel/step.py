"""Records of a training step. They are immutable: numbers that become known later come in a new record."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch


class Tally(NamedTuple):
    """Numbers of a step that are summed over the ranks with its gradients."""

    loss_sum: Any
    count: Any
    ranks_with_data: Any = None
    """Ranks that have data after this step: 1 or 0 on each rank before the sum; None if nothing was summed."""
    ranks_to_stop: Any = None
    """Ranks that were asked to stop, in the same way."""

    @property
    def loss(self) -> float:
        """Loss per counted item (waits for the device)."""
        return float(self.loss_sum) / float(self.count) if self.count else math.nan


NUM_TALLY = len(Tally._fields)


def write(slot: torch.Tensor, number: Any) -> None:
    """Write a number to a one-element tensor without synchronising with its device."""
    if isinstance(number, torch.Tensor) and number.is_cuda:
        slot.copy_(number)
    else:
        slot.fill_(float(number))  # an assignment would copy the number to a GPU and wait for that


class GrainNumbers(NamedTuple):
    """Numbers of one grain."""

    loss: torch.Tensor
    count: Any
    statistics: torch.Tensor | None = None
    """Contribution of the grain to running statistics, if they are summed in every step."""


@dataclass(frozen=True, slots=True)
class RankNumbers:
    """Numbers of a rank's part of a step, before they are summed over the ranks."""

    grains: Sequence[GrainNumbers]
    has_data: bool = True
    """This rank has data after this step."""
    wants_stop: bool = False

    def in_turn(self) -> Tally:
        """Return the sums over the rank's grains, added from first to last."""
        loss_sum: Any = 0.0
        count: Any = 0
        for number, grain in enumerate(self.grains):
            loss_sum = loss_sum + grain.loss if number else grain.loss
            count = count + grain.count
        return Tally(loss_sum, count, self.has_data, self.wants_stop)


class Sums(NamedTuple):
    """Numbers of a step, summed over the ranks."""

    tally: Tally
    statistics: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class Step:
    """Record of one training step. Tensors stay on the device until `loss` is read."""

    number: int
    loss_sum: torch.Tensor
    count: Any
    ranks_with_data: Any = None
    """Ranks that have more data, if the ranks came together in this step."""
    ranks_to_stop: Any = None
    """Ranks that were asked to stop, if the ranks came together in this step."""
    gradient_norm: torch.Tensor | None = None
    outputs: Sequence[Any] = ()
    """Third values that the loss function returned, by grain."""
    is_local: bool = False
    """True with `reduce: param` until the next average: loss and count are of this rank alone."""
    notes: Mapping[str, float] = field(default_factory=dict)
    """Further numbers for the log."""
    average: Average | None = None
    """The average of the ranks' models that this step completed, with `reduce: param`."""

    @property
    def loss(self) -> float:
        """Loss per counted item over all ranks, or of this rank if `is_local` (waits for the device)."""
        return float(self.loss_sum) / float(self.count) if self.count else math.nan


@dataclass(frozen=True, slots=True)
class Average:
    """Numbers that came with an average of the ranks' models (`reduce: param`)."""

    steps: tuple[Step, ...]
    """The steps that were averaged, with losses and counts of all ranks."""
    ranks_with_data: torch.Tensor
    ranks_to_stop: torch.Tensor

    def then(self, later: Average | None) -> Average:
        """Return this average and a later one as one."""
        if later is None:
            return self
        return Average(self.steps + later.steps, later.ranks_with_data, later.ranks_to_stop)
