"""Decisions after a step as plain values: tables of cases, and the rules one by one."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.config.settings import TrainConfig
from paceline.train.due import (
    Due,
    Outcome,
    Signals,
    best_score,
    due,
    is_multiple,
    is_new_best,
    is_stage_over,
    next_due,
    outcome_at,
    passes_multiple,
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
    for before in range(12):
        for now in range(before, 12):
            assert passes_multiple(before, now, 4) == any(number % 4 == 0 for number in range(before + 1, now + 1))
    assert not passes_multiple(0, 100, None)


@pytest.mark.parametrize(
    ("num_steps", "expected"),
    [
        (1, Due()),
        (7, Due(validate=True)),
        (10, Due(log=True)),
        (12, Due(save=True)),
        (20, Due(log=True)),
        (21, Due(validate=True)),
        (24, Due(save=True)),
        (25, Due(leave=Outcome.OUT_OF_STEPS)),
    ],
)
def test_intervals_and_the_end_by_steps(num_steps: int, expected: Due) -> None:
    assert due(config(), at(num_steps), Signals(), num_steps - 1) == expected
    assert bool(expected) == (num_steps > 1)


@pytest.mark.parametrize(
    ("signals", "fields", "expected"),
    [
        (Signals(stop=True), {}, Due(save=True, leave=Outcome.STOPPED)),
        (Signals(stop=True, is_last=True), {}, Due(save=True, leave=Outcome.STOPPED)),
        (Signals(is_out_of_data=True), {}, Due(leave=Outcome.OUT_OF_DATA)),
        (Signals(is_out_of_data=True, is_last=True), {}, Due()),  # the epoch ends by itself
        (Signals(), {"bad_validations": 3}, Due(leave=Outcome.EARLY)),
        (Signals(is_last=True), {"bad_validations": 3}, Due()),
        (Signals(is_out_of_data=True), {"bad_validations": 3}, Due(leave=Outcome.OUT_OF_DATA)),
        (Signals(), {"stage_began": -22}, Due(leave=Outcome.OUT_OF_STEPS)),
        (Signals(is_out_of_data=True), {"stage_began": -22}, Due(leave=Outcome.OUT_OF_DATA)),
        # Ranks that step apart wait for their next average, unless the run ends here.
        (Signals(is_together=False), {"bad_validations": 3}, Due()),
        (Signals(is_together=False, stop=True), {}, Due(save=True, leave=Outcome.STOPPED)),
        (Signals(is_together=False, is_out_of_data=True), {}, Due(leave=Outcome.OUT_OF_DATA)),
        (Signals(is_together=False), {"stage_began": -22}, Due(leave=Outcome.OUT_OF_STEPS)),
        # Validated at this very moment: the best is saved.
        (Signals(), {"validated": 3, "score": 0.5, "best": 0.5}, Due(save=True)),
        (Signals(), {"validated": 2, "score": 0.5, "best": 0.5}, Due()),
        (Signals(), {"validated": 3, "score": 0.6, "best": 0.5, "bad_validations": 1}, Due()),
    ],
)
def test_reasons_to_save_and_to_leave(signals: Signals, fields: dict[str, Any], expected: Due) -> None:
    assert due(config(patience=3), at(3, **fields), signals, 2) == expected


def test_work_that_ranks_apart_put_off_is_done_at_their_next_average() -> None:
    apart, together = Signals(is_together=False), Signals()
    assert not due(config(), at(7), apart, 0)
    assert not due(config(), at(10), apart, 0)
    assert due(config(), at(11), together, 0) == Due(log=True, validate=True)
    assert due(config(), at(12), together, 11) == Due(save=True)


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
        Outcome.DIVERGED: "diverged",
    }
    assert [outcome for outcome in Outcome if outcome.is_cut_short] == [Outcome.OUT_OF_STEPS, Outcome.EARLY]


every = st.none() | st.integers(1, 9)


@given(
    log_every=st.integers(1, 9),
    val=every,
    save=every,
    steps=st.integers(1, 40),
    began=st.integers(0, 20),
    data=st.data(),
)
def test_nothing_is_due_before_the_next_wake(
    log_every: int, val: int | None, save: int | None, steps: int, began: int, data: st.DataObject
) -> None:
    """The loop asks only from `next_due` on: no step before it has anything due, and the step itself has."""
    settings = config(log_every=log_every, val_every_steps=val, save_every_steps=save, steps=steps)
    now = data.draw(st.integers(began, began + steps - 1))
    wake = next_due(settings, Position(num_steps=now, stage_began=began))
    assert now < wake <= began + steps
    for num_steps in range(now + 1, wake):
        assert not due(settings, Position(num_steps=num_steps, stage_began=began), Signals(), now)
    assert due(settings, Position(num_steps=wake, stage_began=began), Signals(), now)


def old_rules(
    config: TrainConfig, position: Position, signals: Signals, looked: int
) -> tuple[bool, bool, bool, str | None]:
    """(log, validate, save, how it leaves), as the loop did it before decisions had a file of their own."""
    now = position.num_steps
    is_done = config.steps is not None and now - position.stage_began >= config.steps
    lost_patience = config.patience is not None and position.bad_validations >= config.patience
    if not (signals.is_together or signals.stop or is_done or signals.is_out_of_data):
        return False, False, False, None

    def is_due(every: int | None) -> bool:
        return any(number % every == 0 for number in range(looked + 1, now + 1)) if every else False

    save = signals.stop or is_due(config.save_every_steps)
    leaves = None
    if signals.stop:
        leaves = "stopped"
    elif is_done or signals.is_out_of_data or lost_patience:
        # Since then: where data and steps end together, the epoch is over, as it is on one rank (`is_last`).
        is_cut_short = not signals.is_last and not signals.is_out_of_data
        leaves = "cut short" if is_cut_short else "epoch over"
    return is_due(config.log_every), is_due(config.val_every_steps), save, leaves


@given(
    settings=st.fixed_dictionaries(
        {
            "log_every": st.integers(1, 9),
            "val_every_steps": every,
            "save_every_steps": every,
            "steps": every,
            "patience": st.none() | st.integers(1, 3),
        }
    ),
    looked=st.integers(0, 20),
    steps=st.integers(1, 12),
    began=st.integers(0, 20),
    bad=st.integers(0, 4),
    signals=st.builds(Signals, st.booleans(), st.booleans(), st.booleans(), st.booleans()),
)
def test_the_rules_are_those_of_the_loop_before(
    settings: dict[str, Any], looked: int, steps: int, began: int, bad: int, signals: Signals
) -> None:
    chosen = config(epochs=1, **settings)
    position = Position(num_steps=looked + steps, stage_began=began, bad_validations=bad)
    log, validate, save, leaves = old_rules(chosen, position, signals, looked)
    now = due(chosen, position, signals, looked)
    assert (now.log, now.validate, now.save) == (log, validate, save)
    words = {None: None, "stopped": Outcome.STOPPED}
    if leaves == "cut short":
        assert now.leave is not None
        assert now.leave.is_cut_short
    elif leaves == "epoch over":  # at the last batch the loop ends by itself
        assert now.leave is (None if signals.is_last else Outcome.OUT_OF_DATA)
    else:
        assert now.leave is words[leaves]


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
