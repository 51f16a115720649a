"""How ranks come to one model: the interface that gradient and parameter reduction share.

A step speaks to it in a fixed order: `start_step`, then for each grain forward and backward (with `arm` before the
rank's last backward), then `reduce`; after the optimizer `updated`. A rank without a grain in the step goes straight
to `arm` and `reduce` and contributes zeros without calling the model.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

Tally = tuple[torch.Tensor | float, ...]
TALLY = 4
"""Numbers summed over the ranks with the gradients: loss sum, loss count, ranks with more data, ranks told to stop."""


class Strategy(ABC):
    """One way of keeping the ranks' models together."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        self.parameters = list(parameters)

    @abstractmethod
    def start_step(self) -> None:
        """Forget the last step's gradients."""

    @abstractmethod
    def arm(self, tally: Tally) -> None:
        """The next backward, if any, is this rank's last of the step; `tally` holds the rank's final numbers."""

    @abstractmethod
    def reduce(self) -> torch.Tensor:
        """Gradients become sums over all ranks; returns the summed tally, (TALLY,)."""

    def updated(self) -> None:  # noqa: B027
        """Called after each optimizer update."""

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
