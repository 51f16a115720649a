"""GDumb: keep a balanced sample of the stream, and after each task train a new network on it alone.

Prabhu et al., "GDumb: A Simple Approach that Questions Our Progress in Continual Learning", 2020. What is kept
depends on labels and order alone, so every rank knows it; the stage of a task is then training on what is kept so far,
for `fitting_epochs` epochs.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.utils.data import TensorDataset

from paceline.core.keys import bits, uniform
from paceline.recipes.continual.files import Labelled
from paceline.recipes.continual.methods.finetune import Finetune
from paceline.train.task import Stage

_ORDER, _VICTIM = 0x676F, 0x6776


class GDumb(Finetune):
    exact = True

    def stages(self) -> list[Stage]:
        epochs = self.settings.fitting_epochs
        return [
            Stage(
                f"kept by {experience.name}", self._data(number), epochs, restart_optimizer=True, restart_schedule=True
            )
            for number, experience in enumerate(self.task.stream.experiences)
        ]

    def begin(self, model: nn.Module, stage: int) -> None:
        super().begin(model, stage)
        if stage > 0:
            model.load_state_dict(self.task.model().state_dict())

    def _data(self, last: int) -> Callable[[], TensorDataset]:
        return lambda: self.task.stage_data(self.kept(last))

    def kept(self, last: int) -> Labelled:
        """Return the examples kept after the tasks up to `last`."""
        parts = [experience.train() for experience in self.task.stream.experiences[: last + 1]]
        seed = self.settings.seed
        orders = [
            np.argsort(bits((seed, _ORDER, number), np.arange(len(part))), kind="stable")
            for number, part in enumerate(parts)
        ]
        everything = Labelled(
            torch.cat([part.x[torch.from_numpy(order)] for part, order in zip(parts, orders, strict=True)]),
            torch.cat([part.y[torch.from_numpy(order)] for part, order in zip(parts, orders, strict=True)]),
        )
        return everything.select(
            torch.from_numpy(greedy_balanced(seed, everything.y.numpy(), self.settings.buffer_size))
        )


def greedy_balanced(seed: int, labels: NDArray[np.int64], capacity: int) -> NDArray[np.int64]:
    """Return the items of a stream that are kept: while a class has less than its equal share, its item takes the
    place of one of the largest class."""
    place = uniform((seed, _VICTIM), np.arange(len(labels))).tolist()
    held: dict[int, list[int]] = {}
    num_held = 0
    for index, label in enumerate(labels.tolist()):
        own = held.setdefault(label, [])
        if num_held < capacity:
            num_held += 1
        elif len(own) < capacity // len(held):
            largest = max(held, key=lambda name: (len(held[name]), -name))
            held[largest].pop(int(place[index] * len(held[largest])))
        else:
            continue
        own.append(index)
    return np.sort(np.concatenate([np.array(own, np.int64) for own in held.values()]))
