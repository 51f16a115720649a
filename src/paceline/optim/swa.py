"""Stochastic weight averaging (Izmailov et al. 2018, "Averaging weights leads to wider optima").

From a step on, every so many steps, the weights go into a mean: with the n-th of them,

    average <- average + (weight - average) / n

Before that the average is the weights themselves. How many went in follows from the step alone, so that a run that was
resumed, on any number of ranks, goes on with the same numbers. With `reduce: param` each rank has the mean of its own
weights, and ranks average these as they average weights: a mean of means of as many.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from paceline.optim.ema import WeightAverage


class StochasticAverage(WeightAverage):
    """The mean of a model's weights after the steps `start`, `start + every`, ..."""

    def __init__(self, source: nn.Module | Mapping[str, Tensor], start: int, every: int) -> None:
        super().__init__(source, 0.0)
        self._start, self._every = start, every

    def fraction(self, step: int) -> float:
        if step <= self._start:
            return 1.0
        before, offset = divmod(step - self._start, self._every)
        return 0.0 if offset else 1.0 / (before + 1)

    def wants_statistics(self, step: int) -> bool:
        """From the second weights on; those of one are the run's."""
        return step >= self._start + self._every
