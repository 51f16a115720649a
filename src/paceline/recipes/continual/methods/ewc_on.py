"""Online elastic weight consolidation: weights that mattered for earlier tasks are held where they were.

Kirkpatrick et al. 2017, with one running estimate of importance as in Schwarz et al., "Progress & Compress", 2018:
F <- gamma F + mean of p(y|x) (d log p(y|x) / d w)^2 over a task's examples, computed example by example.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

from paceline.recipes.continual.method import Answer, Incoming, Method, Net, Replayed

MOST_EXAMPLES, MOST_NUMBERS = 64, 2**26
"""Gradients are held for so many examples at once, and for no more numbers than that."""


class OnlineEwc(Method):
    exact = True

    def begin(self, model: nn.Module, stage: int) -> None:
        super().begin(model, stage)
        self._model = model
        if stage == 0:
            self.importance: dict[str, Tensor] = {}
            self.anchor: dict[str, Tensor] = {}

    def loss(self, net: Net, now: Incoming, replay: Sequence[Replayed]) -> Answer:
        output = net(now.x)
        total = self.cross_entropy(output, now.y)
        if self.importance:
            # Once per step: every grain adds its part of the examples.
            total = total + len(now) * self.settings.e_lambda * self._pull()
        return Answer(total, len(now), output)

    def _pull(self) -> Tensor:
        parts = [
            (self.importance[name] * (weight - self.anchor[name]).square()).sum()
            for name, weight in self._model.named_parameters()
            if name in self.importance
        ]
        return torch.stack(parts).sum()

    def end(self, model: nn.Module, stage: int) -> None:
        found = self._estimate(model)
        old, gamma = self.importance, self.settings.gamma
        self.importance = {name: found[name] + gamma * old[name] if old else found[name] for name in found}
        self.anchor = {name: weight.detach().clone() for name, weight in model.named_parameters() if name in found}

    def _estimate(self, model: nn.Module) -> dict[str, Tensor]:
        """Mean importance over the task's examples, each computed on one rank."""
        plain = copy.deepcopy(model).eval()  # a copy is not compiled
        weights = {name: weight.detach() for name, weight in plain.named_parameters() if weight.requires_grad}

        def log_likelihood(weights: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
            output = functional_call(plain, weights, (x.unsqueeze(0),))
            return -F.cross_entropy(output, y.unsqueeze(0))

        each = vmap(grad_and_value(log_likelihood), in_dims=(None, 0, 0))
        numbers = sum(weight.numel() for weight in weights.values())
        total = {name: torch.zeros_like(weight) for name, weight in weights.items()}
        data = self.task.stream.experiences[self.stage].train()
        for part in self.task.share_of(data, max(1, min(MOST_EXAMPLES, MOST_NUMBERS // numbers))):
            gradients, likelihood = each(weights, self.task.view(part.x, augment=False), part.y)
            for name, gradient in gradients.items():
                total[name] += torch.einsum("n,n...->...", likelihood.exp(), gradient.square())
        for tensor in total.values():
            self.task.link.all_reduce(tensor)
        return {name: tensor / len(data) for name, tensor in total.items()}

    def state(self) -> dict[str, Tensor]:
        importance = {f"importance.{name}": tensor for name, tensor in self.importance.items()}
        return {**importance, **{f"anchor.{name}": tensor for name, tensor in self.anchor.items()}}

    def load_state(self, state: dict[str, Tensor]) -> None:
        device = self.task.link.device
        for part, target in (("importance.", self.importance), ("anchor.", self.anchor)):
            target.update({k.removeprefix(part): v.to(device) for k, v in state.items() if k.startswith(part)})
