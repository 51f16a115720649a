"""How many steps a stage and its learning-rate schedule have, as far as anybody knows."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from paceline.config.settings import TrainConfig
from paceline.train.feed import Feed
from paceline.train.task import Stage


def stage_steps(config: TrainConfig, stage: Stage, feed: Feed) -> int | None:
    """Steps of a stage, None if nobody knows. Where epochs differ in length (batches by cost), the first one stands
    for all."""
    epochs = stage.epochs or config.epochs
    per_epoch = None if epochs is None else feed.num_steps(0)
    ends = [config.steps, per_epoch and epochs and per_epoch * epochs]
    return min((end for end in ends if end is not None), default=None)


def schedule_steps(
    config: TrainConfig, stages: Sequence[Stage], number: int, feed: Feed, feed_of: Callable[[int, Stage], Feed]
) -> int | None:
    """Steps of the schedule that stage `number` follows: its own, or of all stages where no stage begins it anew."""
    steps = stage_steps(config, stages[number], feed)
    is_one_for_all = not any(stage.restart_schedule for stage in stages)
    if steps is None or len(stages) == 1 or not is_one_for_all or config.schedule == "constant":
        return steps
    for other, stage in enumerate(stages):
        if other != number:
            more = stage_steps(config, stage, feed_of(other, stage))
            if more is None:
                return None
            steps += more
    return steps
