"""A measurement that rides on the training loop: benchmark, trial of `paceline tune`, learning-rate range test."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from paceline.config.settings import TrainConfig
from paceline.data.grain import Grain
from paceline.parallel.step import Step
from paceline.train.feed import Feed
from paceline.train.task import Stage

if TYPE_CHECKING:
    from paceline.train.trainer import Trainer


class Probe:
    """Callback on every rank that sees every step and may end the run. Subclass it and override what you need.

    A trainer with a probe trains the first stage over and over, until `steps` are done or the probe has seen enough;
    its settings should keep nothing: see `unkept`.
    """

    schedule: Callable[[int], float] | None = None
    """Learning rate by step, instead of the one that the settings ask for."""
    is_over: bool = False
    """Set to True to leave after the current step; on all ranks in the same step."""

    def stages(self, stages: Sequence[Stage]) -> list[Stage]:
        """Return the stages to train instead of the task's."""
        return [replace(stages[0], epochs=None)]

    def begin(self, trainer: Trainer, feed: Feed) -> None:
        """Called before the first step of a stage, when everything is set up."""

    def after_step(self, step: Step, grains: list[Grain]) -> None:
        """Called after each update, with this rank's grains."""


def unkept(config: TrainConfig, steps: int) -> TrainConfig:
    """Return settings of the same training for so many steps, with nothing kept, validated or logged elsewhere."""
    nowhere = {"out": None, "exp_name": None, "resume": "no", "loggers": (), "rank_logs": False}
    unseen = {"mode": "train", "val_every_steps": None, "val_every_epochs": None, "monitor": None, "patience": None}
    unsaved = {"save_every_steps": None, "save_every_epochs": None}
    return config.model_copy(update={**nowhere, **unseen, **unsaved, "epochs": None, "steps": steps})
