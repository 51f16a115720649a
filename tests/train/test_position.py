"""How a resumed run may differ from the one that began, as pure functions."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.config.settings import GroupSettings, TrainConfig
from paceline.data.grain import Batch
from paceline.data.partition import grain_ranks
from paceline.train.position import (
    FewerSamplesThanRanks,
    MoreRanksThanGrains,
    Position,
    SettingsChanged,
    check_batch,
    choose_grains,
    settings_changed,
)


@pytest.mark.parametrize(
    ("asked", "stored", "ranks", "regrain", "expected"),
    [
        (None, None, 1, False, 1),
        (None, None, 4, False, 4),  # one per rank of the first launch
        (8, None, 4, False, 8),
        (None, 8, 2, False, 8),  # a resumed run keeps its own, whatever the ranks
        (None, 4, 4, False, 4),
        (2, 8, 1, False, 8),
        (2, 8, 1, True, 2),
        (None, 2, 4, True, 4),  # allowed to be cut anew: one per rank
        (3, 2, 4, True, 4),
    ],
)
def test_grains(asked: int | None, stored: int | None, ranks: int, regrain: bool, expected: int) -> None:
    assert choose_grains(asked, stored, ranks, regrain) == expected


def test_no_rank_is_ever_without_a_grain() -> None:
    sizes = [1, 2, 3, 4]
    for asked, stored, ranks, regrain in product([None, *sizes], [None, *sizes], sizes, [False, True]):
        try:
            grains = choose_grains(asked, stored, ranks, regrain)
        except MoreRanksThanGrains as error:
            assert not regrain
            assert (error.ranks, error.grains) == (ranks, asked if stored is None else stored)
        else:
            assert grains >= ranks
            if stored is not None and not regrain:
                assert grains == stored, "a resumed run was cut anew without permission"


@pytest.mark.parametrize(
    ("asked", "stored", "what", "hint"),
    [
        (2, None, "4 ranks, but the settings ask for 2 grains", "at most 2 ranks, or set `--grains 4`"),
        (None, 2, "4 ranks, but this run was started with 2 grains", "at most 2 ranks, or `--regrain`"),
    ],
)
def test_more_ranks_than_grains_says_what_to_type(asked: int | None, stored: int | None, what: str, hint: str) -> None:
    with pytest.raises(MoreRanksThanGrains, match=what) as caught:
        choose_grains(asked, stored, 4, regrain=False)
    assert hint in caught.value.hint


def stored(config: TrainConfig) -> dict[str, Any]:
    """As a run keeps it: through a JSON file."""
    settings: dict[str, Any] = json.loads(json.dumps(config.model_dump(mode="json")))
    return settings


def test_the_same_settings_are_no_change() -> None:
    config = TrainConfig(
        epochs=3, lr=1 / 3, betas=(0.8, 0.95), freeze=("a", "b"), groups=(GroupSettings(match="*", lr_scale=0.1),)
    )
    assert settings_changed(stored(config), config) == {}


def test_what_changes_the_result_is_named_with_both_values() -> None:
    before = stored(TrainConfig(epochs=3, lr=0.1, schedule="cosine"))
    now = TrainConfig(epochs=4, lr=0.2, schedule="cosine", groups=(GroupSettings(match="head*"),))
    changes = settings_changed(before, now)
    assert changes == {
        "epochs": (3, 4),
        "lr": (0.1, 0.2),
        "groups": ([], [{"match": "head*", "lr_scale": 1.0, "weight_decay": None}]),
    }
    text = str(SettingsChanged(changes))
    assert "lr: 0.1 in the run, 0.2 now" in text
    assert "--allow-change" in SettingsChanged.hint


def test_what_does_not_change_the_result_may_differ(tmp_path: Any) -> None:
    before = stored(TrainConfig(epochs=3))
    now = TrainConfig(
        epochs=3,
        out=tmp_path,
        resume="auto",
        device="cpu",
        threads=3,
        workers=2,
        log_every=1,
        keep_last=5,
        save_every_steps=7,
        val_every_epochs=None,
        timeout_s=5.0,
    )
    assert settings_changed(before, now) == {}


def test_grains_that_are_not_asked_for_are_no_change() -> None:
    before = stored(TrainConfig(epochs=3, grains=4))
    assert settings_changed(before, TrainConfig(epochs=3)) == {}
    assert settings_changed(before, TrainConfig(epochs=3, grains=4)) == {}
    assert settings_changed(before, TrainConfig(epochs=3, grains=2)) == {"grains": (4, 2)}
    assert settings_changed(before, TrainConfig(epochs=3, grains=2, regrain=True)) == {}


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


def test_more_of_the_same_is_no_change_where_no_schedule_looks_at_the_end() -> None:
    before = stored(TrainConfig(epochs=3))
    assert settings_changed(before, TrainConfig(epochs=9)) == {}
    assert settings_changed(before, TrainConfig(epochs=9, schedule="linear")) == {
        "epochs": (3, 9),
        "schedule": ("constant", "linear"),
    }


@given(st.integers(1, 200), st.integers(1, 100))
def test_fewer_samples_than_ranks_are_refused(batch: int, ranks: int) -> None:
    """What the hint says works: no rank is left without a grain."""
    config = TrainConfig(epochs=1, global_batch=batch)
    if batch >= ranks:
        check_batch(config, ranks)
        return
    with pytest.raises(FewerSamplesThanRanks) as caught:
        check_batch(config, ranks)
    most, enough = caught.value.most, caught.value.enough
    check_batch(config, most)
    check_batch(TrainConfig(epochs=1, global_batch=enough), ranks)
    assert len(set(grain_ranks(batch, most, most))) == most
    assert len(set(grain_ranks(enough, ranks, ranks))) == ranks


def test_batches_of_each_rank_are_not_compared_with_the_ranks() -> None:
    for settings in ({"batch_per_device": 1}, {"batch_cost": 3.0}):
        check_batch(TrainConfig(epochs=1, **settings), 64)
    check_batch(TrainConfig(epochs=1, global_batch=2, dataset_distribution="random_seed_offset"), 64)
