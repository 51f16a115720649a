"""Tasks for `paceline tune`: one with something to learn, one that needs more memory than there is."""

from __future__ import annotations

import os
import signal
from typing import Any

import torch
from tasks_for_tests import Good
from torch import nn
from torch.utils.data import TensorDataset

import paceline


class Learnable(Good):
    """Whether the first number is positive."""

    def train_data(self) -> TensorDataset:
        numbers = torch.randn(512, 3, generator=torch.Generator().manual_seed(0))
        return TensorDataset(numbers, (numbers[:, 0] > 0).long())


class Hungry(Good):
    """The kernel kills rank 1 on grains of 8 samples."""

    def loss(self, model: nn.Module, grain: paceline.Grain) -> Any:
        if self.world.rank == 1 and len(grain) == 8:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().loss(model, grain)
