"""When something is due: logging, validation, saving, the end. Pure decisions on numbers of steps or epochs."""

from __future__ import annotations

from paceline.config.settings import TrainConfig


def is_due(number: int, every: int | None) -> bool:
    return every is not None and number % every == 0


def due_since(before: int, now: int, every: int | None) -> bool:
    """Whether a multiple of `every` has come since, `now` included."""
    return every is not None and now // every > before // every


def next_due(config: TrainConfig, now: int, stage_began: int) -> int:
    """The first number of steps after `now` at which something is logged, validated, saved or ended."""
    intervals = (config.log_every, config.val_every_steps, config.save_every_steps)
    due = [now - now % every + every for every in intervals if every is not None]
    return min(due if config.steps is None else [*due, stage_began + config.steps])
