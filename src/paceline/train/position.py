"""Position of a run: the next step to do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from paceline.data.grain import Batch


@dataclass
class Position:
    """The next step to do. (stage, epoch, step) finds the data, `num_steps` keys the randomness."""

    stage: int = 0
    epoch: int = 0
    step: int = 0
    """Within the epoch."""
    num_steps: int = 0
    """Since the run began."""
    stage_began: int = 0
    """`num_steps` when the stage began."""
    schedule_began: int = 0
    """`num_steps` when the schedule last started anew."""
    validated: int = -1
    """`num_steps` at the last validation, -1 before the first."""
    score: float | None = None
    """Value of `monitor` at the last validation."""
    best: float | None = None
    bad_validations: int = 0
    scores: list[float] = field(default_factory=list)
    """Monitored scores since the schedule began, lower is better."""
    is_complete: bool = False
    """The last stage has ended, `after_stage` included."""
    data: str | None = None
    """Fingerprint of the stage's data, once it has begun."""
    first_loss: float | None = None
    """Largest loss, by its size, of the first step of a stage: divergence is judged by it."""
    is_epoch_over: bool = False
    """Data of unknown length has ended with the last step."""
    save_every: int | None = None
    """Steps between checkpoints that `save_every_steps: auto` has chosen."""

    def advance(self, batch: Batch) -> None:
        """Move past a batch; the engine counts `num_steps` when it steps."""
        self.step = batch.step + 1

    def end_epoch(self) -> None:
        """Move to the start of the next epoch."""
        self.epoch, self.step, self.is_epoch_over = self.epoch + 1, 0, False

    def begin_stage(self, number: int) -> None:
        """Move to the start of another stage, whose scores are not compared with those before."""
        self.stage, self.epoch, self.step, self.is_epoch_over = number, 0, 0, False
        self.best, self.bad_validations = None, 0
        self.data = None

    @property
    def is_fresh(self) -> bool:
        """True if the last validation was of the weights as they are now."""
        return self.validated == self.num_steps

    @property
    def num_begun_stages(self) -> int:
        """Stages whose `before_stage` was called: a position at the end of a stage is of a model before the next."""
        return self.stage + (self.epoch > 0 or self.step > 0)

    def state(self) -> dict[str, Any]:
        """Return the fields as plain values, for a checkpoint; `save_every` where it was chosen: older versions do not
        know it."""
        return {name: value for name, value in asdict(self).items() if name != "save_every" or value is not None}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go to where `state` was taken."""
        self.__dict__.update(vars(Position(**state)))
