"""A benchmark counts what it claims to count: samples and lengths against the plan, rates against each other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline.config.settings import TrainConfig
from paceline.core.errors import InvalidSetting
from paceline.data.plan import BatchRule, Plan
from paceline.train.benchmark import Benchmark, Measured, benchmark, join
from paceline.train.fit import run_mode
from paceline.train.result import Result
from paceline.train.task import HasStages, Stage
from paceline.world.link import Link
from tests.ranks import run_ranks
from tests.train.ragged import Ragged, RaggedTask
from tests.train.small import SmallTask, alone

STEPS, FIRST = 20, 7  # epochs of 9 steps: the timed part crosses two ends of an epoch


def config(**settings: Any) -> TrainConfig:
    plain = {"global_batch": 24, "grains": 3, "level": 0, "workers": 0, "epochs": 1, "benchmark": True}
    return TrainConfig(**{**plain, "bench_steps": STEPS, "bench_start": FIRST, **settings})


def measure(link: Link, out: Path) -> Benchmark:
    return benchmark(RaggedTask(), config(out=out), link)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_counts_the_timed_samples_of_all_ranks(tmp_path: Path, size: int) -> None:
    data = Ragged()
    plans = [
        Plan(len(data), rule=BatchRule(24), grains=3, seed=0, epoch=epoch, lengths=data.lengths) for epoch in range(3)
    ]
    timed = [plans[step // 9].batch(step % 9) for step in range(FIRST, STEPS)]
    assert plans[0].num_steps == 9
    results = run_ranks(size, measure, tmp_path / "run")
    for found in results:
        assert found.num_samples == sum(len(samples) for samples in timed)
        assert found.length == sum(int(data.lengths[samples].sum()) for samples in timed)
        assert (found.timed_steps, found.num_steps, found.status, found.mode) == (13, 20, "measured", "benchmark")
        assert found.objects_per_s * found.wall_s == pytest.approx(found.num_samples, rel=1e-12)
        assert found.lengths_per_s * found.wall_s == pytest.approx(found.length, rel=1e-12)
        assert found.step_s * found.timed_steps == pytest.approx(found.wall_s, rel=1e-12)
        assert found.seconds["compute"] > 0
        assert found.seconds["validation"] == found.seconds["checkpoint"] == 0
        assert found == results[0]  # all ranks say the same
    assert list(tmp_path.iterdir()) == []


def test_all_samples_in_the_time_of_the_slowest_rank() -> None:
    fast = Measured({"data": 0.5, "compute": 1.0}, 30, 100.0)
    slow = Measured({"data": 1.0, "compute": 1.5}, 20, 50.5)
    found = join([fast, slow], 10, Result("finished", 15, 0.25))
    assert (found.wall_s, found.step_s, found.objects_per_s, found.lengths_per_s) == (2.5, 0.5, 20.0, 60.2)
    assert found.lines() == [
        "benchmark: steps 10 to 14, 50 samples in 2.500 s",
        "  time per step    500 ms",
        "  objects/s        20",
        "  lengths/s        60.2",
        "    data           200 ms per step (40.0%)",
        "    compute        300 ms per step (60.0%)",
    ]


class Staged(SmallTask, HasStages):
    """A first stage of one epoch, and hooks that count."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = 0

    def stages(self) -> list[Stage]:
        return [Stage("first", self.train_data(), epochs=1), Stage("second", self.train_data())]

    def after_step(self, model: Any, step: Any, grains: Any) -> None:
        self.steps += 1


def test_goes_on_over_epochs_and_leaves_everything_else_as_in_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    task = Staged()
    settings = {"global_batch": 8, "order": "none", "grains": 1, "bench_steps": 7, "bench_start": 0}
    found = run_mode(task, config(**settings, exp_name="tried", save_every_steps=1, monitor="no/such"), alone())
    assert isinstance(found, Benchmark)
    assert task.steps == 7
    assert task.seen == [list(range(8)), list(range(8, 16)), list(range(16, 20))] * 2 + [list(range(8))]
    assert (found.num_samples, found.length, found.lengths_per_s) == (48, None, None)
    assert "benchmark: steps 0 to 6, 48 samples in" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_something_must_be_left_to_time() -> None:
    with pytest.raises(InvalidSetting, match="`bench_steps` is 10") as error:
        benchmark(SmallTask(), config(bench_steps=10, bench_start=10), alone())
    assert "--bench-steps 60" in error.value.hint
