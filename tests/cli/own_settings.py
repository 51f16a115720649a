"""A task with settings of its own, as a user would write it."""

from __future__ import annotations

from typing import Annotated, Any

import torch
from pydantic import Field, model_validator
from torch import nn
from torch.utils.data import TensorDataset

import paceline
from paceline.config.settings import Positive, PositiveFloat


class TowerSettings(paceline.TrainConfig):
    """What the tower is built of."""

    lr: PositiveFloat = 0.25
    epochs: Positive | None = 1
    depth: Annotated[int, Field(gt=0)] = 2
    """Layers of the tower."""
    widths: tuple[int, ...] = (4,)
    """Of the layers, from the bottom; the last goes on."""

    @model_validator(mode="after")
    def _fits(self) -> TowerSettings:
        if len(self.widths) > self.depth:
            raise ValueError("`widths` has more entries than `depth` has layers")
        return self


class Tower(paceline.Task):
    Settings = TowerSettings
    settings: TowerSettings

    def model(self) -> nn.Module:
        return nn.Sequential(*(nn.Linear(3, 3) for _ in range(self.settings.depth)))

    def train_data(self) -> TensorDataset:
        return TensorDataset(torch.randn(8, 3, generator=torch.Generator().manual_seed(0)))

    def val_data(self) -> dict[str, Any]:
        return {"dev": self.train_data()}

    def loss(self, model: nn.Module, grain: paceline.Grain) -> Any:
        (x,) = grain.data
        return model(x).square().sum(), len(grain)
