"""`save_every_steps: auto` in runs: chosen once, the same on all ranks, kept by checkpoints."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from paceline.config.settings import TrainConfig
from paceline.train.checkpoint import reader
from paceline.train.checkpoint.format import listed, step_of
from paceline.train.due import MEASURING_SAVES
from paceline.train.loop import train
from paceline.train.position import Position
from paceline.train.save_interval import SaveInterval
from paceline.world.link import Link
from tests.ranks import ranks
from tests.train.small import SmallTask, alone, opened


def config(**settings: Any) -> TrainConfig:
    return TrainConfig(**{"steps": 10_000, "log_every": 5000, "save_every_steps": "auto", "out": "run", **settings})


def at(num_steps: int) -> Position:
    return Position(num_steps=num_steps)


def test_the_second_checkpoint_chooses() -> None:
    interval = SaveInterval(config(failures="4/1000nd"), alone())
    assert interval.saved(at(MEASURING_SAVES), 99.0, 101.0, 0.5) is None
    chosen = interval.saved(at(2 * MEASURING_SAVES), 102.0, 102.5, 0.5)  # 10 steps in 1 s; a failure in 250 days
    assert chosen is not None
    every, line = chosen
    assert every == pytest.approx((2 * 0.5 * 250 * 86_400) ** 0.5 / 0.1, rel=0.01)
    assert re.fullmatch(
        r"a checkpoint every 46,4\d\d steps \(1\.29 h\): one takes 500 ms, and 1 node may fail every 6,000\.00 h", line
    )
    after = Position(num_steps=3 * MEASURING_SAVES, save_every=every)
    assert interval.saved(after, 103.0, 109.0, 0.5) is None, "once"


def test_without_a_folder_or_with_a_number_nothing_is_chosen() -> None:
    for settings in ({"out": None}, {"save_every_steps": 5}):
        interval = SaveInterval(config(**settings), alone())
        interval.saved(at(10), 0.0, 1.0, 0.0)
        assert interval.saved(at(20), 2.0, 3.0, 0.0) is None


@ranks(2)
def test_all_ranks_choose_the_slowest_ones_way(link: Link, tmp_path: Path) -> None:
    interval = SaveInterval(config(), link)
    slow = 1.0 + link.world.rank
    interval.saved(at(10), 0.0, 0.1, 0.0)
    chosen = interval.saved(at(20), 0.1 + slow, 0.1 + 2 * slow, 0.0)
    assert chosen is not None
    assert len(set(link.gather_objects(chosen))) == 1


def test_a_run_saves_twice_and_goes_on_with_its_choice(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    settings = {"save_every_steps": "auto", "save_every_epochs": None, "keep_last": 9, "keep_best": 0, "epochs": None}
    first = opened(SmallTask(), tmp_path / "run", steps=35, **settings)
    train(first)
    every = first.position.save_every
    assert every is not None
    assert every > 35, "a failure in 259 days, and a checkpoint takes little"
    assert [step_of(path) for path in listed(tmp_path / "run" / "checkpoints")] == [35, 20, 10]
    assert capfd.readouterr().out.count("a checkpoint every") == 1
    again = opened(SmallTask(), tmp_path / "run", steps=70, **settings, resume="auto")
    train(again)
    assert again.position.save_every == every
    assert [step_of(path) for path in listed(tmp_path / "run" / "checkpoints")] == [70, 35, 20, 10]
    saved = reader.load(tmp_path / "run" / "checkpoints" / "step-00000070", [], verify=False)
    assert saved.state["position"]["save_every"] == every


def test_results_must_not_depend_on_the_time_that_a_checkpoint_takes() -> None:
    with pytest.raises(Exception, match="name a number of steps"):
        config(reduce="param", sync_step=4, sync_overlap=2)
    config(reduce="param", sync_step=4)


def test_a_rate_that_cannot_be_read_is_refused_with_the_settings() -> None:
    with pytest.raises(Exception, match="such as `4/1000nd`"):
        config(failures="often")
