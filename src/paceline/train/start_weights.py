"""Weights that a new run starts from, for fine-tuning: `init_from`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from paceline.train.checkpoint import reader as restore
from paceline.train.task import Task


def load(model: torch.nn.Module, task: Task, path: Path | None, say: Callable[[str], None]) -> None:
    """Load by name what a checkpoint, or a file of the task's own kind, has of the model, and say what is new."""
    if path is None:
        return
    weights = task.read_weights(path)
    if weights is None:
        weights = restore.load(path, ["model"]).parts["model"]
    say(restore.load_by_name(model, weights).line(path))
