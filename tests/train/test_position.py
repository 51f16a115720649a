from __future__ import annotations

import json
from dataclasses import replace

from paceline.data.grain import Batch
from paceline.train.position import Position


def test_a_position_comes_back_from_json() -> None:
    position = Position(stage=1, epoch=2, step=3, num_steps=40, stage_began=30, best=0.1 + 0.2, bad_validations=1)
    assert Position.load(json.loads(json.dumps(position.state()))) == position


def batch(step: int) -> Batch:
    return Batch(0, step, 1, 1, 1.0, [])


def test_a_position_moves_by_batches_epochs_and_stages() -> None:
    position = Position()
    assert position.num_begun_stages == 0
    for number in range(2):
        position = position.advance(batch(number))
    assert (position.epoch, position.step, position.num_steps, position.num_begun_stages) == (0, 2, 2, 1)
    position = replace(position, is_epoch_over=True).end_epoch()
    assert (position.epoch, position.step, position.is_epoch_over, position.num_begun_stages) == (1, 0, False, 1)
    position = replace(position, best=0.5, bad_validations=2, data="fingerprint").enter_stage(1)
    assert (position.stage, position.epoch, position.step, position.num_steps) == (1, 0, 0, 2)
    assert (position.best, position.bad_validations, position.data) == (None, 0, None)
    assert position.num_begun_stages == 1, "saved between two stages: the next one has not begun"
    began = replace(position, scores=(1.0,)).begin_stage(restarts_schedule=True)
    assert (began.stage_began, began.schedule_began, began.scores) == (2, 2, ())
    began = replace(position, scores=(1.0,)).begin_stage(restarts_schedule=False)
    assert (began.stage_began, began.schedule_began, began.scores) == (2, 0, (1.0,))


def test_a_step_keeps_every_other_field_of_a_position() -> None:
    position = Position(stage=1, epoch=2, step=3, num_steps=40, scores=(0.5,), first_loss=2.0, save_every=7)
    assert position.advance(batch(3)) == replace(position, step=4, num_steps=41)
    assert position.step == 3


def test_the_keys_of_a_position_in_a_checkpoint_stay() -> None:
    """Runs of older versions are resumed, and newer ones read by them."""
    assert list(Position().state()) == [
        "stage",
        "epoch",
        "step",
        "num_steps",
        "stage_began",
        "schedule_began",
        "validated",
        "score",
        "best",
        "bad_validations",
        "scores",
        "is_complete",
        "data",
        "first_loss",
        "is_epoch_over",
    ]
    # Only runs that an older version could not go on with have another one.
    assert list(Position(save_every=7).state())[-1] == "save_every"
