"""A task so small that every number of its training can be had by hand, and that hand-written training.

No randomness, one grain, samples in their order: step k of an epoch is samples [k * batch, (k + 1) * batch).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from paceline.config.settings import TrainConfig
from paceline.data.grain import Grain
from paceline.observe.journal import read
from paceline.speed.precision import Capabilities
from paceline.train import task as tasks
from paceline.train.run import Run, open_run
from paceline.train.task import Task
from paceline.world.discover.environment import World
from paceline.world.link import Link
from paceline.world.start import start

NUM_SAMPLES, FEATURES, BATCH, STEPS_PER_EPOCH = 20, 4, 8, 3  # the last batch of an epoch has 4
LR = 0.05
CPU = Capabilities("cpu", "this CPU", bf16=True, tf32=False, fp16=True, compiler=False)
OLD_CPU = replace(CPU, name="an old CPU", bf16=False)


def points(num_samples: int, seed: int) -> TensorDataset:
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(num_samples, FEATURES, generator=random, dtype=torch.float64)
    return TensorDataset(x.float(), (x.sum(1).sin() + 0.1 * x[:, 0]).float())


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(FEATURES, 6)
        self.head = nn.Linear(6, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (batch, features) -> (batch,)
        return self.head(torch.tanh(self.body(x))).squeeze(1)


def squares(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (model(x) - y.to(x.dtype)).square().sum()


class SmallTask(Task):
    """Remembers which samples it was given, by step."""

    def __init__(self) -> None:
        self.seen: list[list[int]] = []

    def model(self) -> nn.Module:
        return Net()

    def train_data(self) -> Any:
        return points(NUM_SAMPLES, seed=1)

    def val_data(self) -> Mapping[str, Any]:
        return {"dev": points(7, seed=2), "test": points(5, seed=3)}

    def loss(self, model: nn.Module, grain: Grain) -> Any:
        if model.training:
            self.seen.append(grain.samples.tolist())
        dtype = next(model.parameters()).dtype
        return squares(model, grain.x.to(dtype), grain.y), len(grain)

    def metrics(self, model: nn.Module, grain: Grain) -> Mapping[str, Any]:
        total, count = self.loss(model, grain)
        return {"loss": (total, count), "far": (total > count, 1)}


class Recordable(SmallTask, tasks.Recordable):
    def recordable(self, grain: Grain) -> Any:
        return grain.data


class ScoredTask(SmallTask):
    """Validation gives numbers prescribed beforehand, one after the other."""

    def __init__(self, scores: Sequence[float]) -> None:
        super().__init__()
        self._scores = iter(scores)

    def val_data(self) -> Mapping[str, Any]:
        return {"dev": points(2, seed=2)}

    def metrics(self, model: nn.Module, grain: Grain) -> Mapping[str, Any]:
        return {"loss": (1.0, 1), "score": (next(self._scores), 1)}


def alone() -> Link:
    """The link of a single process."""
    return start(World(0, 0, 1, 1, 0, 1, "test", None), device="cpu", threads=1)


def opened(task: Task, out: Path | None, link: Link | None = None, **settings: Any) -> Run:
    plain = {"global_batch": BATCH, "order": "none", "optimizer": "sgd", "lr": LR, "level": 0, "workers": 0}
    return open_run(task, TrainConfig(out=out, **{**plain, **settings}), link or alone())


def weights(trained: Run) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in trained.stepper.model.state_dict().items()}


def assert_same(ours: Mapping[str, torch.Tensor], others: Mapping[str, torch.Tensor]) -> None:
    assert ours.keys() == others.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, others[name]), f"{name} is not bitwise the same"


def batches(num_steps: int, data: TensorDataset) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The batches of so many steps, epoch after epoch."""
    x, y = data.tensors
    starts = list(range(0, len(data), BATCH))
    for step in range(num_steps):
        begin = starts[step % len(starts)]
        yield x[begin : begin + BATCH], y[begin : begin + BATCH]


def raw_steps(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    num_steps: int,
    *,
    data: TensorDataset | None = None,
    rate: Callable[[int], float] | None = None,
    dtype: torch.dtype = torch.float32,
) -> Iterator[float]:
    """Train in plain PyTorch; the loss of each step, after it has been done."""
    for step, (x, y) in enumerate(batches(num_steps, data or points(NUM_SAMPLES, seed=1))):
        if rate is not None:
            for group in optimizer.param_groups:
                group["lr"] = rate(step)
        optimizer.zero_grad()
        loss = squares(model, x.to(dtype), y) / len(y)
        loss.backward()
        optimizer.step()
        yield loss.item()


def fresh_net(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)


def validations_of(run: Path) -> list[dict[str, Any]]:
    """What was written down of validations, but for how long they took."""
    found = read(run / "metrics.jsonl", "validation")
    return [{name: value for name, value in record.items() if name != "seconds"} for record in found]
