"""Outer optimizer of averaged models: an average is taken as it is, or as the gradient of one more step.

With g = last model - average (how far the ranks have come together, as a gradient):

    u = momentum * u + g
    plain      model = average
    momentum   model = last - lr * u                    BMUF (Chen and Huo 2016); SlowMo (Wang et al. 2020) with a
                                                        constant learning rate
    nesterov   model = last - lr * (g + momentum * u)   DiLoCo (Douillard et al. 2023)
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.config.settings import ReduceSettings


class Outer:
    """SGD with momentum over averaged models; `velocity` is the same on all ranks."""

    def __init__(self, lr: float, momentum: float, nesterov: bool) -> None:
        self.lr, self.momentum, self.nesterov = lr, momentum, nesterov
        self.velocity: Tensor | None = None

    @torch.no_grad()
    def step(self, model: Tensor, average: Tensor) -> None:
        """Move `model` in place from the last average towards this one."""
        gradient = model - average
        if self.velocity is None:
            self.velocity = torch.zeros_like(model)
        self.velocity.mul_(self.momentum).add_(gradient)
        if self.nesterov:
            model.sub_(gradient.add_(self.velocity, alpha=self.momentum), alpha=self.lr)
        else:
            model.sub_(self.velocity, alpha=self.lr)


def build(settings: ReduceSettings, ranks: int) -> Outer | None:
    """Return the outer optimizer of the settings; None if the average is the model."""
    if settings.outer == "plain":
        return None
    is_nesterov = settings.outer == "nesterov"
    usual_lr, usual_momentum = (0.7, 0.9) if is_nesterov else (1.0, 1.0 - 1.0 / ranks)
    lr = usual_lr if settings.outer_lr is None else settings.outer_lr
    momentum = usual_momentum if settings.outer_momentum is None else settings.outer_momentum
    return Outer(lr, momentum, is_nesterov)
