"""The start-up summary as a person reads it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.config.settings import GroupSettings, TrainConfig
from paceline.data.partition import cut
from paceline.speed.precision import Capabilities, resolve
from paceline.train.loop import train
from paceline.train.summary import (
    DataFacts,
    Facts,
    ModelFacts,
    Seat,
    batch_line,
    data_line,
    idle,
    idle_ranks,
    no_faster,
    rows,
    unequal_devices,
)
from paceline.world.discover.environment import World
from tests.train.ragged import RaggedTask
from tests.train.small import SmallTask, opened

CPU = Capabilities("cpu", "this CPU", bf16=True, tf32=False, fp16=True, compiler=True)


def facts(config: dict[str, Any] | None = None, **changes: Any) -> Facts:
    settings = TrainConfig(**{"epochs": 1, "global_batch": 64, **(config or {})})
    plain = Facts(
        config=settings,
        world=World(0, 0, 1, 1, 0, 1, "plain", None, why=("no launcher's variables are set",)),
        seats=[Seat("nodeA", "cpu", 4)],
        grains=4,
        precision=resolve(0, settings.precision, CPU),
        data=DataFacts(1437, 23),
        model=ModelFacts(29258, 29258, "AdamW"),
        validation={"dev": 360},
        folder=Path("runs/first"),
    )
    return replace(plain, **changes)


def test_a_plain_run() -> None:
    assert rows(facts())[:8] == [
        ("run folder", "runs/first"),
        ("ranks", "1, 4 threads each, no launcher"),
        ("devices", "cpu"),
        ("batch", "global batch 64 = 4 grains of 16 = 1 rank x 4"),
        ("data", "1,437 samples, 23 steps per epoch"),
        ("validation", "dev 360 samples"),
        ("parameters", "29,258"),
        ("optimizer", "AdamW"),
    ]


def test_a_large_run() -> None:
    found = dict(
        rows(
            facts(
                {
                    **{
                        "batch_cost": 1600.0,
                        "global_batch": None,
                        "weight_decay": 0.001,
                        "clip_norm": 1.0,
                        "ema": 0.99,
                    },
                    **{"lr": 0.015, "schedule": "cosine", "warmup_steps": 8000, "min_lr": 1e-5},
                    "groups": (GroupSettings(match="head.*", lr_scale=2.0),),
                },
                world=World(0, 0, 4, 2, 0, 2, "slurm", "nodeA:29500", why=("SLURM_PROCID=0 of SLURM_NTASKS=4",)),
                seats=[Seat(host, "NVIDIA H200", 8) for host in ("nodeA", "nodeA", "nodeB", "nodeB")],
                grains=8,
                data=DataFacts(281241, 2941, 3.46e6, "seconds", 0.031),
                model=ModelFacts(18924381, 18894656, "NovoGrad"),
                validation={"dev-clean": 2703, "dev-other": 1},
                schedule_steps=294100,
                stage="first",
                resumed="after step 120 (step-00000120)",
            )
        )
    )
    assert found["resumed"] == "after step 120 (step-00000120)"
    assert found["ranks"] == "4, 8 threads each, launched by slurm (SLURM_PROCID=0 of SLURM_NTASKS=4)"
    own = facts(world=World(0, 0, 4, 2, 0, 2, "procs", "nodeA:29500"))
    assert dict(rows(own))["ranks"].endswith("launched by paceline")
    assert found["devices"] == "4 x NVIDIA H200"
    assert found["hosts"] == "nodeA (2 ranks), nodeB (2 ranks)"
    assert found["batch"] == "global batch 1600 (padded length) = 8 grains of 200 = 4 ranks x 2"
    assert found["data of first"] == "281,241 samples, 961 hours, 2,941 steps per epoch, 3.1% padding"
    assert found["validation"] == "dev-clean 2,703 samples, dev-other 1 sample"
    assert found["parameters"] == "18,924,381, 18,894,656 trained, 29,725 frozen"
    assert found["optimizer"] == (
        "NovoGrad, weight decay 0.001, 1 parameter group of their own, gradients clipped to norm 1,"
        " weights averaged with decay 0.99"
    )
    assert found["learning rate"] == "0.015, warm-up over 8,000 steps, then cosine to 1e-05 over 294,100 steps"


def test_an_average_that_keeps_initial_weights_is_said() -> None:
    """0.999^960 is 0.383; 0.9952^960 is 0.0099."""
    found = dict(rows(facts({"ema": 0.999}, schedule_steps=960)))
    assert found["optimizer"] == (
        "AdamW, weights averaged with decay 0.999 (38% of it the initial weights, still after 960 steps:"
        " `--ema 0.9952` keeps less than 1%)"
    )
    long, unknown = (dict(rows(facts({"ema": 0.999}, schedule_steps=steps))) for steps in (96_000, None))
    assert long["optimizer"] == unknown["optimizer"] == "AdamW, weights averaged with decay 0.999"


def test_a_warm_up_that_is_longer_than_the_run_is_said() -> None:
    found = dict(rows(facts({"epochs": 1, "warmup_steps": 500, "lr": 0.05}, schedule_steps=23)))
    assert found["learning rate"] == (
        "0.05 is not reached: the warm-up over 500 steps is longer than the run of 23 steps (`--warmup-steps`)"
    )


@pytest.mark.parametrize(
    ("data", "line"),
    [
        (DataFacts(None, None), "samples of unknown number"),
        (DataFacts(1, 1), "1 sample, 1 step per epoch"),
        (DataFacts(10, 5, 12345.5, "tokens", 0.5), "10 samples, 12,346 tokens, 5 steps per epoch, 50.0% padding"),
        (DataFacts(10, 5, 12.5, "", 0.0), "10 samples, total length 12.5, 5 steps per epoch, 0.0% padding"),
        (DataFacts(10, 5, 5400.0, "seconds", 0.0), "10 samples, 1.5 hours, 5 steps per epoch, 0.0% padding"),
    ],
)
def test_the_size_of_data(data: DataFacts, line: str) -> None:
    assert data_line(data) == line


@pytest.mark.parametrize(
    ("config", "changes", "line"),
    [
        ({"patience": 3, "monitor": "dev/loss"}, {"validation": {}}, "`monitor` and `patience` have no effect without"),
        ({"momentum": 0.5}, {}, "`momentum` has no effect unless the optimizer is sgd"),
        ({"optimizer": "sgd", "betas": (0.9, 0.99)}, {}, "`betas` has no effect with optimizer sgd"),
        ({"min_lr": 1e-5}, {}, "`min_lr` has no effect with a constant schedule"),
        ({"schedule": "cosine", "power": 2.0}, {}, "`power` has no effect unless the schedule is polynomial"),
        ({"bins": 4}, {}, "`bins` has no effect unless the order is laplace or bucket"),
        ({"loss_scale": 128.0}, {}, "`loss_scale` has no effect without fp16"),
        ({"init_from": Path("other")}, {"resumed": "after step 3"}, "`init_from` has no effect on a resumed run"),
        ({"reduce": "param", "sync_step": 4}, {}, "`reduce` has no effect on one rank"),
        ({"checkpoint_form": "sharded"}, {}, "`checkpoint_form` has no effect without `shard`"),
        ({"keep_last": 5}, {"folder": None}, "`keep_last` has no effect without a run folder"),
        ({"loggers": ("tensorboard",)}, {"folder": None}, "the logger tensorboard has no effect without a run folder"),
    ],
)
def test_a_setting_without_effect_is_said(config: dict[str, Any], changes: dict[str, Any], line: str) -> None:
    (found,) = idle(facts(config, **changes))
    assert found.startswith(line)


@pytest.mark.parametrize(
    ("config", "changes"),
    [
        ({}, {}),
        ({}, {"validation": {}, "folder": None}),
        ({"optimizer": "sgd", "momentum": 0.5}, {}),
        ({"schedule": "polynomial", "power": 2.0, "min_lr": 1e-5, "hold_steps": 3}, {}),
        ({"precision": "fp16", "loss_scale": 128.0}, {}),
        ({"init_from": Path("other"), "patience": 3}, {}),
        ({"reduce": "param", "sync_step": 4, "wire": "int8"}, {"has_group": True}),
        ({"shard": "full", "checkpoint_form": "sharded"}, {"has_group": True}),
    ],
)
def test_what_has_an_effect_is_not_complained_about(config: dict[str, Any], changes: dict[str, Any]) -> None:
    assert idle(facts(config, **changes)) == []


def test_a_real_run_says_what_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Seconds(RaggedTask):
        length_unit = "seconds"

    task = Seconds()
    data = task.train_data()
    ours = opened(task, tmp_path / "run", epochs=1, global_batch=6, freeze=("*.bias",))
    train(ours)
    shown = capsys.readouterr().out
    parameters = dict(task.model().named_parameters())
    frozen = sum(value.numel() for name, value in parameters.items() if name.endswith(".bias"))
    total = sum(value.numel() for value in parameters.values())
    assert f"{len(data)} samples, {sum(data.lengths) / 3600:.3g} hours, {-(-len(data) // 6)} steps per epoch" in shown
    assert f"{total:,}, {total - frozen:,} trained, {frozen:,} frozen" in shown
    assert str(tmp_path / "run") in shown.replace("\n", "")


def test_the_summary_is_said_once_and_not_with_progress_none(capsys: pytest.CaptureFixture[str]) -> None:
    train(opened(SmallTask(), None, epochs=2))
    assert capsys.readouterr().out.count("global batch 8 = 1 grain of 8 = 1 rank x 1") == 1
    train(opened(SmallTask(), None, epochs=2, progress="none"))
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        (
            "backoff",
            "dynamic (backoff): 16,384 at first, or what the first batch allows; half after an overflow, double after"
            " 2,000 steps without",
        ),
        ("logmax", "dynamic (logmax): from the statistics of the largest gradient"),
        (1024.0, "constant: 1,024"),
    ],
)
def test_how_losses_are_scaled_is_said_in_words(setting: Any, words: str) -> None:
    """On ce01e4b: `loss scaling  as loss_scale says`."""
    fp16 = resolve("auto", "fp16", CPU)
    found = dict(rows(facts({"loss_scale": setting, "precision": "fp16"}, precision=fp16)))
    assert found["loss scaling"] == words
    assert dict(rows(facts({"loss_scale": setting})))["loss scaling"] == "none"


@given(st.integers(1, 300), st.integers(1, 70), st.integers(1, 9))
def test_grains_of_the_batch_line_are_those_that_are_cut(batch: int, ranks: int, per_rank: int) -> None:
    """On ce01e4b 3 ranks made of a batch of 2 `3 grains of 0.666667`."""
    grains = ranks * per_rank
    line = batch_line(TrainConfig(epochs=1, global_batch=batch), grains, ranks)
    sizes = sorted({len(piece) for piece in cut(None, batch, grains)})
    number = len(cut(None, batch, grains))
    assert "." not in line
    assert f"= {number} grain{'s' * (number > 1)} of {' or '.join(map(str, sizes))} = " in line
    assert ("nothing to do" in line) == (number < ranks)


def test_the_order_of_sums_and_what_it_costs() -> None:
    def sums(ranks: int, grains: int, **settings: Any) -> str:
        world = World(0, 0, ranks, ranks, 0, 1, "procs", None)
        return dict(rows(facts(settings, world=world, seats=[Seat("nodeA", "cpu", 1)] * ranks, grains=grains)))["sums"]

    assert sums(4, 8) == "in one order: the same bits on any number of ranks"
    assert "; 8 grains on 3 ranks send 5 partial sums instead of 3" in sums(3, 8)
    assert "other last digits" in sums(4, 8, sums="fast")
    assert "sums" not in dict(rows(facts()))


def test_ranks_that_share_cores_are_told() -> None:
    """Only of our own launcher: others bind each rank to cores of its own."""
    for launcher, num_cores, told in (("procs", 2, True), ("procs", 8, False), ("openmpi", 1, False)):
        world = World(0, 0, 8, 8, 0, 1, launcher, None)
        line = dict(rows(facts(world=world, num_cores=num_cores, grains=8))).get("cores")
        assert line == ("8 ranks share 2 cores: `--procs 2` is likely as fast" if told else None)


@pytest.mark.parametrize(
    ("ranks", "settings", "told"),
    [
        (4, {"global_batch": 8}, None),
        (4, {"global_batch": 7}, "1 of 4 ranks have nothing to do: a batch of 7 makes 3 grains of 2 samples or more"),
        (4, {"global_batch": 5}, "start 2 ranks, or set `--global-batch 8` or more"),
        (2, {"global_batch": 3}, "start 1 rank, or set `--global-batch 4` or more"),
        (4, {"batch_cost": 5.0, "global_batch": None}, None),
        (4, {"global_batch": 5, "dataset_distribution": "random_seed_offset"}, None),
    ],
)
def test_ranks_that_never_have_a_grain_are_told_in_a_line(ranks: int, settings: dict[str, Any], told: str) -> None:
    world = World(0, 0, ranks, ranks, 0, 1, "procs", None)
    lines = idle_ranks(facts(settings, world=world, grains=ranks))
    assert len(lines) == (told is not None)
    assert told is None or told in lines[0]


@pytest.mark.parametrize(
    ("ranks", "grains", "told"),
    [
        (8, 12, "8 ranks are no faster than 6: the busiest rank has 2 of 12 grains with either; start 6, or a new run"),
        (5, 6, "5 ranks are no faster than 3"),
        (3, 4, "3 ranks are no faster than 2"),
        (8, 8, None),
        (4, 8, None),
        (3, 8, None),
        (1, 8, None),
    ],
)
def test_ranks_that_bring_nothing_are_told_before_the_first_step(ranks: int, grains: int, told: str | None) -> None:
    world = World(0, 0, ranks, ranks, 0, 1, "procs", None)
    lines = no_faster(facts(world=world, grains=grains))
    assert len(lines) == (told is not None)
    assert told is None or lines[0].startswith(told)


def test_devices_of_several_models_are_told() -> None:
    equal = [Seat(host, "NVIDIA H100", 8) for host in "aabb"]
    assert unequal_devices(equal) == []
    (line,) = unequal_devices([*equal[:2], *(replace(seat, device="NVIDIA A100") for seat in equal[2:]), equal[0]])
    assert line.startswith("the ranks have different devices: NVIDIA H100 (rank 0-1, 4), NVIDIA A100 (rank 2-3)")
    assert "the slowest sets the pace" in line


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"out": "a", "exp_name": "b"}, "`exp_name` has no effect because `out` names the folder"),
        ({"out": "a/b", "exp_name": "b"}, "`exp_name` has no effect because `out` names the folder"),
        ({"out": "a/b", "runs_dir": "c"}, "`runs_dir` has no effect because `out` names the folder"),
        ({"out": "runs/b", "exp_name": "b"}, None),
        ({"out": "runs/b-3", "exp_name": "b"}, None),
        ({"out": "runs/b/c", "exp_name": "b/c"}, None),
        ({"out": "c/b-3", "exp_name": "b", "runs_dir": "c"}, None),
        ({"out": "c/digits-20260101", "runs_dir": "c"}, None),
    ],
)
def test_a_name_beside_out_is_told(settings: dict[str, Any], told: str | None) -> None:
    assert idle(facts(settings)) == ([] if told is None else [told])


def test_streams_that_are_cut_by_ranks_promise_nothing() -> None:
    two = World(0, 0, 2, 2, 0, 1, "procs", None)
    whole = dict(rows(facts(world=two, data=DataFacts(None, None))))
    assert whole["data"] == "samples of unknown number"
    assert whole["sums"].startswith("in one order: the same bits on any number of ranks")
    cut_up = dict(rows(facts(world=two, data=DataFacts(None, None, is_cut=True))))
    assert cut_up["data"].endswith("each rank reads a part of its own: another number of ranks gives other results")
    assert cut_up["sums"].partition(";")[0] == "in one order"
