"""Iterable data of unknown length: the same stream at any world size, and uneven shards without a hang."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import IterableDataset

from paceline.config.settings import TrainConfig
from paceline.data.grain import Grain
from paceline.observe.journal import read
from paceline.train import loop
from paceline.train.feed import NotData, StreamSetting
from paceline.train.run import open_run
from paceline.train.task import Task
from paceline.world.link import Link
from tests.ranks import run_ranks
from tests.train.test_engine import alone

TOTAL = 53


class Counting(IterableDataset[Any]):
    """0, 1, 2, ... with a random shift that is keyed like any augmentation."""

    def __init__(self, total: int = TOTAL) -> None:
        self.total = total

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for number in range(self.total):
            yield torch.tensor([number / TOTAL, float(torch.rand(()))], dtype=torch.float64), torch.tensor(number)


class Uneven:
    """Rank r has 5 + 11 r samples."""

    def shard(self, rank: int, size: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return [
            (torch.tensor([0.1 * number, 1.0], dtype=torch.float64), torch.tensor(1000 * rank + number))
            for number in range(5 + 11 * rank)
        ]

    def __iter__(self) -> Iterator[Any]:
        raise AssertionError("a sharded stream is read by shard")


class StreamTask(Task):
    def __init__(self, data: Any) -> None:
        self.data = data
        self.seen: list[int] = []

    def model(self) -> nn.Module:
        return nn.Linear(2, 1)

    def train_data(self) -> Any:
        return self.data

    def loss(self, model: nn.Module, grain: Grain) -> tuple[torch.Tensor, int]:
        self.seen += grain.y.tolist()
        return (model(grain.x).squeeze(1) - grain.y / TOTAL).square().sum(), len(grain)


def train(link: Link, kind: str, folder: str, settings: dict[str, Any]) -> list[int]:
    task = StreamTask({"counting": Counting, "uneven": Uneven}[kind]())
    config = TrainConfig(
        global_batch=8, grains=4, optimizer="sgd", lr=0.05, precision="fp64", out=Path(folder), **settings
    )
    loop.train(open_run(task, config, link))
    return task.seen


def losses(folder: Path) -> list[float]:
    return [record["loss"] for record in read(folder / "metrics.jsonl")]


def test_the_same_stream_at_any_world_size(tmp_path: Path) -> None:
    results = {}
    for size in (1, 2, 4):
        seen = run_ranks(size, train, "counting", str(tmp_path / str(size)), {"epochs": 2})
        assert sorted(sum(seen, [])) == sorted([*range(TOTAL), *range(TOTAL)])
        results[size] = losses(tmp_path / str(size))
        assert len(results[size]) == 2 * -(-TOTAL // 8)
    assert results[2] == pytest.approx(results[1], rel=1e-12)
    assert results[4] == pytest.approx(results[1], rel=1e-12)


def test_uneven_shards_are_consumed_to_the_last_sample(tmp_path: Path) -> None:
    seen = run_ranks(4, train, "uneven", str(tmp_path / "run"), {"epochs": 2})
    for rank, numbers in enumerate(seen):
        assert sorted(numbers) == sorted(2 * [1000 * rank + number for number in range(5 + 11 * rank)])
    assert len(losses(tmp_path / "run")) == 2 * (5 + 11 * 3) // 2  # two samples per rank and step


def test_a_stream_resumes_by_passing_over_what_was_read(tmp_path: Path) -> None:
    settings = {"epochs": 3, "save_every_steps": 5}
    run_ranks(1, train, "counting", str(tmp_path / "whole"), settings)
    run_ranks(2, train, "counting", str(tmp_path / "parts"), {**settings, "steps": 10})
    run_ranks(1, train, "counting", str(tmp_path / "parts"), {**settings, "resume": "auto", "allow_change": True})
    assert losses(tmp_path / "parts") == pytest.approx(losses(tmp_path / "whole"), rel=1e-12)


class Normed(StreamTask):
    """52 samples: the last batch of 8 has 4, so half of its grains are empty."""

    def __init__(self) -> None:
        super().__init__(Counting(52))

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))


def train_norms(link: Link, folder: str, settings: dict[str, Any]) -> dict[str, torch.Tensor]:
    config = TrainConfig(
        **{"global_batch": 8, "optimizer": "sgd", "lr": 0.05, "precision": "fp64", "out": Path(folder), "epochs": 2}
        | settings
    )
    loop.train(open_run(Normed(), config, link))
    newest = max(Path(folder, "checkpoints").glob("step-*"))
    return load_file(newest / "model.safetensors")


def test_batch_norm_counts_the_grains_that_a_stream_fills(tmp_path: Path) -> None:
    """Statistics decayed for grains without samples, and norms that were joined waited for them for ever."""
    alone, two, four = (run_ranks(size, train_norms, str(tmp_path / str(size)), {"grains": 4})[0] for size in (1, 2, 4))
    for other in (two, four):
        for name, tensor in alone.items():
            torch.testing.assert_close(other[name], tensor, rtol=1e-11, atol=1e-12)
    joined = run_ranks(
        2, train_norms, str(tmp_path / "joined"), {"grains": 2, "sync_batchnorm": "all", "timeout_s": 20}
    )
    torch.testing.assert_close(joined[0], joined[1])


@pytest.mark.parametrize("settings", [{"order": "sorted"}, {"batch_cost": 3.0}, {"partition_epoch": 2}])
def test_settings_that_need_the_whole_data_are_refused(settings: dict[str, Any]) -> None:
    config = TrainConfig(epochs=1, global_batch=8, **settings)
    with pytest.raises(StreamSetting, match=next(iter(settings))):
        loop.train(open_run(StreamTask(Counting()), config, alone()))


def test_what_is_no_data_is_named() -> None:
    with pytest.raises(NotData, match="int is no data set"):
        loop.train(open_run(StreamTask(7), TrainConfig(epochs=1), alone()))
