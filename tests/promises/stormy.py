"""A task whose saves take as long as those of a large model, for signals that come in the middle of one."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import paceline

SYNC_S = float(os.environ.get("SYNC_S", "0.1"))  # a checkpoint has about ten
_fsync = os.fsync


def _slow_fsync(descriptor: int) -> None:
    time.sleep(SYNC_S)
    _fsync(descriptor)


class Stormy(paceline.Task):
    """Trains for ever; after a few steps it says so, by a file beside its run."""

    def model(self) -> nn.Module:
        os.fsync = _slow_fsync
        return nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))

    def train_data(self) -> TensorDataset:
        random = torch.Generator().manual_seed(0)
        return TensorDataset(torch.randn(32, 3, generator=random), torch.randint(0, 2, (32,), generator=random))

    def loss(self, model: nn.Module, grain: paceline.Grain) -> Any:
        return F.cross_entropy(model(grain.x), grain.y, reduction="sum"), len(grain)

    def after_step(self, model: nn.Module, step: Any, grains: list[paceline.Grain]) -> None:
        time.sleep(0.01)
        if step.number == 3 and self.world.rank == 0:
            ready_file(Path(str(self.settings.out))).touch()


def ready_file(run: Path) -> Path:
    return run.with_name(f"{run.name}-ready")
