"""Position of a run: the next step to do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from paceline.data.grain import Batch


@dataclass(frozen=True)
class Position:
    """The next step to do. (stage, epoch, step) finds the data, `num_steps` keys the randomness.

    It is a value: training holds the current one and replaces it.
    """

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
    scores: tuple[float, ...] = ()
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

    @classmethod
    def load(cls, state: Mapping[str, Any]) -> Position:
        """Return the position that `state` was taken of."""
        return cls(**{**state, "scores": tuple(state.get("scores", ()))})

    def advance(self, batch: Batch) -> Position:
        """Return the position after a batch that was trained on."""
        moved = object.__new__(Position)  # `replace`, which runs all of __init__, takes ten times as long
        moved.__dict__.update(self.__dict__, step=batch.step + 1, num_steps=self.num_steps + 1)
        return moved

    def end_epoch(self) -> Position:
        """Return the start of the next epoch."""
        return replace(self, epoch=self.epoch + 1, step=0, is_epoch_over=False)

    def enter_stage(self, number: int) -> Position:
        """Return the start of another stage, whose scores are not compared with those before."""
        fresh: dict[str, Any] = {"best": None, "bad_validations": 0, "data": None}
        return replace(self, stage=number, epoch=0, step=0, is_epoch_over=False, **fresh)

    def begin_stage(self, *, restarts_schedule: bool) -> Position:
        """Return the position with its stage begun at this step, and the schedule as well if it restarts."""
        began = replace(self, stage_began=self.num_steps)
        return replace(began, schedule_began=self.num_steps, scores=()) if restarts_schedule else began

    @property
    def is_fresh(self) -> bool:
        """True if the last validation was of the weights as they are now."""
        return self.validated == self.num_steps

    @property
    def num_begun_stages(self) -> int:
        """Stages whose `before_stage` was called: a position at the end of a stage is of a model before the next."""
        return self.stage + (self.epoch > 0 or self.step > 0)

    def state(self) -> dict[str, Any]:
        """Return the fields as plain values, for a checkpoint; `save_every` only if it was chosen: older versions do
        not know it."""
        values = {**asdict(self), "scores": list(self.scores)}
        return {name: value for name, value in values.items() if name != "save_every" or value is not None}
