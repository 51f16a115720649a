"""Tasks of the runs in this folder. PACELINE_KILL_AT in the environment ends them by SIGKILL after that many steps.

`python tasks.py ARGUMENTS` is `paceline ARGUMENTS` where recipes also obey that variable; only `write.py` uses it.
"""

from __future__ import annotations

import math
import os
import runpy
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from paceline import Engine, Grain, Task
from paceline.continual import Continual


def images(num_samples: int, seed: int) -> TensorDataset:
    random = torch.Generator().manual_seed(seed)
    x = torch.rand(num_samples, 2, 6, 6, generator=random)
    return TensorDataset(x, (4 * x.mean((1, 2, 3)) + x[:, 0, 0, 0]).long() % 3)


def die(num_steps: int) -> None:
    """Die by SIGKILL after PACELINE_KILL_AT steps, once the checkpoint of the step before is on disk."""
    kill_at = int(os.environ.get("PACELINE_KILL_AT", "1000000"))
    if num_steps >= kill_at:
        deadline = time.monotonic() + 60
        while not (Path(os.environ["PACELINE_RUN"]) / f"checkpoints/step-{kill_at - 1:08d}/digests.json").exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGKILL)


class Images(Task):
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
        die(step.number + 1)


class Digits(Continual):
    """Continual learning of scikit-learn's digits, with a replay buffer."""

    def after_step(self, model: nn.Module, step: Any, grains: Sequence[Grain]) -> None:
        super().after_step(model, step, grains)
        die(step.number + 1)


class Narrow(nn.Module):
    """Backbone of the recipe `continual` with a few hundred weights."""

    def __init__(self, shape: Sequence[int], num_classes: int) -> None:
        super().__init__()
        self.first = nn.Linear(math.prod(shape), 12)
        self.head = nn.Linear(12, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.first(x.flatten(1))))


if __name__ == "__main__":
    step = Engine.step

    def mortal_step(engine: Engine, *arguments: Any) -> Any:
        die(engine.position.num_steps)
        return step(engine, *arguments)

    sys.argv[0] = "paceline"
    Engine.step = mortal_step  # type: ignore[method-assign]
    runpy.run_module("paceline", run_name="__main__")
