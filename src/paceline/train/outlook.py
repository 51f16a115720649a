"""Outlook of a run: how many epochs and steps it will have, as far as that is known. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.config.settings import LoopSettings
from paceline.train.position import Position
from paceline.train.task import Stage


@dataclass(frozen=True)
class Outlook:
    """Length of a run, as seen at the start of an epoch. Early stopping (`patience`) may make it shorter."""

    epochs: int | None
    """Epochs of the stage that will be begun: fewer than the setting says where `steps` ends it before."""
    epoch_steps: int | None
    """Steps of the coming epoch, those before a resume included; fewer than its data has where `steps` ends it."""
    total_steps: int | None
    """Steps of the whole run. Epochs to come count like the coming one, stages to come like this one."""
    stage: str | None = None
    """Name and number of the stage, where there are several: `digits 4-5 (3 of 5)`."""

    def title(self, epoch: int) -> str:
        """Return an epoch in words, counted from 1: `stage b (2 of 5), epoch 3 of 10`."""
        of = "" if self.epochs is None else f" of {self.epochs}"
        stage = "" if self.stage is None else f"stage {self.stage}, "
        return f"{stage}epoch {epoch + 1}{of}"


def outlook(
    config: LoopSettings, stages: Sequence[Stage], number: int, position: Position, epoch_steps: int | None
) -> Outlook:
    """Return the outlook from a position in stage `number`, whose coming epoch has `epoch_steps` of data."""
    stage = stages[number]
    epochs = stage.epochs or config.epochs
    left = _known_min(
        None if config.steps is None else max(0, config.steps - (position.num_steps - position.stage_began)),
        None if epochs is None or epoch_steps is None else (epochs - position.epoch) * epoch_steps - position.step,
    )
    begun: int | None = None
    if left is not None and epoch_steps:
        begun = position.epoch + max(1, -(-(left + position.step) // epoch_steps))
    later = [_stage_steps(config, other, epoch_steps) for other in stages[number + 1 :]]
    total: int | None = None
    if left is not None:
        known = [steps for steps in later if steps is not None]
        total = position.num_steps + left + sum(known) if len(known) == len(later) else None
    in_epoch = _known_min(epoch_steps, None if left is None else position.step + left)
    name = None if len(stages) == 1 else f"{stage.name} ({number + 1} of {len(stages)})"
    return Outlook(_known_min(epochs, begun), in_epoch, total, name)


def _stage_steps(config: LoopSettings, stage: Stage, epoch_steps: int | None) -> int | None:
    """Return the steps of a stage whose epochs have so many."""
    epochs = stage.epochs or config.epochs
    return _known_min(config.steps, None if epochs is None or epoch_steps is None else epochs * epoch_steps)


def _known_min(*numbers: int | None) -> int | None:
    return min((number for number in numbers if number is not None), default=None)


class Pace:
    """Seconds per step of this launch, validation and checkpoints included, for the time that is left.

    The steps up to the first look are left out once there are others: they hold compilation and the first reads.
    """

    def __init__(self, num_steps: int, now_s: float) -> None:
        self._start, self._is_first = (num_steps, now_s), True

    def left_s(self, num_steps: int, now_s: float, total_steps: int) -> float | None:
        """Return the seconds until `total_steps`; None while nothing is known."""
        steps, since_s = self._start
        if num_steps <= steps:
            return None
        step_s = (now_s - since_s) / (num_steps - steps)
        if self._is_first:
            self._start, self._is_first = (num_steps, now_s), False
        return step_s * max(0, total_steps - num_steps)
