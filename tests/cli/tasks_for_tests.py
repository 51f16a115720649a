"""Tasks as a user would write them, for the command line to find; most have a mistake."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import paceline


class Good(paceline.Task):
    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 2))

    def train_data(self) -> TensorDataset:
        random = torch.Generator().manual_seed(0)
        return TensorDataset(torch.randn(40, 3, generator=random), torch.randint(0, 2, (40,), generator=random))

    def loss(self, model: nn.Module, grain: paceline.Grain) -> Any:
        return F.cross_entropy(model(grain.x), grain.y, reduction="sum"), len(grain)


class Mean(Good):
    def loss(self, model: nn.Module, grain: paceline.Grain) -> Any:
        return F.cross_entropy(model(grain.x), grain.y)


class NotANumber(Good):
    def loss(self, model: nn.Module, grain: paceline.Grain) -> Any:
        return model(grain.x).sum() * float("nan"), len(grain)


class BreaksOnOneRank(Good):
    def loss(self, model: nn.Module, grain: paceline.Grain) -> Any:
        if self.world.rank == 1:
            raise ValueError("one rank has a bug")
        return super().loss(model, grain)
