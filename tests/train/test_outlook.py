"""Length of a run: epochs, `steps`, stages, resumed ones; and the time that is left."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.config.settings import TrainConfig
from paceline.train.outlook import Outlook, Pace, outlook
from paceline.train.position import Position
from paceline.train.task import Stage

ONE = [Stage("train", None)]
TWO = [Stage("a", None), Stage("b", None, epochs=2)]


def config(**settings: Any) -> TrainConfig:
    return TrainConfig(global_batch=1, **settings)


@pytest.mark.parametrize(
    ("settings", "position", "steps", "expected"),
    [
        ({"epochs": 400}, Position(epoch=1, num_steps=100), 100, Outlook(400, 100, 40_000)),
        ({"steps": 250}, Position(), 100, Outlook(3, 100, 250)),
        ({"steps": 250}, Position(epoch=2, num_steps=200), 100, Outlook(3, 50, 250)),
        ({"steps": 250}, Position(epoch=2, step=20, num_steps=220), 100, Outlook(3, 50, 250)),
        ({"steps": 250, "epochs": 2}, Position(), 100, Outlook(2, 100, 200)),
        ({"steps": 70, "epochs": 2}, Position(), 100, Outlook(1, 70, 70)),
        ({"epochs": 3}, Position(epoch=1, step=40, num_steps=150), 100, Outlook(3, 100, 310)),
        ({"epochs": 3}, Position(), None, Outlook(3, None, None)),
        ({"steps": 70}, Position(num_steps=30, step=30), None, Outlook(None, 70, 70)),
    ],
)
def test_of_one_stage(settings: dict[str, Any], position: Position, steps: int | None, expected: Outlook) -> None:
    """Epochs differ in length where batches are made by cost: those that were done count as they were."""
    assert outlook(config(**settings), ONE, 0, position, steps) == expected


def test_of_several_stages() -> None:
    first = outlook(config(epochs=1), TWO, 0, Position(), 10)
    assert (first.title(0), first.total_steps) == ("stage a (1 of 2), epoch 1 of 1", 30)
    second = outlook(config(epochs=1), TWO, 1, Position(stage=1, num_steps=10, stage_began=10), 20)
    assert (second.title(0), second.total_steps) == ("stage b (2 of 2), epoch 1 of 2", 50)
    short = outlook(config(epochs=1, steps=4), TWO, 0, Position(), 10)
    assert (short.epoch_steps, short.total_steps) == (4, 8), "`steps` are those of a stage"


def test_the_time_left_does_not_count_the_first_look_twice() -> None:
    """The first steps hold compilation: once others are known, they say how long a step takes."""
    pace = Pace(0, 100.0)
    assert pace.left_s(0, 101.0, 100) is None
    assert pace.left_s(10, 160.0, 100) == pytest.approx(540.0)
    assert pace.left_s(20, 161.0, 100) == pytest.approx(8.0)
    assert pace.left_s(100, 170.0, 100) == 0.0
