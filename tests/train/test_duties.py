"""When duties are due, as plain values: tables of cases, and the rules one by one."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.config.settings import TrainConfig
from paceline.train.due import MEASURING_SAVES, Outcome
from paceline.train.duties import Duty, Leave, Log, Moment, Save, Validate
from paceline.train.position import Position
from paceline.train.probe import Probe
from tests.train.small import alone


def config(**settings: Any) -> TrainConfig:
    return TrainConfig(**{"steps": 25, "log_every": 10, "val_every_steps": 7, "save_every_steps": 12, **settings})


def at(num_steps: int, **fields: Any) -> Position:
    return Position(num_steps=num_steps, step=num_steps, **fields)


def duties(settings: TrainConfig) -> dict[str, Duty]:
    return {"log": Log(settings), "validate": Validate(settings), "save": Save(settings, alone())}


def due(settings: TrainConfig, position: Position, since: int, **signals: bool) -> list[Any]:
    """Names of the duties that are due, and the reason to leave, if there is one."""
    attended = Position(num_steps=since, stage_began=position.stage_began, save_every=position.save_every)
    moment = Moment.at(position, attended, settings, **signals)
    leave = Leave(settings)
    reasons = [leave.outcome(position, moment)] if leave.is_due(position, moment) else []
    return [*(name for name, duty in duties(settings).items() if duty.is_due(position, moment)), *reasons]


@pytest.mark.parametrize(
    ("num_steps", "expected"),
    [
        (1, []),
        (7, ["validate"]),
        (10, ["log"]),
        (12, ["save"]),
        (20, ["log"]),
        (21, ["validate"]),
        (24, ["save"]),
        (25, [Outcome.OUT_OF_STEPS]),
    ],
)
def test_intervals_and_the_end_by_steps(num_steps: int, expected: list[Any]) -> None:
    assert due(config(), at(num_steps), num_steps - 1) == expected


STOP, OUT_OF_DATA, LAST, APART = {"stop": True}, {"is_out_of_data": True}, {"is_last": True}, {"is_together": False}


@pytest.mark.parametrize(
    ("signals", "fields", "expected"),
    [
        (STOP, {}, ["save", Outcome.STOPPED]),
        (STOP | LAST, {}, ["save", Outcome.STOPPED]),
        (OUT_OF_DATA, {}, [Outcome.OUT_OF_DATA]),
        (OUT_OF_DATA | LAST, {}, []),  # the epoch ends by itself
        ({}, {"bad_validations": 3}, [Outcome.EARLY]),
        (LAST, {"bad_validations": 3}, []),
        (OUT_OF_DATA, {"bad_validations": 3}, [Outcome.OUT_OF_DATA]),
        ({}, {"stage_began": -22}, [Outcome.OUT_OF_STEPS]),
        (OUT_OF_DATA, {"stage_began": -22}, [Outcome.OUT_OF_DATA]),
        # Ranks that step apart wait for their next average, unless the run ends here.
        (APART, {"bad_validations": 3}, []),
        (APART | STOP, {}, ["save", Outcome.STOPPED]),
        (APART | OUT_OF_DATA, {}, [Outcome.OUT_OF_DATA]),
        (APART, {"stage_began": -22}, [Outcome.OUT_OF_STEPS]),
        # Validated at this very moment: the best is saved.
        ({}, {"validated": 3, "score": 0.5, "best": 0.5}, ["save"]),
        ({}, {"validated": 2, "score": 0.5, "best": 0.5}, []),
        ({}, {"validated": 3, "score": 0.6, "best": 0.5, "bad_validations": 1}, []),
    ],
)
def test_reasons_to_save_and_to_leave(signals: dict[str, bool], fields: dict[str, Any], expected: list[Any]) -> None:
    assert due(config(patience=3), at(3, **fields), 2, **signals) == expected


def test_work_that_ranks_apart_put_off_is_done_at_their_next_average() -> None:
    assert not due(config(), at(7), 0, **APART)
    assert not due(config(), at(10), 0, **APART)
    assert due(config(), at(11), 0) == ["log", "validate"]
    assert due(config(), at(12), 11) == ["save"]


def test_ranks_come_together_to_validate_and_save_and_where_the_run_ends() -> None:
    settings, position = config(), at(25)
    together, apart = (Moment.at(position, at(24), settings, is_together=each) for each in (True, False))
    every = [*duties(settings).values(), Leave(settings), Probe()]
    assert [duty.needs_sync(together) for duty in every] == [False, True, True, False, False]
    assert [duty.needs_sync(apart) for duty in every] == [True, True, True, True, False]


def test_a_probe_sees_every_step() -> None:
    probe = Probe()
    assert probe.next_due(at(4)) == 5
    assert probe.is_due(at(5), Moment.at(at(5), at(0), config(), is_together=False))


def test_checkpoints_are_due_at_the_interval_that_auto_has_chosen() -> None:
    settings = config(save_every_steps="auto", steps=10_000, log_every=5000, val_every_steps=None)
    assert due(settings, Position(num_steps=MEASURING_SAVES), MEASURING_SAVES - 1) == ["save"]
    chosen = Position(num_steps=MEASURING_SAVES, save_every=70)
    assert due(settings, chosen, MEASURING_SAVES - 1) == []
    assert Save(settings, alone()).next_due(chosen) == 70
    assert due(settings, Position(num_steps=140, save_every=70), 139) == ["save"]


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
    """The loop attends to duties from `next_due` on: no step before it has anything due, and the step itself has."""
    settings = config(log_every=log_every, val_every_steps=val, save_every_steps=save, steps=steps)
    now = data.draw(st.integers(began, began + steps - 1))
    position = Position(num_steps=now, stage_began=began)
    wake = min(duty.next_due(position) for duty in [*duties(settings).values(), Leave(settings)])
    assert now < wake <= began + steps
    for num_steps in range(now + 1, wake):
        assert not due(settings, Position(num_steps=num_steps, stage_began=began), now)
    assert due(settings, Position(num_steps=wake, stage_began=began), now)


def by_hand(settings: TrainConfig, position: Position, since: int, signals: dict[str, bool]) -> list[Any]:
    """The same, written down rule by rule; the reason to leave as `stopped`, `cut short` or `epoch over`."""
    now = position.num_steps
    is_done = settings.steps is not None and now - position.stage_began >= settings.steps
    lost_patience = settings.patience is not None and position.bad_validations >= settings.patience
    if not (signals["is_together"] or signals["stop"] or is_done or signals["is_out_of_data"]):
        return []

    def passes(every: int | None) -> bool:
        return any(number % every == 0 for number in range(since + 1, now + 1)) if every else False

    names = {
        "log": passes(settings.log_every),
        "validate": passes(settings.val_every_steps),
        "save": signals["stop"] or passes(settings.save_every_steps),  # type: ignore[arg-type]
        "stopped": signals["stop"],
    }
    if not signals["stop"] and not signals["is_last"] and (is_done or signals["is_out_of_data"] or lost_patience):
        names["epoch over" if signals["is_out_of_data"] else "cut short"] = True
    return [name for name, is_so in names.items() if is_so]


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
    since=st.integers(0, 20),
    steps=st.integers(1, 12),
    began=st.integers(0, 20),
    bad=st.integers(0, 4),
    signals=st.fixed_dictionaries(
        {name: st.booleans() for name in ("stop", "is_together", "is_out_of_data", "is_last")}
    ),
)
def test_duties_follow_the_rules_written_by_hand(
    settings: dict[str, Any], since: int, steps: int, began: int, bad: int, signals: dict[str, bool]
) -> None:
    chosen = config(epochs=1, **settings)
    position = Position(num_steps=since + steps, stage_began=began, bad_validations=bad)
    words = {Outcome.STOPPED: "stopped", Outcome.OUT_OF_DATA: "epoch over"}
    words |= {Outcome.EARLY: "cut short", Outcome.OUT_OF_STEPS: "cut short"}
    found = due(chosen, position, since, **signals)
    assert [words.get(each, each) for each in found] == by_hand(chosen, position, since, signals)
