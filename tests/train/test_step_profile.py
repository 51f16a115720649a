from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from paceline.core.run_folder import METRICS
from paceline.data.plan import BatchRule, Plan
from paceline.observe.records import EpochRecord
from paceline.train.loop import train
from paceline.train.step_profile import costs, thinned
from tests.train.small import SmallTask, opened


def test_a_run_keeps_a_profile_of_its_steps(tmp_path: Path) -> None:
    train(opened(SmallTask(), tmp_path / "run", epochs=2, global_batch=4, grains=2))
    lines = [json.loads(line) for line in (tmp_path / "run" / METRICS).read_text().splitlines()]
    epochs = [EpochRecord.from_json(line) for line in lines if line["kind"] == "epoch"]
    for epoch in epochs:
        profile = epoch.profile
        assert profile is not None
        (rows,) = profile.steps
        assert [int(row[0]) for row in rows] == list(range(epoch.steps - 1))
        assert len(profile.costs) == len(rows)
        assert all(len(step) <= 2 for step in profile.costs)
        measured = sum(sum(row[1:]) for row in rows)
        assert 0 < measured <= epoch.elapsed_s + 1e-3
        assert sum(profile.buckets) == 4 * profile.weights == sum(profile.blocks)
        assert profile.epoch_steps == epoch.steps


def test_costs_are_those_of_the_plan() -> None:
    lengths = np.random.default_rng(2).integers(1, 50, 64)
    plan = Plan(64, rule=BatchRule(16), grains=4, seed=1, lengths=lengths)
    for step, found in enumerate(costs(plan, range(4))):
        assert found == [len(grain) * float(lengths[grain].max()) for grain in plan.grains(step)]


@pytest.mark.parametrize(("ranks", "most"), [(1, 128), (1024, 8)])
def test_many_ranks_keep_few_steps_each(ranks: int, most: int) -> None:
    rows = [[[float(step), *[0.1] * 6] for step in range(128)] for _ in range(ranks)]
    kept = thinned(rows)
    assert len(kept) == ranks
    assert 4 <= len(kept[0]) <= most
