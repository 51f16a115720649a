"""A task whose score is a formula of its settings, so that the best trial is known."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import paceline


class BowlSettings(paceline.TrainConfig):
    at: float = 0.0
    fails: bool = False


class Bowl(paceline.Task[BowlSettings]):
    """Validation gives (at - 3)^2, at once and for ever; the model is there because one must be."""

    Settings = BowlSettings
    monitor = "distance"

    def model(self) -> nn.Module:
        if self.settings.fails:
            raise RuntimeError("this value does not fit")
        return nn.Linear(1, 1)

    def train_data(self) -> Any:
        points = torch.linspace(0, 1, 8, dtype=torch.float32, device="cpu")[:, None]
        return torch.utils.data.TensorDataset(points, 2 * points)

    def val_data(self) -> dict[str, Any]:
        return {"val": self.train_data()}

    def loss(self, model: nn.Module, grain: paceline.Grain) -> tuple[torch.Tensor, int]:
        x, y = grain.data
        return nn.functional.mse_loss(model(x), y, reduction="sum"), len(y)

    def metrics(self, model: nn.Module, grain: paceline.Grain) -> dict[str, tuple[float, int]]:
        return {"distance": ((self.settings.at - 3.0) ** 2 * len(grain), len(grain))}
