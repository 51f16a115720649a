from __future__ import annotations

from paceline.config.settings import TrainConfig
from paceline.train.due import due_since, is_due, next_due


def test_multiples_are_due_and_nothing_without_an_interval() -> None:
    assert [number for number in range(1, 10) if is_due(number, 3)] == [3, 6, 9]
    assert not is_due(3, None)
    for before in range(12):
        for now in range(before, 12):
            assert due_since(before, now, 4) == any(number % 4 == 0 for number in range(before + 1, now + 1))
    assert not due_since(0, 100, None)


def test_the_next_step_at_which_something_happens() -> None:
    config = TrainConfig(steps=25, log_every=10, val_every_steps=7, save_every_steps=None)
    assert [next_due(config, now, stage_began=0) for now in (0, 7, 10, 14, 21)] == [7, 10, 14, 20, 25]
    assert next_due(config, 40, stage_began=20) == 42
