"""Handwritten digits (8 x 8, scikit-learn's own copy): the smallest real thing to train, on any machine, offline."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from paceline.core.extras import imports_for
from paceline.data.grain import Grain
from paceline.train.task import Sums, Task

NUM_TRAIN = 1437
"""Of 1797; the rest is for validation. The writers of the last quarter are others than those before."""


class Digits(Task):
    """A small convolutional net with batch norm and dropout."""

    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3, stride=2, padding=1),
            nn.BatchNorm2d(64),
            nn.ReLU(),
            nn.Flatten(),
            nn.Dropout(0.3),
            nn.Linear(64 * 16, 10),
        )

    def train_data(self) -> TensorDataset:
        return _digits(slice(0, NUM_TRAIN))

    def val_data(self) -> Mapping[str, Any]:
        return {"unseen": _digits(slice(NUM_TRAIN, None))}

    def loss(self, model: nn.Module, grain: Grain) -> Sums:
        return F.cross_entropy(model(grain.x), grain.y, reduction="sum"), len(grain)

    def metrics(self, model: nn.Module, grain: Grain) -> Mapping[str, Sums]:
        output = model(grain.x)
        loss = F.cross_entropy(output, grain.y, reduction="sum")
        return {"loss": (loss, len(grain)), "accuracy": ((output.argmax(1) == grain.y).sum(), len(grain))}

    def predict(self, model: nn.Module, grain: Grain) -> torch.Tensor:
        digits: torch.Tensor = model(grain.x).argmax(1)
        return digits


def _digits(part: slice) -> TensorDataset:
    with imports_for("digits"):
        from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    x = torch.tensor(images[part] / 16.0, dtype=torch.float32, device="cpu").view(-1, 1, 8, 8)
    return TensorDataset(x, torch.tensor(labels[part], device="cpu"))
