"""A small task with everything that usually makes ranks disagree: ragged lengths, batch norm, dropout, token counts.

And the same training as a plain PyTorch loop over the same grains and seeds, which knows nothing of Paceline's engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from paceline.core.keys import key
from paceline.data.collate import pad_collate
from paceline.data.grain import Grain
from paceline.data.plan import BatchRule, Plan
from paceline.train.task import Task

NUM_SAMPLES, FEATURES, CLASSES = 195, 6, 5  # batches of 24 leave 3 samples: one grain, fewer than ranks


class Ragged(torch.utils.data.Dataset[Any]):
    """Sequences of 3 to 40 frames with one label per frame."""

    def __init__(self, num_samples: int = NUM_SAMPLES, seed: int = 7) -> None:
        random = np.random.default_rng(seed)
        self.lengths = random.integers(3, 41, num_samples)
        self.counts = self.lengths
        self.frames = [random.normal(size=(length, FEATURES)).astype(np.float32) for length in self.lengths]
        self.labels = [random.integers(0, CLASSES, length) for length in self.lengths]

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.from_numpy(self.frames[index]), torch.from_numpy(self.labels[index])


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv1d(FEATURES, 16, 3, padding=1)
        self.norm = nn.BatchNorm1d(16)
        self.drop = nn.Dropout(0.3)
        self.second = nn.Conv1d(16, CLASSES, 3, padding=1)
        self.out_norm = nn.BatchNorm1d(CLASSES, momentum=0.25)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (batch, time, features) -> (batch, class, time)
        hidden = self.drop(F.relu(self.norm(self.first(x.transpose(1, 2)))))
        return self.out_norm(self.second(hidden))


def summed_loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, int]:
    mask = torch.arange(x.shape[1]) < lengths[:, None]
    losses = F.cross_entropy(model(x), y, reduction="none")
    return (losses * mask).sum(), int(lengths.sum())


class RaggedTask(Task):
    """`log` names a file to which every consumed grain is appended as `step rank grain sample ids`."""

    collate = staticmethod(pad_collate)
    log: Path | None = None

    def model(self) -> nn.Module:
        return Net()

    def train_data(self) -> Ragged:
        return Ragged()

    def val_data(self) -> Mapping[str, Any]:
        return {"dev": Ragged(37, seed=8), "tiny": Ragged(2, seed=9)}

    def loss(self, model: nn.Module, grain: Grain) -> tuple[torch.Tensor, int]:
        x, y, x_lengths, _ = grain
        return summed_loss(model, x, y, x_lengths)

    def metrics(self, model: nn.Module, grain: Grain) -> Mapping[str, Any]:
        x, y, lengths, _ = grain
        mask = torch.arange(x.shape[1]) < lengths[:, None]
        output = model(x)
        correct = ((output.argmax(1) == y) & mask).sum()
        total, count = (F.cross_entropy(output, y, reduction="none") * mask).sum(), int(lengths.sum())
        return {"loss": (total, count), "accuracy": (correct, count)}


def raw_loop(
    dtype: torch.dtype,
    num_steps: int,
    *,
    grains: int,
    global_batch: int,
    lr: float,
    seed: int,
    add_up: Callable[[list[Any]], Any] | None = None,
) -> tuple[list[float], nn.Module]:
    """Plain PyTorch: one process, micro-batches one after the other, one update per global batch.

    `add_up` adds the gradients of the micro-batches; without it they are accumulated.
    """
    torch.manual_seed(seed)
    model = Net().to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    data = Ragged()
    losses: list[float] = []
    epoch = 0
    while len(losses) < num_steps:
        rule = BatchRule(global_batch)
        plan = Plan(len(data), rule=rule, grains=grains, seed=seed, epoch=epoch, lengths=data.lengths)
        for step in range(plan.num_steps):
            count = int(data.lengths[plan.batch(step)].sum())
            optimizer.zero_grad()
            total = 0.0
            gradients: list[list[Any]] = []
            for number, samples in enumerate(plan.grains(step)):
                torch.manual_seed(key(seed, len(losses), number))
                x, y, lengths, _ = pad_collate([data[int(sample)] for sample in samples])
                loss, _ = summed_loss(model, x.to(dtype), y, lengths)
                (loss / count).backward()
                if add_up is not None:
                    gradients.append([parameter.grad for parameter in model.parameters()])
                    optimizer.zero_grad()
                total += float(loss.detach())
            for parameter, each in zip(model.parameters(), zip(*gradients, strict=True), strict=False):
                assert add_up is not None
                parameter.grad = add_up(list(each))
            optimizer.step()
            losses.append(total / count)
            if len(losses) == num_steps:
                break
        epoch += 1
    return losses, model
