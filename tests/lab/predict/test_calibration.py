from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.core.run_folder import METRICS, RECORD
from paceline.data.partition import assign_blocks, cut
from paceline.lab.predict.calibration import NoProfile, NoRun, OtherRun, calibrate, deal, recut
from tests.lab.predict.folders import PROFILE, changed, make_run


def test_times_of_a_run_are_found_again(tmp_path: Path) -> None:
    found = calibrate([make_run(tmp_path / "a")])
    assert found.cost_s * 64 == pytest.approx(0.24)
    assert found.grain_s == 0
    assert found.backward_share == pytest.approx(0.02 / (0.24 / 8))
    assert found.bucket_ready == pytest.approx([0.5, 1.0])
    assert (found.rest_s, found.update_s, found.data_s) == pytest.approx((0.001, 0.002, 0.001 / 64))
    assert (found.global_batch, found.grains, found.total_steps) == (64, 8, 200)
    assert found.save_s == 0.5
    assert found.ratios.mean() == pytest.approx(1.0)


def test_the_fixed_part_of_a_grain_is_told_where_lengths_differ(tmp_path: Path) -> None:
    """A grain of cost c takes 10 ms + 1 ms x c."""
    random = np.random.default_rng(0)
    costs = [[float(cost)] * 4 for cost in random.integers(5, 60, 20)]

    def retime(epoch: dict[str, Any]) -> None:
        for row, step in zip(epoch["profile"]["steps"][0], costs, strict=True):
            row[3] = sum(0.01 + 0.001 * cost for cost in step)

    folder = changed(make_run(tmp_path / "a", grains=4, costs=costs), retime)
    found = calibrate([folder])
    assert (found.grain_s, found.cost_s) == pytest.approx((0.01, 0.001), rel=1e-6)


def test_slow_machines_are_told_from_noise(tmp_path: Path) -> None:
    found = calibrate([make_run(tmp_path / "a", ranks=4, slow={2: 1.3}, hosts=["a", "b", "c", "d"])])
    assert found.hosts.tolist() == pytest.approx([1.0, 1.0, 1.3, 1.0])
    assert found.ratios.std() < 0.01


def test_slow_down_is_the_last_backward_beside_the_links(tmp_path: Path) -> None:
    slowed = replace(PROFILE, backward_s=0.026, ready_s=[0.013, 0.026])
    one, two = make_run(tmp_path / "a"), make_run(tmp_path / "b", ranks=2, compute_s=0.12, profile=slowed)
    assert calibrate([two, one]).slow_down == pytest.approx(1.3)
    assert calibrate([one]).slow_down is None


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8, 13])
def test_grains_are_dealt_as_the_plan_deals_them(ranks: int) -> None:
    lengths = np.random.default_rng(4).integers(1, 100, 64)
    costs = [len(piece) * float(lengths[piece[0]]) for piece in cut(lengths, 64, 13)]
    number, work = deal(costs, ranks, in_blocks=True)
    starts = assign_blocks(costs, ranks)
    assert work.sum() == pytest.approx(sum(costs))
    assert number.sum() == len(costs)
    assert work.max() == pytest.approx(max(sum(costs[a:b]) for a, b in itertools.pairwise(starts)))
    assert deal(costs, ranks, in_blocks=False)[1].sum() == pytest.approx(sum(costs))


def test_another_number_of_grains_has_the_same_work() -> None:
    assert recut([4.0, 4.0], 8, 4) == [2.0] * 4
    assert recut([4.0, 4.0], 8, 100) == [2.0] * 4  # grains have two samples or more


def test_folders_that_tell_nothing_are_refused(tmp_path: Path) -> None:
    with pytest.raises(NoRun, match="no such folder"):
        calibrate([tmp_path / "none"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(NoRun, match="run.json"):
        calibrate([tmp_path / "empty"])
    killed = make_run(tmp_path / "killed")
    step = {"kind": "step", "step": 0, "epoch": 1, "loss": 1.0, "lr": 0.1}
    (killed / METRICS).write_text(f"{json.dumps(step)}\n", encoding="utf-8")
    with pytest.raises(NoProfile, match="before its first epoch"):
        calibrate([killed])
    (killed / METRICS).unlink()
    with pytest.raises(NoProfile, match="no steps"):
        calibrate([killed])
    (killed / RECORD).write_text("{", encoding="utf-8")
    with pytest.raises(NoRun, match="not JSON"):
        calibrate([killed])


def test_a_run_of_an_earlier_version_is_refused(tmp_path: Path) -> None:
    folder = changed(make_run(tmp_path / "a"), lambda epoch: epoch.pop("profile"))
    with pytest.raises(NoProfile, match="earlier versions"):
        calibrate([folder])


def test_runs_of_other_batches_are_refused_together(tmp_path: Path) -> None:
    with pytest.raises(OtherRun, match="samples of a step"):
        calibrate([make_run(tmp_path / "a"), make_run(tmp_path / "b", batch=128)])
