"""A recipe: two rings in the plane, told apart by a small network."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import paceline
from paceline import Grain


class RingsSettings(paceline.TrainConfig):
    """How large everything is."""

    hidden: int = 32
    """Width of the network."""
    num_points: int = 512
    """Points to train on."""


class Rings(paceline.Task[RingsSettings]):
    """Tell points of an inner ring from those of an outer one."""

    Settings = RingsSettings

    def model(self) -> nn.Module:
        hidden = self.settings.hidden
        return nn.Sequential(nn.Linear(2, hidden), nn.Tanh(), nn.Linear(hidden, 2))

    def train_data(self) -> Any:
        return rings(self.settings.num_points, seed=1)

    def val_data(self) -> dict[str, Any]:
        return {"val": rings(256, seed=2)}

    def loss(self, model: nn.Module, grain: Grain) -> tuple[torch.Tensor, int]:
        points, labels = grain.data
        return nn.functional.cross_entropy(model(points), labels, reduction="sum"), len(labels)

    def metrics(self, model: nn.Module, grain: Grain) -> dict[str, tuple[float, int]]:
        points, labels = grain.data
        right = (model(points).argmax(dim=1) == labels).sum().item()
        return {"accuracy": (float(right), len(labels))}


def rings(num_points: int, seed: int) -> torch.utils.data.TensorDataset:
    """Return points around two circles, and which one each belongs to."""
    random = torch.Generator(device="cpu").manual_seed(seed)
    labels = torch.arange(num_points, dtype=torch.int64, device="cpu") % 2
    angles = torch.rand(num_points, generator=random, dtype=torch.float32, device="cpu") * 2 * torch.pi
    noise = torch.randn(num_points, generator=random, dtype=torch.float32, device="cpu")
    radii = 1.0 + labels + 0.1 * noise
    points = torch.stack([radii * torch.cos(angles), radii * torch.sin(angles)], dim=1)
    return torch.utils.data.TensorDataset(points, labels)
