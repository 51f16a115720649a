"""Schedules of the batch and of the longest samples: as by hand, on any number of ranks, and over a resumption."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.config.settings import TrainConfig
from paceline.core.errors import PacelineError
from paceline.data.plan import BatchRule, Plan
from paceline.observe.journal import read
from paceline.train.feed import Feed, StreamSetting, TrainingData
from paceline.train.loop import train
from paceline.train.run import Run, open_run
from paceline.train.stage import stage_steps
from paceline.train.task import Stage
from paceline.world.discover.environment import World
from paceline.world.link import Link
from tests.ranks import run_ranks
from tests.train.ragged import NUM_SAMPLES, Ragged, RaggedTask

SCHEDULES: dict[str, Any] = {"batch_schedule": ("12@5", "40@e3"), "length_schedule": ("20@0", "30@4", "none@12")}
RULES = [(0, 24, 20.0), (4, 24, 30.0), (5, 12, 30.0), (12, 12, None)]
"""(step, samples, longest) up to epoch 3, where batches have 40."""


def alone() -> Link:
    return Link(World(0, 0, 1, 1, 0, 1, "test", None), torch.device("cpu"), 1, ("here",))


class Stopping(RaggedTask):
    """Stops itself where it is asked to."""

    trainer: Run

    def __init__(self, stop_at: int | None = None) -> None:
        super().__init__()
        self.stop_at = stop_at

    def after_step(self, model: Any, step: Any, grains: Any) -> None:
        if step.number + 1 == self.stop_at:
            self.trainer.ask_to_stop()


def fit(link: Link, folder: str, stop_at: int | None, settings: dict[str, Any]) -> tuple[int, list[float]]:
    config = TrainConfig(
        **{
            **{"epochs": 3, "grains": 4, "global_batch": 24, "lr": 0.05, "seed": 3, "level": 0, "optimizer": "sgd"},
            **{"out": folder, "resume": "auto", "log_every": 1, "loggers": (), "workers": 0, "progress": "none"},
            **SCHEDULES,
            **settings,
        }
    )
    task = Stopping(stop_at)
    task.trainer = open_run(task, config, link)
    train(task.trainer)
    rows = read(Path(folder) / "metrics.jsonl") if link.is_first else []
    return task.trainer.stepper.num_steps, [row["loss"] for row in rows if "loss" in row and "step" in row]


def expected_plan() -> list[list[int]]:
    """Global batches of three epochs, each planned by itself from the steps that were before it."""
    lengths, began, batches = Ragged().lengths, 0, []
    for epoch in range(3):
        reached = [(max(0, first - began), BatchRule(size, None, longest)) for first, size, longest in RULES]
        last = max(index for index, (first, _) in enumerate(reached) if first == 0)
        rules = reached[last:] if epoch < 2 else [(0, BatchRule(40))]
        plan = Plan(NUM_SAMPLES, rule=rules[0][1], changes=rules[1:], grains=4, seed=3, epoch=epoch, lengths=lengths)
        batches += [plan.batch(step).tolist() for step in range(plan.num_steps)]
        began += plan.num_steps
    return batches


def feed_of(**settings: Any) -> Feed:
    config = TrainConfig(**{"epochs": 3, "global_batch": 24, "seed": 3, "workers": 0, **SCHEDULES, **settings})
    return Feed(TrainingData.of(Ragged()), config, alone(), grains=4, seed=3)


def test_the_feed_has_the_batches_of_the_plan_by_hand() -> None:
    expected = expected_plan()
    feed = feed_of()
    batches = [
        feed.plan(epoch).batch(step).tolist() for epoch in range(3) for step in range(feed.plan(epoch).num_steps)
    ]
    assert batches == expected
    assert max(map(len, expected[:5])) == 24
    assert max(map(len, expected[5:-5])) == 12
    assert len(expected[-2]) == 40
    fresh = feed_of()  # as after a resumption: the third epoch is asked for first
    assert fresh.plan(2).batch(0).tolist() == feed.plan(2).batch(0).tolist()
    assert feed.total_steps(3) == len(expected)
    assert stage_steps(TrainConfig(epochs=3), Stage("all", []), fresh) == len(expected)


def test_equal_on_any_number_of_ranks_and_over_a_change(tmp_path: Path) -> None:
    """Stopped one step before a change of the batch, and within the epoch after it; begun on other ranks."""
    num_steps = len(expected_plan())
    (one,) = run_ranks(1, fit, str(tmp_path / "one"), None, {})
    assert one[0] == num_steps == len(one[1])
    two = run_ranks(2, fit, str(tmp_path / "two"), None, {})
    assert two[0][1] == one[1]
    run_ranks(2, fit, str(tmp_path / "parts"), 4, {})
    run_ranks(1, fit, str(tmp_path / "parts"), 13, {})
    (parts, _) = run_ranks(2, fit, str(tmp_path / "parts"), None, {})
    assert parts[0] == num_steps
    assert parts[1] == one[1]


def test_what_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(PacelineError, match="shortest sample"):
        feed_of(length_schedule=("1@0",)).plan(0)
    with pytest.raises(StreamSetting, match="batch_schedule"):
        Feed(TrainingData.of(iter([1])), TrainConfig(epochs=1, batch_schedule=("4@2",)), alone(), grains=1, seed=0)


def test_limit_batches_counts_as_steps() -> None:
    feed = feed_of(limit_batches=3, batch_schedule=("12@5",), length_schedule=())
    sizes = [[len(feed.plan(epoch).batch(step)) for step in range(3)] for epoch in range(3)]
    assert sizes == [[24, 24, 24], [24, 24, 12], [12, 12, 12]]
