"""The tasks of the runs in this folder. A process that has PACELINE_KILL_AT dies after that many steps of its own."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from paceline import Grain, Task
from paceline.recipes.continual.task import Continual


def images(num_samples: int, seed: int) -> TensorDataset:
    random = torch.Generator().manual_seed(seed)
    x = torch.rand(num_samples, 2, 6, 6, generator=random)
    return TensorDataset(x, (4 * x.mean((1, 2, 3)) + x[:, 0, 0, 0]).long() % 3)


class _Mortal:
    """Dies by SIGKILL once a checkpoint of an earlier step is on disk."""

    def _die(self, done: int) -> None:
        if done >= int(os.environ.get("PACELINE_KILL_AT", "1000000")):
            deadline = time.monotonic() + 60
            while not list(Path(os.environ["PACELINE_RUN"]).glob("checkpoints/step-*/digests.json")):
                assert time.monotonic() < deadline
                time.sleep(0.05)
            os.kill(os.getpid(), signal.SIGKILL)


class Images(_Mortal, Task):
    """A convolution with batch norm and dropout."""

    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(2, 4, 3, bias=False),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.Flatten(),
            nn.Dropout(0.2),
            nn.Linear(64, 3),
        )

    def train_data(self) -> TensorDataset:
        return images(50, 1)

    def val_data(self) -> dict[str, TensorDataset]:
        return {"dev": images(20, 2)}

    def loss(self, model: nn.Module, grain: Grain) -> tuple[torch.Tensor, int]:
        return F.cross_entropy(model(grain.x), grain.y, reduction="sum"), len(grain)

    def metrics(self, model: nn.Module, grain: Grain) -> dict[str, tuple[Any, int]]:
        return {"accuracy": ((model(grain.x).argmax(1) == grain.y).sum(), len(grain))}

    def after_step(self, model: nn.Module, step: Any, grains: Sequence[Grain]) -> None:
        self._die(step.number + 1)


class Digits(_Mortal, Continual):
    """Continual learning of scikit-learn's digits, with a replay buffer."""

    def after_step(self, model: nn.Module, step: Any, grains: Sequence[Grain]) -> None:
        super().after_step(model, step, grains)
        self._die(step.number + 1)
