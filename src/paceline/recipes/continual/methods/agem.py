"""A-GEM: a step that would raise the loss on stored examples is turned until it does not.

Chaudhry et al., "Efficient Lifelong Learning with A-GEM", 2019. The gradient on the draw is computed after that of the
step, each rank on its own pieces, and added over the ranks. Batch norm sees the stored examples but keeps its running
statistics, which are of new examples alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from paceline.core.torch_private import BatchNorm
from paceline.recipes.continual.method import Answer, Incoming, Method, Net, Replayed


class AGem(Method):
    exact = True
    draws = 1

    def loss(self, net: Net, now: Incoming, replay: Sequence[Replayed]) -> Answer:
        self._net = net
        output = net(now.x)
        return Answer(self.cross_entropy(output, now.y), len(now), output)

    def after_backward(self, model: nn.Module) -> None:
        if self.task.num_replayed == 0:
            return
        weights = [weight for weight in model.parameters() if weight.grad is not None]
        step = torch.cat([weight.grad.flatten() for weight in weights if weight.grad is not None])
        stored = torch.zeros_like(step)
        with _still(model):
            for old in self.task.replay_pieces(0):
                loss = self.cross_entropy(self._net(old.x), old.y) / old.num_items
                parts = torch.autograd.grad(loss, weights, allow_unused=True, materialize_grads=True)
                stored += torch.cat([part.flatten() for part in parts])
        self.task.link.all_reduce(stored)
        turned = turn(step, stored)
        for weight, part in zip(weights, turned.split([weight.numel() for weight in weights]), strict=True):
            assert weight.grad is not None
            weight.grad.copy_(part.view_as(weight))


def turn(step: Tensor, stored: Tensor) -> Tensor:
    """The gradient nearest to `step` that does not point against `stored`."""
    against = torch.dot(step, stored).clamp(max=0.0)
    return step - against / torch.dot(stored, stored).clamp(min=torch.finfo(step.dtype).tiny) * stored


@contextmanager
def _still(model: nn.Module) -> Iterator[None]:
    """Batch norms normalise as in training and leave their statistics as they are."""
    norms = [module for module in model.modules() if isinstance(module, BatchNorm) and module.track_running_stats]
    for norm in norms:
        norm.track_running_stats = False
    kept = [(norm.running_mean, norm.running_var) for norm in norms]
    for norm in norms:
        norm.running_mean = norm.running_var = None
    try:
        yield
    finally:
        for norm, (mean, variance) in zip(norms, kept, strict=True):
            norm.running_mean, norm.running_var, norm.track_running_stats = mean, variance, True
