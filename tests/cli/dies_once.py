"""A task whose second rank dies without a word in the first attempt, after a checkpoint."""

from __future__ import annotations

import os
import signal
from typing import Any

from torch import nn

import paceline
from tests.cli.tasks_for_tests import Good


class DiesOnce(Good):
    def after_step(self, model: nn.Module, step: Any, grains: list[paceline.Grain]) -> None:
        if step.number == 4 and self.world.attempt == 0 and self.world.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
