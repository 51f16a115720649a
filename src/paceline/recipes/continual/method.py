"""Interface of a method of continual learning: a loss on new and replayed examples, and what it does between tasks.

A method is written as for one process. It sees one grain of the step at a time and gives sums, which are added over all
grains and divided once, so it need not know of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from paceline.train.task import Stage

if TYPE_CHECKING:
    from paceline.recipes.continual.task import Continual

Net = Callable[[Tensor], Tensor]
"""From examples as stored to outputs: augmentation, scaling and the network."""


@dataclass(slots=True)
class Incoming:
    """New examples: one grain of the step."""

    x: Tensor
    y: Tensor
    num_items: int
    """Of the whole step, over all grains and ranks."""
    labels: NDArray[np.int64]
    """Of the whole step."""

    def __len__(self) -> int:
        return len(self.y)


@dataclass(slots=True)
class Replayed:
    """Examples from the buffer: this grain's piece of a draw."""

    x: Tensor
    y: Tensor
    num_items: int
    """Of the whole draw."""
    logits: Tensor | None = None
    """Outputs of the network when they were new, if the method keeps them."""

    def __len__(self) -> int:
        return len(self.y)


@dataclass(slots=True)
class Answer:
    """Loss of a grain and the outputs behind it. The step's loss is the sum of the totals over the sum of the
    counts."""

    total: Tensor
    count: int
    logits: Tensor
    """Outputs for the new examples."""
    replayed_logits: Tensor | None = None
    """Outputs for the first draw, where there was one: they keep loss-aware admission up to date."""


class Method:
    """Subclass it, fill in `loss`, and say `exact = True` if the step's loss is such a sum over examples."""

    exact: bool = False
    """It gives the same on any number of ranks; a method that does not say so is refused on several."""
    why_not: str = "it does not say `exact = True`"
    """Shown when it is refused."""
    draws: int = 0
    """Independent draws from the buffer in each step; 0: there is no buffer."""
    is_joint: bool = False
    """Its one stage has all tasks."""
    counts_replayed: bool = False
    """`Answer.count` counts replayed examples too: then the step's divisor is known before it."""
    keeps_logits: bool = False
    """The buffer keeps the outputs that examples had when they were new."""

    def __init__(self, task: Continual) -> None:
        self.task = task
        self.settings = task.settings
        self.stage = 0

    def loss(self, net: Net, now: Incoming, replay: Sequence[Replayed]) -> Answer:
        """Return the loss of one grain. `replay` has a piece of each draw, or is empty while there is nothing to
        replay."""
        raise NotImplementedError(f"{type(self).__name__} has no `loss(net, now, replay)`")

    def cross_entropy(self, output: Tensor, y: Tensor) -> Tensor:
        """Return the cross-entropy summed over the examples; in the scenario `task` among the classes of each
        example's task alone."""
        if self.task.stream.scenario == "task":
            output = output.masked_fill(~self.task.together[y], -torch.inf)
        return F.cross_entropy(output, y, reduction="sum")

    def stages(self) -> list[Stage]:
        """Return one stage per task, each with its own examples, unless the method wants something else."""
        return self.task.default_stages()

    def begin(self, model: nn.Module, stage: int) -> None:
        """Run before a task's first step; on resume again for all tasks up to the current one."""
        self.stage = stage

    def after_backward(self, model: nn.Module) -> None:
        """Run when gradients of the whole step are there; they may be changed."""

    def end(self, model: nn.Module, stage: int) -> None:
        """Run after a task's last step, before it is measured."""

    def state(self) -> dict[str, Tensor]:
        """Return tensors of its own for the checkpoint, the same on all ranks."""
        return {}

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Take over a `state`; `begin` has been called before."""


def per_example(values: Tensor) -> Tensor:
    """Return the mean over all but the first axis."""
    return values.flatten(1).mean(1)
