from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.core.errors import Conflict, NotFound, Unreadable
from paceline.core.run_folder import METRICS, RECORD
from paceline.data.partition import assign_blocks, cut
from paceline.lab.predict.calibration import calibrate, deal, recut
from tests.lab.predict.folders import changed, make_run


def test_times_of_a_run_are_found_again(tmp_path: Path) -> None:
    found = calibrate([make_run(tmp_path / "a")])
    assert found.cost_s * 64 == pytest.approx(0.24)
    assert found.grain_s == 0
    (run,) = found.runs
    assert (run.other_s.mean(), run.update_s.mean(), run.data_s.mean()) == pytest.approx((0.001, 0.002, 0.001))
    assert (found.global_batch, run.grains, found.total_steps) == (64, 8, 200)
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
    with pytest.raises(NotFound, match="no such folder"):
        calibrate([tmp_path / "none"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(NotFound, match="run.json"):
        calibrate([tmp_path / "empty"])
    killed = make_run(tmp_path / "killed")
    step = {"kind": "step", "step": 0, "epoch": 1, "loss": 1.0, "lr": 0.1}
    (killed / METRICS).write_text(f"{json.dumps(step)}\n", encoding="utf-8")
    with pytest.raises(Unreadable, match="before the end of its first epoch"):
        calibrate([killed])
    (killed / METRICS).unlink()
    with pytest.raises(Unreadable, match="no steps"):
        calibrate([killed])
    (killed / RECORD).write_text("{", encoding="utf-8")
    with pytest.raises(NotFound, match="not JSON"):
        calibrate([killed])


def test_a_run_of_an_earlier_version_is_refused(tmp_path: Path) -> None:
    folder = changed(make_run(tmp_path / "a"), lambda epoch: epoch.pop("profile"))
    with pytest.raises(Unreadable, match="earlier versions"):
        calibrate([folder])


def test_runs_of_other_batches_are_refused_together(tmp_path: Path) -> None:
    with pytest.raises(Conflict, match="number of samples per step"):
        calibrate([make_run(tmp_path / "a"), make_run(tmp_path / "b", batch=128)])
