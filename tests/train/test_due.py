"""Decisions between steps as plain values: tables of cases, and the rules one by one."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.config.settings import TrainConfig
from paceline.train.due import (
    Outcome,
    best_score,
    is_multiple,
    is_new_best,
    is_stage_over,
    next_multiple,
    outcome_at,
    validates_at_end,
)
from paceline.train.position import Position


def config(**settings: Any) -> TrainConfig:
    return TrainConfig(**{"steps": 25, "log_every": 10, "val_every_steps": 7, "save_every_steps": 12, **settings})


def at(num_steps: int, **fields: Any) -> Position:
    return Position(num_steps=num_steps, step=num_steps, **fields)


def test_multiples() -> None:
    assert [number for number in range(1, 10) if is_multiple(number, 3)] == [3, 6, 9]
    assert not is_multiple(3, None)
    assert [next_multiple(number, 4) for number in range(6)] == [4, 4, 4, 4, 8, 8]


def test_bests_that_nobody_keeps_are_not_saved() -> None:
    best = at(3, validated=3, score=0.5, best=0.5)
    assert is_new_best(config(), best)
    assert not is_new_best(config(keep_best=0), best)


@pytest.mark.parametrize(
    ("epochs", "epoch", "num_steps", "expected"),
    [(2, 1, 24, False), (2, 2, 24, True), (2, 1, 25, True), (None, 9, 24, False), (None, 0, 25, True)],
)
def test_a_stage_ends_by_epochs_or_steps(epochs: int | None, epoch: int, num_steps: int, expected: bool) -> None:
    assert is_stage_over(config(), Position(epoch=epoch, num_steps=num_steps), epochs) == expected


def test_outcomes_and_the_status_of_a_run() -> None:
    statuses = {outcome: outcome.status for outcome in Outcome}
    assert statuses == {
        Outcome.EPOCH_DONE: "finished",
        Outcome.OUT_OF_DATA: "finished",
        Outcome.OUT_OF_STEPS: "finished",
        Outcome.EARLY: "early",
        Outcome.STOPPED: "stopped",
        Outcome.MEASURED: "finished",
        Outcome.REGROUP: "regroup",
        Outcome.DIVERGED: "diverged",
    }
    assert [outcome for outcome in Outcome if outcome.is_cut_short] == [Outcome.OUT_OF_STEPS, Outcome.EARLY]
    more = [Outcome.EPOCH_DONE, Outcome.OUT_OF_DATA, Outcome.OUT_OF_STEPS]
    assert [outcome for outcome in Outcome if outcome.goes_on] == more
    interrupted = [Outcome.STOPPED, Outcome.MEASURED, Outcome.REGROUP]
    assert [outcome for outcome in Outcome if outcome.is_interruption] == interrupted


@pytest.mark.parametrize("asks", [True, False])
@pytest.mark.parametrize(
    ("outcome", "is_last_stage", "expected"),
    [
        (Outcome.EPOCH_DONE, True, True),
        (Outcome.OUT_OF_STEPS, True, True),
        (Outcome.OUT_OF_DATA, True, True),
        (Outcome.EARLY, True, True),
        (Outcome.EPOCH_DONE, False, False),
        (Outcome.OUT_OF_STEPS, False, True),
    ],
)
def test_validation_at_the_end(outcome: Outcome, is_last_stage: bool, expected: bool, asks: bool) -> None:
    assert validates_at_end(config(val_at_end=asks), outcome, is_last_stage=is_last_stage) == (expected and asks)


@pytest.mark.parametrize(
    ("position", "mode", "expected"),
    [
        (at(5), "min", None),
        (at(5, validated=5, score=2.0), "min", 2.0),
        (at(5, validated=5, score=2.0, best=1.0), "min", 1.0),
        (at(5, validated=5, score=2.0, best=1.0), "max", 2.0),
        (at(6, validated=5, score=0.5, best=1.0), "min", 1.0),
        (at(5, validated=5, score=float("nan"), best=1.0), "min", 1.0),
    ],
)
def test_the_best_score_is_also_that_of_the_end(position: Position, mode: str, expected: float | None) -> None:
    assert best_score(config(monitor_mode=mode), position) == expected


def test_a_position_tells_how_the_last_epoch_ended() -> None:
    """A run killed between the last step of a stage and the validation that ends it is resumed there."""
    assert outcome_at(config(), at(25), 30) is Outcome.OUT_OF_STEPS
    assert outcome_at(config(), at(25), None) is Outcome.OUT_OF_STEPS
    assert outcome_at(config(), at(24), 30) is None
    assert outcome_at(config(), at(25), 25) is Outcome.EPOCH_DONE
    assert outcome_at(config(), at(24), 24) is None, "it ends by itself: it has no batch left"
    assert outcome_at(config(), at(25, is_epoch_over=True), None) is Outcome.EPOCH_DONE
    assert outcome_at(config(), Position(num_steps=25, epoch=2), 30) is None
    assert outcome_at(config(patience=2), at(8, bad_validations=2), 30) is Outcome.EARLY
    assert outcome_at(config(patience=2), at(8, bad_validations=2), 8) is Outcome.EPOCH_DONE
