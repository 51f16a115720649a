"""Learning without forgetting: on new examples, the outputs for old classes stay as the network before had them.

Li & Hoiem, "Learning without Forgetting", 2016. No buffer; the network as it was at the end of the last task is kept.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from paceline.recipes.continual.method import Answer, Incoming, Method, Net, Replayed


class LwF(Method):
    exact = True

    def begin(self, model: nn.Module, stage: int) -> None:
        super().begin(model, stage)
        self._model = model
        if stage == 0:
            self.teacher: nn.Module | None = None

    def loss(self, net: Net, now: Incoming, replay: Sequence[Replayed]) -> Answer:
        view = self.task.view(now.x)
        output = self._model(view)
        new = self.task.classes_of(self.stage).to(output.device)
        total = self.cross_entropy(output.masked_fill(~new, torch.finfo(output.dtype).min), now.y)
        if self.teacher is not None:
            with torch.no_grad():
                before = self.teacher(view)
            old = self.task.stream.seen[self.stage - 1].to(output.device)
            total = total + self.settings.alpha * distillation(
                output[:, old], before[:, old], self.settings.temperature
            )
        return Answer(total, len(now), output)

    def end(self, model: nn.Module, stage: int) -> None:
        self.teacher = _frozen(model)

    def state(self) -> dict[str, Tensor]:
        return {} if self.teacher is None else dict(self.teacher.state_dict())

    def load_state(self, state: dict[str, Tensor]) -> None:
        if state:
            self.teacher = _frozen(self._model)
            self.teacher.load_state_dict(state)


def distillation(output: Tensor, before: Tensor, temperature: float) -> Tensor:
    """Cross-entropy between softened outputs, summed over the examples."""
    wanted = torch.softmax(before / temperature, 1)
    return -(wanted * torch.log_softmax(output / temperature, 1)).sum()


def _frozen(model: nn.Module) -> nn.Module:
    teacher = copy.deepcopy(model).eval()
    for weight in teacher.parameters():
        weight.grad = None
        weight.requires_grad_(False)
    return teacher
