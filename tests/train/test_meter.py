"""What a run measures of itself: in its journal, in its epoch line, in its result; and what it finds holds it back."""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import nn

from paceline.config.settings import TrainConfig
from paceline.data.grain import Grain
from paceline.data.packed.dataset import PackedDataset
from paceline.observe import clock
from paceline.observe import verdict as verdicts
from paceline.observe.callback import Watcher
from paceline.observe.clock import PHASES, Clock
from paceline.observe.device_clock import DeviceClock
from paceline.observe.journal import read
from paceline.observe.records import EpochRecord
from paceline.train import meter
from paceline.train.loop import train
from paceline.train.run import open_run
from paceline.train.task import Reports, Task
from paceline.world.link import Link
from tests.observe.test_loggers import read_tensorboard
from tests.ranks import ranks
from tests.train.ragged import RaggedTask
from tests.train.small import NUM_SAMPLES, SmallTask, alone, opened

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


class Counted(RaggedTask, Reports):
    length_unit, sample_unit, count_unit = "frames", "clips", "tokens"

    def flops(self, model: nn.Module) -> float:
        return 1e6


@ranks(1, 2)
def test_an_epoch_is_measured_on_all_ranks(link: Link, folder: Path) -> None:
    task = Counted()
    data = task.train_data()
    run = opened(task, folder / "run", link, epochs=2, grains=2, val_every_steps=20, log_every=3)
    train(run)
    if not link.is_first:
        return
    size = link.world.size
    for record in read(folder / "run" / "metrics.jsonl", "epoch"):
        wall_s = max(sum(rank.values()) for rank in record["seconds"])
        frames = float(np.asarray(data.lengths).sum())
        assert record["rates"] == pytest.approx(
            {"clips_per_s": len(data) / wall_s, "frames_per_s": frames / wall_s, "tokens_per_s": frames / wall_s},
            rel=1e-3,
        )
        assert record["flops_per_s"] == pytest.approx(1e6 * frames / wall_s, rel=1e-3)
        assert "mfu" not in record
        assert len(record["memory"]) == len(record["between"]) == len(record["hosts"]) == size
        assert all(rank["host_bytes"] > 50e6 and rank["device_bytes"] is None for rank in record["memory"])
        assert sum(record["work"]) >= frames, "with padding"
        for rank in record["seconds"]:
            assert rank["optimizer"] > 0
            assert (rank["communication"] > 1e-4) == (size > 1)
            assert rank["transfer"] == 0, "no device to go to"
        assert ("meetings" in record) == (size > 1)
        if size > 1:
            met = record["meetings"]
            total = sum(sum(rank.values()) for rank in record["seconds"])
            communication = sum(rank["communication"] for rank in record["seconds"])
            assert met["exchange"] + met["waiting"] == pytest.approx(communication / total, rel=0.01)
        epoch = EpochRecord.from_json(record)
        assert verdicts.verdict(epoch) == epoch.findings
    drawn = read_tensorboard(folder / "run" / "tensorboard")
    assert {f"time/{phase}" for phase in PHASES} | {"epoch/clips_per_s", "epoch/host_gib"} <= drawn.keys()
    assert sum(values[0][1] for name, values in drawn.items() if name.startswith("time/")) == pytest.approx(1.0)


@ranks(2)
def test_ranks_that_step_apart_meet_at_their_averages(link: Link, folder: Path) -> None:
    run = opened(SmallTask(), folder / "run", link, epochs=1, grains=2, reduce="param", sync_step=2, global_batch=4)
    train(run)
    assert len(run.clock.waits.numbers) == 3, "5 steps: two averages on the way and one at the end"
    if link.is_first:
        (record,) = read(folder / "run" / "metrics.jsonl", "epoch")
        assert sum(record["meetings"]["last"]) == pytest.approx(1.0)


def test_validation_and_checkpoints_are_between_two_epochs(tmp_path: Path) -> None:
    train(opened(SmallTask(), tmp_path / "run", epochs=2))
    first, second = read(tmp_path / "run" / "metrics.jsonl", "epoch")
    (between,) = second["between"]
    assert between["validation"] > 0
    assert between["checkpoint"] > 0
    assert first["between"][0]["validation"] == 0
    looks = read(tmp_path / "run" / "metrics.jsonl", "validation")
    assert 0 < looks[0]["seconds"] <= between["validation"] + 1e-6


def test_length_is_that_of_the_recording_however_long_it_may_become(tmp_path: Path) -> None:
    class Stretched(Counted):
        def train_data(self) -> Any:
            data = super().train_data()
            data.total_length = float(np.asarray(data.lengths).sum()) / 2
            return data

    train(opened(Stretched(), tmp_path / "run", epochs=1))
    (record,) = read(tmp_path / "run" / "metrics.jsonl", "epoch")
    assert record["rates"]["frames_per_s"] == pytest.approx(record["rates"]["tokens_per_s"] / 2)


def test_what_a_task_does_not_say_is_not_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(opened(SmallTask(), tmp_path / "run", epochs=1))
    (record,) = read(tmp_path / "run" / "metrics.jsonl", "epoch")
    assert list(record["rates"]) == ["samples_per_s"]
    assert record["samples"] == NUM_SAMPLES
    assert not {"flops_per_s", "mfu", "meetings", "device", "compile"} & record.keys()
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("train epoch 1")]
    assert line.endswith(" samples/s")


def test_what_a_verdict_may_advise_is_a_fact_of_the_run(tmp_path: Path) -> None:
    class Fewer(TrainConfig):
        level: Literal["auto", 0, 1, 2, 3] = 0

    class FromPacked(SmallTask):
        def train_data(self) -> Any:
            return PackedDataset.write(tmp_path / "train.h5", super().train_data())

        def loss(self, model: nn.Module, grain: Grain) -> Any:
            return (model(grain[0]) - grain[1]).square().sum(), len(grain)

    class Last(Watcher):
        def epoch(self, record: Any) -> None:
            self.way = record["way"]

    ways = []
    for task, settings in ((SmallTask(), TrainConfig), (FromPacked(), Fewer)):
        last = Last()
        config = settings(epochs=1, global_batch=8, workers=0, progress="none", loggers=())
        train(open_run(task, config, alone(), [last]))
        ways.append((last.way["is_packed"], last.way["highest_level"]))
    assert ways == [(False, 4), (True, 3)]


def test_the_clock_of_a_device_is_one_with_events() -> None:
    assert type(meter.make_clock(torch.device("cpu"))) is Clock
    assert isinstance(meter.make_clock(torch.device("cuda")), DeviceClock)


def test_depthwise_convolutions_are_found() -> None:
    assert meter.has_depthwise(nn.Sequential(nn.Conv1d(8, 8, 5, groups=8)))
    assert not meter.has_depthwise(nn.Sequential(nn.Conv1d(8, 8, 5), nn.Conv1d(8, 8, 1, groups=8), nn.Conv1d(1, 4, 5)))


# -- runs that are held back -------------------------------------------------------------------------------------------


def provoked(link: Link, name: str, **settings: Any) -> dict[str, str] | None:
    """Findings by kind of the benchmark's own case, on the first rank."""
    sys.path.insert(0, str(BENCHMARKS))
    try:
        cases = importlib.import_module("verdicts")
    finally:
        sys.path.remove(str(BENCHMARKS))
    case = cases.CASES[name]
    record = cases.provoke(link, case, epochs=1, **settings)
    if record is None:
        return None
    json.dumps(record, allow_nan=False)
    assert max(sum(rank.values()) for rank in record["seconds"]) >= verdicts.LEAST_SECONDS, "too short to be judged"
    assert cases.is_right(case, record["findings"]) or "cores" in [each["kind"] for each in record["findings"]], record
    return {each["kind"]: f"{each['text']}: {each['advice']}" for each in record["findings"]}


@ranks(2)
def test_a_slow_disk(link: Link) -> None:
    found = provoked(link, "data")
    if found is not None and "data" in found:
        assert " on rank 1: " in found["data"]
        assert "`paceline pack`" in found["data"]
        assert "straggler" not in found, "that rank 1 is late is due to its data"


@ranks(2)
def test_a_slow_rank(link: Link) -> None:
    found = provoked(link, "straggler")
    if found is not None and "straggler" in found:
        assert found["straggler"].startswith(f"rank 1 on {link.hosts[1]} is late: ")


@ranks(2)
def test_grains_that_cannot_be_shared_out(link: Link) -> None:
    found = provoked(link, "balance")
    if found is not None and "balance" in found:
        assert found["balance"].startswith("rank 0 has ")
        assert "`--grains 8`" in found["balance"]
        assert "straggler" not in found, "it has more to do, and is not slow"


@ranks(2)
def test_lengths_in_random_order(link: Link) -> None:
    found = provoked(link, "padding")
    if found is not None:
        assert "`--order bucket`" in found["padding"], "whatever else the machine does"


class Time:
    """Time that passes only where somebody says so: what else runs on the machine changes nothing."""

    now_ns = 0

    @classmethod
    def read_ns(cls) -> int:
        cls.now_ns += 10_000
        return cls.now_ns


class Waiting(Task):
    """Reads slowly."""

    def model(self) -> nn.Module:
        return nn.Linear(2, 1)

    def train_data(self) -> Sequence[Any]:
        return Slow()

    def loss(self, model: nn.Module, grain: Grain) -> tuple[torch.Tensor, int]:
        return model(grain[0]).square().sum(), len(grain)


class Slow(list[Any]):
    def __init__(self) -> None:
        super().__init__([(torch.ones(2),)] * 20)

    def __getitem__(self, index: Any) -> Any:
        Time.now_ns += 100_000_000
        return super().__getitem__(index)


def test_a_finding_is_told_once_and_is_in_the_result(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(clock, "perf_counter_ns", Time.read_ns)
    monkeypatch.setattr(meter, "core_wait_s", lambda: 0.0)
    config = TrainConfig(epochs=3, global_batch=2, workers=0, level=0, optimizer="sgd")
    result = train(open_run(Waiting(), config, alone()))
    assert [finding.kind for finding in result.findings] == ["data"]
    said = [line for line in capsys.readouterr().out.splitlines() if "held back: data" in line]
    assert len(said) == 1
    assert said[0].startswith("  held back: data wait ")


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores to bind two ranks to")
@ranks(2)
def test_ranks_that_are_bound_to_cores_of_their_own(link: Link, folder: Path) -> None:
    """As mpirun binds them. On ce01e4b: `2 processes of this run share 1 cores`, who do not share it."""
    free = os.sched_getaffinity(0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verdicts, "LEAST_SECONDS", 0.0)
        patch.setattr(meter, "core_wait_s", lambda: time.perf_counter())  # no core was free, all the time
        os.sched_setaffinity(0, {sorted(free)[link.world.rank]})
        try:
            train(opened(SmallTask(), folder / "run", link, epochs=1, global_batch=2, grains=2, progress="none"))
        finally:
            os.sched_setaffinity(0, free)
    if link.is_first:
        (record,) = read(folder / "run" / "metrics.jsonl", "epoch")
        assert record["core_shares"] == [{"ranks": 1, "cores": 1}] * 2
        (finding,) = [each for each in record["findings"] if each["kind"] == "cores"]
        assert "bound" in finding["advice"]
        assert "share" not in finding["advice"]
