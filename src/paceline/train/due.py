"""Decisions between steps: intervals, and when an epoch, a stage and a run are over. Values in, values out."""

from __future__ import annotations

import math
from enum import Enum

from paceline.config.settings import LoopSettings
from paceline.train.position import Position


class Outcome(Enum):
    """Reason why the loop over an epoch's batches ended."""

    EPOCH_DONE = "epoch done"
    OUT_OF_DATA = "out of data"
    """Data of unknown length: no rank has more."""
    OUT_OF_STEPS = "out of steps"
    EARLY = "early"
    """Out of `patience`."""
    STOPPED = "stopped"
    """Asked to, by a signal."""
    MEASURED = "measured"
    """A probe has seen enough."""
    REGROUP = "regroup"
    """All ranks leave the round after the same step, because another process waits to join."""
    DIVERGED = "diverged"
    """Weights or losses are beyond repair."""

    @property
    def is_cut_short(self) -> bool:
        """True if the epoch has more data: a run that is given more steps or patience goes on inside it."""
        return self in (Outcome.OUT_OF_STEPS, Outcome.EARLY)

    @property
    def is_interruption(self) -> bool:
        """True if neither the epoch nor its stage is ended with it."""
        return self in (Outcome.STOPPED, Outcome.MEASURED, Outcome.REGROUP)

    @property
    def goes_on(self) -> bool:
        """True unless the run ends here: it has more epochs or stages, if there are any."""
        return self in (Outcome.EPOCH_DONE, Outcome.OUT_OF_DATA, Outcome.OUT_OF_STEPS)

    @property
    def status(self) -> str:
        """Status of a run that ends so."""
        return "finished" if self.goes_on or self is Outcome.MEASURED else self.value


MEASURING_SAVES = 10
"""Steps between the first checkpoints of `save_every_steps: auto`, until it is known what one costs."""


def ended_by(config: LoopSettings, position: Position) -> Outcome | None:
    """Return why the run ends at a position, wherever in an epoch that is; None if it goes on."""
    if is_out_of_patience(config, position):
        return Outcome.EARLY
    return Outcome.OUT_OF_STEPS if is_out_of_steps(config, position) else None


def next_multiple(number: int, every: int) -> int:
    """Return the first multiple of `every` that is larger than `number`."""
    return number - number % every + every


def save_interval(config: LoopSettings, position: Position) -> int | None:
    """Return the steps between checkpoints: as set, or as `auto` has chosen."""
    if config.save_every_steps == "auto":
        return position.save_every or MEASURING_SAVES
    return config.save_every_steps


def is_multiple(number: int, every: int | None) -> bool:
    """Return True if `number` is a multiple of `every`; never without an interval."""
    return every is not None and number % every == 0


def is_out_of_steps(config: LoopSettings, position: Position) -> bool:
    """Return True if the stage has had all of its `steps`."""
    return config.steps is not None and position.num_steps - position.stage_began >= config.steps


def is_out_of_patience(config: LoopSettings, position: Position) -> bool:
    """Return True if the last `patience` validations were no better than the best."""
    return config.patience is not None and position.bad_validations >= config.patience


def is_stage_over(config: LoopSettings, position: Position, epochs: int | None) -> bool:
    """Return True if the stage has had its `epochs` or its `steps`."""
    return is_out_of_steps(config, position) or (epochs is not None and position.epoch >= epochs)


def outcome_at(config: LoopSettings, position: Position, epoch_steps: int | None) -> Outcome | None:
    """Return how the loop over an epoch's batches had ended at a position; None if it goes on, or has not begun.

    A run may be resumed between the save of its last step and the end of the epoch or of the stage. `epoch_steps` are
    those of the epoch, None if unknown.
    """
    reason = ended_by(config, position) if position.step > 0 else None
    is_whole = position.is_epoch_over or position.step == epoch_steps
    return Outcome.EPOCH_DONE if reason is not None and is_whole else reason


def validates_at_end(config: LoopSettings, outcome: Outcome, *, is_last_stage: bool) -> bool:
    """Return True if the end of a stage asks for a validation: the run ends with it, or `steps` ended it in mid-epoch.

    A stage before the last is not looked at otherwise: stages may be many, and their tasks measure as they need.
    """
    return config.val_at_end and (is_last_stage or outcome.is_cut_short)


def best_score(config: LoopSettings, position: Position) -> float | None:
    """Return the best monitored score of the stage, that of a validation which only the end of the run asked for
    included."""
    scores = [position.best, position.score if position.is_fresh else None]
    numbers = [score for score in scores if score is not None and math.isfinite(score)]
    return (min if config.monitor_mode == "min" else max)(numbers, default=None)


def is_new_best(config: LoopSettings, position: Position) -> bool:
    """Return True if the last validation was of these very weights, gave the best score so far, and bests are kept."""
    is_best = position.score is not None and position.score == position.best
    return position.is_fresh and is_best and position.bad_validations == 0 and config.keep_best > 0
