"""A task that needs more memory than there is, until its grains are small enough."""

from __future__ import annotations

import os
import signal
from typing import Any

from tasks_for_tests import Good
from torch import nn

import paceline


class Hungry(Good):
    """The kernel kills rank 1 on grains of 8 samples."""

    def loss(self, model: nn.Module, grain: paceline.Grain) -> Any:
        if self.world.rank == 1 and len(grain) == 8:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().loss(model, grain)
