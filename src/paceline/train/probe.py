"""A measurement that rides on the training loop: benchmark, trial of `paceline tune`, learning-rate range test."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from paceline.config.settings import TrainConfig
from paceline.data.grain import Grain
from paceline.train.due import Outcome
from paceline.train.duties import Duty, Moment
from paceline.train.position import Position

if TYPE_CHECKING:
    from paceline.train.run import Run


class Probe(Duty):
    """Duty of every rank that sees every step and may end the run. Subclass it and override what you need.

    A run with a probe trains the first stage over and over, until `steps` are done or the probe has seen enough; its
    settings should keep nothing: see `unkept`.
    """

    schedule: Callable[[int], float] | None = None
    """Learning rate by step, instead of the one that the settings ask for."""
    is_over: bool = False
    """Set to True to leave after the current step; on all ranks in the same step."""

    def next_due(self, position: Position) -> int:
        return position.num_steps + 1

    def is_due(self, position: Position, moment: Moment) -> bool:
        return True

    def needs_sync(self, moment: Moment) -> bool:
        return False

    def after_step(self, num_steps: int, grains: Sequence[Grain]) -> None:
        """Called after each update, with the number of steps done and this rank's grains."""

    def attend(self, run: Run, moment: Moment) -> Outcome | None:
        self.after_step(run.position.num_steps, moment.grains)
        run.clock.lap("compute")
        return Outcome.MEASURED if self.is_over else None


def unkept(config: TrainConfig, steps: int) -> TrainConfig:
    """Return settings of the same training for so many steps, with nothing kept, validated or logged elsewhere."""
    nowhere = {"out": None, "exp_name": None, "resume": "no", "loggers": (), "rank_logs": False}
    unseen = {"validation": False, "val_every_steps": None, "val_every_epochs": None, "monitor": None, "patience": None}
    unsaved = {"save_every_steps": None, "save_every_epochs": None}
    return config.model_copy(update={**nowhere, **unseen, **unsaved, "epochs": None, "steps": steps})
