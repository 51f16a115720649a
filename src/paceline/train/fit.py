"""`paceline.fit`: a task and its settings, in one call, on however many ranks this process is one of."""

from __future__ import annotations

import os
from typing import Any

from paceline.config.settings import TrainConfig
from paceline.train.task import Task
from paceline.train.trainer import Result, Trainer
from paceline.world.discover import discover
from paceline.world.start import start


def fit(task: Task, config: TrainConfig | None = None, **settings: Any) -> Result:
    """Train `task` with `config`, or with the settings given by name.

    Under a launcher (torchrun, mpirun, srun, `paceline train --procs`) every rank calls it alike.
    """
    config = config or TrainConfig(**settings)
    link = start(
        discover(os.environ),
        device=config.device,
        threads=config.threads,
        start_timeout_s=config.start_timeout_s,
        timeout_s=config.timeout_s,
    )
    with link:
        return Trainer(task, config, link).fit()
