"""A task with blocks whose sizes do not divide by the ranks, and batches that do not, either."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from paceline.config.settings import TrainConfig
from paceline.data.grain import Grain
from paceline.train.loop import train
from paceline.train.run import Run, open_run
from paceline.train.task import Task
from paceline.world.link import Link

NUM_SAMPLES, FEATURES, WIDTH = 35, 5, 13  # in batches of 16: the last has 3 samples, fewer than 4 ranks
STEPS_PER_EPOCH = 3


def points(num_samples: int, seed: int) -> TensorDataset:
    x = torch.randn(num_samples, FEATURES, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return TensorDataset(x.float(), (x.sum(1).sin() + 0.1 * x[:, 0]).float())


class Norm(nn.BatchNorm1d):
    """Batch norm that takes grains of one sample, too: it sees each twice, differently."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (batch, width)
        return super().forward(torch.stack((x, 1.0 - 0.5 * x), 2))[:, :, 0]


class Net(nn.Module):
    def __init__(self, has_norm: bool) -> None:
        super().__init__()
        self.body = nn.Linear(FEATURES, WIDTH)
        norms = [Norm(WIDTH) if has_norm else nn.Identity() for _ in range(3)]
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), norm, nn.Tanh()) for norm in norms)
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (batch, features) -> (batch,)
        x = self.body(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x).squeeze(1)


class BlocksTask(Task):
    def __init__(self, has_norm: bool = False) -> None:
        self._has_norm = has_norm

    def model(self) -> nn.Module:
        return Net(self._has_norm)

    def train_data(self) -> TensorDataset:
        return points(NUM_SAMPLES, seed=1)

    def val_data(self) -> Mapping[str, Any]:
        return {"dev": points(11, seed=2)}

    def loss(self, model: nn.Module, grain: Grain) -> Any:
        dtype = next(model.parameters()).dtype
        wide = torch.promote_types(dtype, torch.float32)  # pieces of fp16 weights are fp32 masters
        return (model(grain.x.to(dtype)).to(wide) - grain.y.to(wide)).square().sum(), len(grain)

    def metrics(self, model: nn.Module, grain: Grain) -> Mapping[str, Any]:
        total, count = self.loss(model, grain)
        return {"loss": (total, count)}


def opened(link: Link, task: Task, settings: dict[str, Any]) -> Run:
    plain = {
        "steps": 12,
        "global_batch": 16,
        "grains": 8,
        "optimizer": "adamw",
        "lr": 0.02,
        "weight_decay": 0.1,
        "clip_norm": 0.5,
        "level": 0,
        "workers": 0,
        "loggers": (),
        "shard_modules": ("blocks.*",),
    }
    given = {**plain, **settings}
    if isinstance(given.get("out"), str):
        given["out"] = Path(given["out"])
    return open_run(task, TrainConfig(**given), link)


def fit(link: Link, settings: dict[str, Any], has_norm: bool = False) -> dict[str, Any]:
    """Train; what the run came to, and how much of the model and of its state this rank has kept."""
    made = opened(link, BlocksTask(has_norm), settings)
    result = train(made)
    state = made.stepper.optimizer.state.values()
    updated = [tensor for group in made.stepper.optimizer.param_groups for tensor in group["params"]]
    return {
        "metrics": result.metrics,
        "scale": made.stepper.scale.current(),
        "weights": sum(tensor.numel() for tensor in updated),
        "storage": sum(tensor.untyped_storage().nbytes() for tensor in updated),
        "moments": sum(entry["exp_avg"].numel() + entry["exp_avg_sq"].numel() for entry in state if "exp_avg" in entry),
        "parameters": sum(parameter.numel() for parameter in made.stepper.model.parameters()),
    }
