"""A batch per device: the arithmetic, in numbers and in words, and what a run keeps of it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from paceline.config.load import load
from paceline.config.problems import SettingsInvalid
from paceline.config.settings import DataSettings, TrainConfig
from paceline.train.scaling import for_ranks
from tests.ranks import RanksFailed, run_ranks
from tests.train.apart import fit


@pytest.mark.parametrize(("rule", "factor"), [("none", 1.0), ("linear", 8.0), ("sqrt", math.sqrt(8))])
def test_batch_and_rate(rule: Any, factor: float) -> None:
    given = TrainConfig(epochs=1, batch_per_device=32, scale_lr=rule, lr=0.1)
    config, words = for_ranks(given, 8)
    assert (config.global_batch, config.batch_per_device, config.scale_lr) == (256, None, "none")
    assert config.lr == 0.1 * factor
    assert for_ranks(config, 4) == (config, "")  # worked out once
    assert words.startswith("batch: 32 per device x 8 ranks = 256; learning rate: 0.1")


def test_words() -> None:
    def words(ranks: int, **settings: Any) -> str:
        config = TrainConfig(epochs=1, batch_per_device=32, lr=0.1, **settings)
        return for_ranks(config, ranks)[1].partition("; ")[2]

    assert words(8) == "learning rate: 0.1, not scaled"
    assert words(4, scale_lr="linear", warmup_steps=1500) == (
        "learning rate: 0.1 x 4 (4 ranks) = 0.4 after a warm-up over 1,500 steps"
    )
    assert words(4, scale_lr="sqrt", warmup_ratio=0.05) == (
        "learning rate: 0.1 x 2 (sqrt of 4 ranks) = 0.2 after a warm-up over 5% of the steps"
    )
    assert words(2, scale_lr="linear").endswith("= 0.2 from the first step (`--warmup-steps` lets it rise)")
    assert for_ranks(DataSettings(batch_per_device=4), 3)[1] == "batch: 4 per device x 3 ranks = 12"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch_per_device": 8, "global_batch": 16}, "set batch_per_device or global_batch, not both"),
        ({"batch_per_device": 8, "batch_cost": 16}, "set batch_per_device or batch_cost, not both"),
        ({"scale_lr": "linear"}, "scale_lr needs batch_per_device"),
        ({"reduce": "param"}, "set sync_step .* or sync_seconds"),
        ({"reduce": "param", "sync_step": 3, "sync_seconds": 3}, "not both"),
        ({"wire": "int8"}, "wire int8 is for reduce param"),
    ],
)
def test_what_cannot_be(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrainConfig(epochs=1, **settings)


def test_other_spellings() -> None:
    """RETURNN's words, of its torch and of its Horovod options."""
    words = ["--epochs", "1", "--reduce-type", "param", "--param-sync-step", "100"]
    config = load(TrainConfig, words, prog="test")
    assert (config.reduce, config.sync_step) == ("param", 100)
    words = ["--epochs=1", "--horovod_reduce_type=param", "--horovod_param_sync_time_diff=100", "--batch_per_device=8"]
    words += ["--horovod_scale_lr", "true", "--horovod_dataset_distribution", "random_seed_offset"]
    config = load(TrainConfig, words, prog="test")
    assert (config.reduce, config.sync_seconds, config.scale_lr) == ("param", 100.0, "linear")
    assert config.dataset_distribution == "random_seed_offset"
    words = ["--epochs=1", "--horovod-reduce-type=param", "--horovod-param-sync-step=1", "--horovod-scale-lr=False"]
    assert load(TrainConfig, words, prog="test").scale_lr == "none"
    with pytest.raises(SettingsInvalid, match="reduce-type"):
        load(TrainConfig, ["--epochs=1", "--reduce-type=grad_explicit"], prog="test")


def test_a_run_keeps_what_was_worked_out(tmp_path: Path) -> None:
    settings = {"epochs": 1, "batch_per_device": 4, "global_batch": None, "scale_lr": "linear", "grains": 2}
    settings["out"] = str(tmp_path / "run")
    assert run_ranks(2, fit, {}, settings)[0]["steps"] == 96 // 8
    stored = json.loads((tmp_path / "run" / "run.json").read_text())["settings"]
    assert (stored["global_batch"], stored["lr"]) == (8, 0.1)
    again = {**settings, "epochs": 2, "resume": "auto"}
    assert run_ranks(2, fit, {}, again)[0]["steps"] == 2 * 96 // 8
    with pytest.raises(RanksFailed, match="global_batch: 8 in the run, 4 now"):
        run_ranks(1, fit, {}, again)
