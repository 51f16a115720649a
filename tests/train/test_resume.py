"""Resume decisions as pure functions."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.config.settings import GroupSettings, TrainConfig
from paceline.core.plugins import Plugin
from paceline.core.run_folder import RunRecord
from paceline.data.partition import grain_ranks
from paceline.train.resume import (
    FewerSamplesThanRanks,
    MoreRanksThanGrains,
    Resume,
    SettingsChanged,
    Stored,
    check_batch,
    choose_grains,
    decide,
    settings_changed,
)
from paceline.world.discover.environment import World


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


def world(ranks: int) -> World:
    return World(0, 0, ranks, ranks, 0, 1, "plain", None)


def record(config: TrainConfig, **fields: Any) -> RunRecord:
    return RunRecord(stored(config), **{"status": "stopped", "grains": 2, "starts": [{"time": "then"}], **fields})


def resumed(stored_run: Stored, ranks: int = 2, /, **settings: Any) -> Resume:
    return decide(stored_run, TrainConfig(**{"epochs": 3, "resume": "auto", **settings}), world(ranks))


def test_a_new_run_starts_with_one_grain_per_rank_and_exact_sums() -> None:
    new = resumed(Stored(), 4)
    assert (new.grains, new.config.sums, new.source, new.starts, new.choice) == (4, "exact", None, (), None)
    assert (new.remarks, new.arithmetic) == ((), "")
    assert new.facts == {"run to resume in None": "none", "grains": 4}


def test_a_new_run_on_more_ranks_than_samples_is_refused_and_a_stored_one_is_not() -> None:
    with pytest.raises(FewerSamplesThanRanks):
        resumed(Stored(), 4, global_batch=2)
    assert resumed(Stored(record(TrainConfig(epochs=3, global_batch=2), grains=4)), 4, global_batch=2).grains == 4


@pytest.mark.parametrize(
    ("asked", "in_record", "in_checkpoint", "expected"),
    [
        (None, None, None, "exact"),
        (None, {"sums": "exact"}, None, "exact"),
        (None, {"sums": "fast"}, None, "fast"),
        (None, {"sums": None}, None, "fast"),  # a run from before there was a choice
        (None, {}, None, "fast"),
        (None, {"sums": "exact"}, {"sums": "fast"}, "exact"),  # the record decides
        (None, None, {"sums": "exact"}, "exact"),
        (None, None, {}, "fast"),
        ("fast", None, {"sums": "exact"}, "fast"),
        ("exact", None, {}, "exact"),
    ],
)
def test_sums_are_as_asked_else_as_the_run_began_else_exact(
    asked: Any, in_record: dict[str, Any] | None, in_checkpoint: dict[str, Any] | None, expected: str
) -> None:
    before = stored(TrainConfig(epochs=3))
    before.pop("sums")
    own = None if in_record is None else RunRecord(before | in_record, grains=2)
    config = resumed(Stored(own, checkpoint=in_checkpoint), **({} if asked is None else {"sums": asked})).config
    assert config.sums == expected
    assert ("sums" in config.model_fields_set) == (asked is not None)


def test_batch_and_rate_for_the_ranks_are_part_of_the_effective_settings() -> None:
    new = resumed(Stored(), 4, batch_per_device=8, scale_lr="linear", lr=0.1)
    assert (new.config.global_batch, new.config.batch_per_device, new.config.lr) == (32, None, 0.4)
    assert new.arithmetic.startswith("batch: 8 per device x 4 ranks = 32; learning rate: 0.1 x 4")
    before = Stored(record(new.config, grains=4))
    assert resumed(before, 4, batch_per_device=8, scale_lr="linear", lr=0.1).config == new.config.model_copy(
        update={"resume": "auto"}
    )
    with pytest.raises(SettingsChanged, match="global_batch: 32 in the run, 16 now"):
        resumed(before, 2, batch_per_device=8, scale_lr="linear", lr=0.1)


def test_settings_that_change_the_result_are_refused_unless_allowed() -> None:
    before = Stored(record(TrainConfig(epochs=3, lr=0.1)))
    with pytest.raises(SettingsChanged, match="lr: 0.1 in the run, 0.2 now"):
        resumed(before, lr=0.2)
    assert resumed(before, lr=0.2, allow_change=True).config.lr == 0.2


def test_a_resumed_run_keeps_its_grains_unless_it_may_change_them() -> None:
    before = Stored(record(TrainConfig(epochs=3), grains=4))
    assert resumed(before, 2).grains == 4
    with pytest.raises(MoreRanksThanGrains):
        resumed(before, 8)
    changed = resumed(before, 8, regrain=True)
    assert changed.grains == 8
    assert changed.remarks == ("8 grains instead of 4: numerics change from here on",)
    assert resumed(before, 2, grains=2, allow_change=True).grains == 2
    assert resumed(before, 2, allow_change=True).grains == 4, "a number that was not asked for"


def test_a_run_in_the_folder_goes_before_the_run_of_the_checkpoint() -> None:
    own, other = record(TrainConfig(epochs=3), grains=2), record(TrainConfig(epochs=3), grains=4)
    path = Path("elsewhere/checkpoints/step-00000003")
    assert resumed(Stored(own, other), resume=path).grains == 2
    alone = resumed(Stored(other=other), resume=path)
    assert (alone.grains, alone.starts, alone.source) == (4, (), path)


@pytest.mark.parametrize(
    ("how", "is_stored", "expected"),
    [
        ("auto", False, None),
        ("auto", True, "newest"),
        (Path("run/checkpoints/step-00000003"), True, Path("run/checkpoints/step-00000003")),
        (Path("run/checkpoints/step-00000003"), False, Path("run/checkpoints/step-00000003")),
        ("no", False, None),
    ],
)
def test_the_source_is_the_named_checkpoint_or_the_newest_of_a_stored_run(
    how: Any, is_stored: bool, expected: Any
) -> None:
    before = Stored(record(TrainConfig(epochs=3))) if is_stored else Stored()
    assert resumed(before, resume=how).source == expected


@pytest.mark.parametrize(("level", "is_kept"), [("auto", True), (4, True), (2, False)])
def test_a_stored_choice_is_kept_by_levels_that_choose(level: Any, is_kept: bool) -> None:
    before = record(TrainConfig(epochs=3, level=level), choice={"way": "x"})
    assert resumed(Stored(before), level=level).choice == ({"way": "x"} if is_kept else None)
    assert resumed(Stored(other=before), level=level).choice is None, "of another run"


def test_a_diverged_run_and_another_plugin_are_remarked_upon() -> None:
    plugin = Plugin("optimizers", "lion", "paceline-lion", "2.0", "lion:Lion")
    starts = [{"plugins": [{**plugin.record(), "version": "1.0"}]}]
    before = record(TrainConfig(epochs=3), status="diverged", starts=starts)
    config = TrainConfig(epochs=3, resume="auto")
    first, second = decide(Stored(before), config, world(2), plugins=[plugin]).remarks
    assert "is now of paceline-lion 2.0; the run was last started with paceline-lion 1.0" in first
    assert "had diverged" in second


def test_ranks_that_find_different_runs_have_different_facts() -> None:
    before = Stored(record(TrainConfig(epochs=3)))
    assert resumed(before).facts == {"run to resume in None": "one with 2 grains, 1 start so far", "grains": 2}
    assert resumed(before).facts != resumed(Stored()).facts


@pytest.mark.parametrize(
    ("settings", "machines", "is_in_pieces", "writers", "place_of_3"),
    [
        ({}, None, False, (0,), (3, 4)),
        ({}, [[0, 1, 2, 3]], False, (0,), (3, 4)),
        ({"shard": "full", "checkpoint_form": "sharded"}, [[0, 1, 2, 3]], True, (0, 1, 2, 3), (3, 4)),
        (
            {"shard": "full", "checkpoint_form": "sharded"},
            None,
            False,
            (0,),
            (3, 4),
        ),  # without a process group nothing is cut
        ({"shard": "full"}, [[0, 1, 2, 3]], False, (0,), (3, 4)),
        ({"shard": "node", "checkpoint_form": "sharded"}, [[0, 2], [1, 3]], True, (0, 2), (1, 2)),
        ({"shard": "node"}, [[0, 2], [1, 3]], False, (0,), (1, 2)),
    ],
)
def test_writers_are_the_ranks_that_have_one_whole_model(
    settings: dict[str, Any], machines: Any, is_in_pieces: bool, writers: tuple[int, ...], place_of_3: tuple[int, int]
) -> None:
    resume = decide(Stored(), TrainConfig(epochs=1, global_batch=8, **settings), world(4), machines=machines)
    assert (resume.is_in_pieces, resume.writers, resume.place(3)) == (is_in_pieces, writers, place_of_3)


def test_another_number_of_ranks_or_precision_than_the_checkpoints_is_refused_unless_allowed() -> None:
    by_rank = {"dataset_distribution": "random_seed_offset"}
    resumed(Stored()).check_ranks(2, 4)
    resumed(Stored(), **by_rank).check_ranks(4, 4)
    resumed(Stored(), **by_rank, allow_change=True).check_ranks(2, 4)
    with pytest.raises(SettingsChanged, match="ranks .with random_seed_offset.: 2 in the run, 4 now"):
        resumed(Stored(), **by_rank).check_ranks(2, 4)
    resumed(Stored()).check_precision(None, "bf16")
    resumed(Stored(), allow_change=True).check_precision("fp32", "bf16")
    with pytest.raises(SettingsChanged, match="precision on this device: 'fp32' in the run, 'bf16' now"):
        resumed(Stored()).check_precision("fp32", "bf16")
