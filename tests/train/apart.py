"""A task without batch norm or dropout whose samples count differently, and local SGD on it written by hand."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

from paceline.config.settings import TrainConfig
from paceline.data.grain import Grain
from paceline.train.loop import train
from paceline.train.run import open_run
from paceline.train.task import HasLengths, Task
from paceline.world.link import Link

NUM_SAMPLES, FEATURES, BATCH, LR = 96, 5, 16, 0.05


def points(num_samples: int = NUM_SAMPLES, seed: int = 1) -> TensorDataset:
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(num_samples, FEATURES, generator=random)
    weights = torch.randint(1, 5, (num_samples,), generator=random).float()
    return TensorDataset(x, (x.sum(1).sin() + 0.1 * x[:, 0]), weights)


class Net(nn.Module):
    def __init__(self, has_norm: bool = False) -> None:
        super().__init__()
        self.body = nn.Linear(FEATURES, 12)
        self.norm = nn.BatchNorm1d(12) if has_norm else nn.Identity()
        self.head = nn.Linear(12, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.norm(self.body(x)))).squeeze(1)


class WeightedTask(Task, HasLengths):
    """Samples are weighed where `is_even` is False, so ranks have unequal counts."""

    def __init__(
        self,
        is_even: bool = True,
        has_norm: bool = False,
        slow_rank: int | None = None,
        num_samples: int = NUM_SAMPLES,
    ) -> None:
        self._is_even, self._has_norm, self._slow_rank, self._num_samples = is_even, has_norm, slow_rank, num_samples
        self.seen: list[int] = []

    def model(self) -> nn.Module:
        return Net(self._has_norm)

    def train_data(self) -> TensorDataset:
        return points(self._num_samples)

    def val_data(self) -> Mapping[str, Any]:
        return {"dev": points(24, seed=2)}

    def counts(self, data: Any) -> Any:
        return None if self._is_even else data.tensors[2].numpy().astype(np.int64)

    def loss(self, model: nn.Module, grain: Grain) -> Any:
        if model.training:
            self.seen += grain.samples.tolist()
            if self._slow_rank == self.world.rank:
                time.sleep(0.003)  # this rank is slower, nobody waits for anything
        x, y, weights = grain
        dtype = next(model.parameters()).dtype
        squares = (model(x.to(dtype)) - y.to(dtype)).square()
        return (squares.sum(), len(grain)) if self._is_even else ((squares * weights).sum(), int(weights.sum()))


def config(**settings: Any) -> TrainConfig:
    plain = {"global_batch": BATCH, "order": "none", "optimizer": "sgd", "lr": LR, "level": 0, "workers": 0}
    return TrainConfig(**{**plain, **settings})


def fit(link: Link, task: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    """Train; weights, buffers, samples seen and numbers of averages of this rank."""
    mine = WeightedTask(**task)
    if isinstance(settings.get("out"), str):
        settings = {**settings, "out": Path(settings["out"])}
    trainer = open_run(mine, config(**settings), link)
    result = train(trainer)
    return {
        "state": {name: tensor.clone() for name, tensor in trainer.stepper.model.state_dict().items()},
        "seen": mine.seen,
        "steps": result.num_steps,
        "loss": result.loss,
        "averages": getattr(trainer.stepper.prepared.strategy, "num_averages", 0),
        "interval": getattr(trainer.stepper.prepared.strategy, "interval", 0),
    }


Combine = Callable[[list[torch.Tensor]], None]


def local_steps(
    link: Link,
    num_steps: int,
    momentum: float,
    after: Callable[[int, nn.Module, Any], None],
    num_samples: int = NUM_SAMPLES,
) -> nn.Module:
    """Plain PyTorch: this rank's slice of every batch, its own optimizer; `after(step, model, optimizer)`."""
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=momentum)
    x, y, _ = points(num_samples).tensors
    per_rank = BATCH // link.world.size
    for step in range(num_steps):
        begin = (step * BATCH) % num_samples + link.world.rank * per_rank
        mine = slice(begin, begin + per_rank)
        optimizer.zero_grad()
        ((model(x[mine]) - y[mine]).square().sum() / per_rank).backward()
        optimizer.step()
        after(step, model, optimizer)
    return model


def mean_over_ranks(tensors: list[torch.Tensor]) -> None:
    """One flat buffer, summed and divided."""
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    for tensor, piece in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(piece.view_as(tensor))
