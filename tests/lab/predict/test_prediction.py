from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.core.errors import Conflict, InvalidSetting
from paceline.lab.predict.calibration import calibrate
from paceline.lab.predict.communication import GLOO, LinkSpeed, parse_link
from paceline.lab.predict.prediction import largest, predict, staircase
from tests.lab.predict.folders import MIB, PROFILE, make_run

FAST = LinkSpeed(1e15, 0.0)
SLOW = parse_link("1Gbit,100us")


def parts(row: object) -> float:
    names = ("compute_s", "communication_s", "waiting_s", "data_s", "other_s")
    return sum(float(getattr(row, name)) for name in names)


def test_without_links_and_noise_it_is_the_staircase_of_grains(tmp_path: Path) -> None:
    """8 grains of 30 ms each: the busiest rank has ceil(8 / ranks) of them, and 3 ms more."""
    found = calibrate([make_run(tmp_path / "a")])
    answer = predict(found, ranks=[1, 2, 3, 4, 5, 8], between=FAST)
    for row in answer.rows:
        busiest = -(-8 // row.ranks)
        assert row.grains_per_rank == busiest
        assert row.compute_s + row.waiting_s == pytest.approx(0.03 * busiest, rel=0.01)
        assert parts(row) == pytest.approx(row.step_s.value)
        assert row.step_s.low < row.step_s.value < row.step_s.high
    assert list(answer.staircase) == [(1, 8), (2, 4), (3, 3), (4, 2), (8, 1)]
    assert any("5 ranks are no faster than 4" in line for line in answer.advice)


def test_a_slow_link_is_what_a_ring_takes(tmp_path: Path) -> None:
    """4 MiB in two buckets over 1 Gbit/s, of which the first may leave at half of the last backward (20 ms)."""
    found = calibrate([make_run(tmp_path / "a")])
    (row,) = predict(found, ranks=[8], between=SLOW, reduction=replace(found.runs[0].reduction, sums="fast")).rows
    moved = [2 * 7 / 8 * size / SLOW.bytes_per_s for size in (MIB, 3 * MIB)]
    assert row.communication_s == pytest.approx(sum(moved) - 0.01, rel=0.12)  # latencies and calls are the rest


@pytest.mark.parametrize(
    ("changes", "less_than"),
    [({"wire": "bf16"}, 0.75), ({"reduce": "param", "sync_step": 10}, 0.6), ({"sums": "fast"}, 1.0)],
)
def test_lighter_ways_take_less(tmp_path: Path, changes: dict[str, object], less_than: float) -> None:
    found = calibrate([make_run(tmp_path / "a")])
    (usual,) = predict(found, ranks=[8], between=SLOW).rows
    (lighter,) = predict(found, ranks=[8], between=SLOW, reduction=replace(found.runs[0].reduction, **changes)).rows  # type: ignore[arg-type]
    assert lighter.communication_s < less_than * usual.communication_s


def test_full_shards_gather_every_block_twice_per_grain(tmp_path: Path) -> None:
    found = calibrate([make_run(tmp_path / "a")])
    reduction = replace(found.runs[0].reduction, shard="full", sums="fast")
    link = LinkSpeed(1e8, 0.0)
    rows = predict(found, ranks=[4, 8], between=link, reduction=reduction).rows
    for row, grains in zip(rows, (2, 1), strict=True):
        ring = (row.ranks - 1) / row.ranks * 4 * MIB / 1e8
        assert row.communication_s == pytest.approx(2 * ring * (grains * GLOO["all_gather"][1] + GLOO["all_reduce"][1]))


def test_what_two_ranks_measured_is_carried_over(tmp_path: Path) -> None:
    """Each call took 5 ms more than the model says, over a link that is known."""
    link = LinkSpeed(1e9, 0.0)
    one = make_run(tmp_path / "a")
    plain = predict(calibrate([one]), ranks=[2, 8], between=link).rows
    two = make_run(tmp_path / "b", ranks=2, compute_s=0.12, communication_s=plain[0].communication_s + 0.005)
    fitted = predict(calibrate([one, two], link), ranks=[8], between=link).rows
    assert fitted[0].communication_s - plain[1].communication_s == pytest.approx(0.005, rel=0.05)


@pytest.mark.parametrize("settings", [{"sync_step": 4}, {"sync_seconds": 4 * 0.137}])
def test_what_an_average_took_belongs_to_the_average(tmp_path: Path, settings: dict[str, Any]) -> None:
    """Four steps of 0.137 s between averages, each 40 ms longer than the model says: 10 ms in each step."""
    link = LinkSpeed(1e9, 0.0)
    one = make_run(tmp_path / "a")
    reduction = replace(calibrate([one]).runs[0].reduction, reduce="param", sums="exact", sync_step=4)
    free = predict(calibrate([one]), ranks=[2, 8], between=link, reduction=reduction).rows
    two = make_run(tmp_path / "b", ranks=2, compute_s=0.12, communication_s=0.013, reduce="param", **settings)
    fitted = predict(calibrate([one, two], link), ranks=[2], between=link).rows
    assert free[0].communication_s != pytest.approx(0.013, rel=0.1)
    assert fitted[0].communication_s == pytest.approx(0.013, rel=0.1)


def test_more_failures_make_it_longer_and_dearer(tmp_path: Path) -> None:
    found = calibrate([make_run(tmp_path / "a")])
    quiet, stormy = (
        predict(found, ranks=[64], between=SLOW, grains=64, price=2.0, failures=failures).rows[0]
        for failures in (None, "50000/1000nd")
    )
    assert stormy.goodput is not None
    assert 0 < stormy.goodput.low < stormy.goodput.value < stormy.goodput.high < 1
    assert quiet.run_s is not None
    assert stormy.run_s is not None
    assert stormy.run_s.value == pytest.approx(quiet.run_s.value / stormy.goodput.value)
    assert quiet.price is not None
    assert quiet.price.value == pytest.approx(2.0 * 64 * quiet.run_s.value / 3600)


def test_waiting_is_for_the_largest_of_the_measured_ratios(tmp_path: Path) -> None:
    assert largest(np.array([1.0, 2.0]), 1) == pytest.approx(1.5)
    assert largest(np.array([2.0, 1.0]), 3) == pytest.approx(2 * (1 - 0.5**3) + 0.5**3)
    found = calibrate([make_run(tmp_path / "a", ranks=2, slow={1: 1.3}, hosts=["a", "b"])])
    even, many = predict(found, ranks=[2, 64], grains=64, between=FAST).rows
    assert 0 < even.waiting_s / even.compute_s < many.waiting_s / many.compute_s


def test_sharding_within_nodes_is_refused(tmp_path: Path) -> None:
    found = calibrate([make_run(tmp_path / "a")])
    with pytest.raises(Conflict, match="`--shard node` cannot be predicted"):
        predict(found, ranks=[4], between=SLOW, reduction=replace(found.runs[0].reduction, shard="node"))


MEASURED = {  # benchmarks/results/distributed.md: "ragged" stand-in, ms of a step on 2, 4 and 8 ranks over shaped links
    ("100Mbit,0.3ms", "grad"): (585, 518, 469),
    ("100Mbit,0.3ms", "param"): (473, 330, 252),
    ("100Mbit,0.3ms", "overlapped"): (429, 259, 174),
    ("1Gbit,0.15ms", "grad"): (490, 342, 276),
    ("1Gbit,0.15ms", "param"): (458, 291, 214),
    ("1Gbit,0.15ms", "overlapped"): (439, 265, 181),
}
SETTINGS: dict[str, dict[str, Any]] = {
    "grad": {"sums": "fast"},
    "param": {"reduce": "param", "sync_step": 4, "sync_state": "keep"},
    "overlapped": {"reduce": "param", "sync_step": 4, "sync_state": "keep", "sync_overlap": 4},
}


@pytest.mark.parametrize(("link", "kind"), MEASURED)
def test_four_and_eight_ranks_take_what_was_measured_on_hosts_with_shaped_links(
    tmp_path: Path, link: str, kind: str
) -> None:
    """10 grains of 83 ms, and the measured time of a step on 2 ranks; 2 and 8 MiB of weights."""
    pair_s, *measured = (number / 1e3 for number in MEASURED[link, kind])
    weights = 2 * MIB if link.startswith("100M") else 8 * MIB
    first = min(weights, MIB) if link.startswith("100M") else round(0.28125 * weights)
    profile = replace(PROFILE, buckets=[first, weights - first], blocks=[], weights=weights // 4, state=0)
    one = make_run(tmp_path / "a", grains=10, batch=20, compute_s=0.83, profile=profile)
    settings = {"ranks": 2, "grains": 10, "batch": 20, "compute_s": 0.415, "profile": profile, **SETTINGS[kind]}
    two = make_run(tmp_path / "b", **settings, communication_s=pair_s - 0.419)
    speed = parse_link(link)
    answer = predict(calibrate([one, two], speed), ranks=[4, 8], between=speed)
    for row, step_s in zip(answer.rows, measured, strict=True):
        assert row.step_s.value == pytest.approx(step_s, rel=0.1)
        assert row.step_s.low <= step_s <= row.step_s.high


def test_more_ranks_than_grains_are_told(tmp_path: Path) -> None:
    found = calibrate([make_run(tmp_path / "a")])
    answer = predict(found, ranks=[8, 16], between=FAST)
    assert any("16 ranks on 8 grains" in line and "`--grains 16`" in line for line in answer.advice)
    assert answer.rows[1].samples_per_s.value == pytest.approx(answer.rows[0].samples_per_s.value, rel=0.02)
    assert any("file system" in line for line in answer.unknown)


@pytest.mark.parametrize(("ranks", "nodes"), [([], None), ([0], None), ([2, 4], [1, 2, 3]), ([2], [4])])
def test_ranks_that_cannot_be_are_refused(tmp_path: Path, ranks: list[int], nodes: list[int] | None) -> None:
    found = calibrate([make_run(tmp_path / "a")])
    with pytest.raises(InvalidSetting):
        predict(found, ranks=ranks, nodes=nodes, between=SLOW)


@pytest.mark.parametrize("grains", [1, 7, 8, 12, 64])
def test_the_staircase_has_every_number_of_ranks_that_brings_something(grains: int) -> None:
    stairs = staircase(grains, 100)
    for ranks in range(1, grains + 1):
        height = next(per_rank for first, per_rank in reversed(stairs) if first <= ranks)
        assert height == -(-grains // ranks)
