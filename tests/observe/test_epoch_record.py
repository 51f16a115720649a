"""From what ranks measured to the numbers of an epoch, by hand."""

from __future__ import annotations

import json

import pytest

from paceline.observe.clock import PHASES
from paceline.observe.device_clock import DeviceTime
from paceline.observe.epoch_record import RankEpoch, Units, epoch_numbers


def seconds(**phases: float) -> dict[str, float]:
    return {**dict.fromkeys(PHASES, 0.0), **phases}


def test_one_rank_without_lengths() -> None:
    rank = RankEpoch(seconds(data=1.0, compute=3.0), seconds(validation=2.0), 100, work=100, host_bytes=7)
    found = epoch_numbers([rank], Units())
    assert found == {
        "samples": 100,
        "objects_per_s": 25.0,
        "core_wait": [None],
        "work": [100],
        "computing": 0.75,
        "seconds": [rank.seconds],
        "between": [rank.between],
        "rates": {"samples_per_s": 25.0},
        "memory": [{"host_bytes": 7, "device_bytes": None}],
    }


def test_ranks_are_added_up_over_the_time_of_the_longest() -> None:
    ranks = [
        RankEpoch(seconds(compute=8.0, communication=2.0), seconds(), 60, 600.0, 90.0, waits=[0.1, 0.3]),
        RankEpoch(seconds(compute=9.6, communication=0.4), seconds(), 40, 400.0, 110.0, waits=[0.05, 0.05]),
    ]
    found = epoch_numbers(ranks, Units("utterances", "seconds", "tokens", flops=5.0))
    assert found["rates"] == {"utterances_per_s": 10.0, "audio_hours_per_hour": 20.0, "tokens_per_s": 100.0}
    assert found["flops_per_s"] == 5.0 * 200.0 / 10.0
    assert "mfu" not in found, "nobody knows the peak of a CPU"
    # Of 0.5 s at meetings 4 x 0.05 were the exchange; communication was 12 % of the ranks' time.
    assert found["meetings"] == {
        "exchange": pytest.approx(0.12 * 0.4),
        "waiting": pytest.approx(0.12 * 0.6),
        "last": [0.0, 1.0],
        # The first rank waited (0.1 + 0.3 - 2 x 0.05) of the 0.5 s, and has 10 s of its own.
        "waited_for": [0.0, pytest.approx(2.4 * 0.6 / 10.0)],
    }


def test_devices() -> None:
    time = DeviceTime(4, 1, {"data": 0.0, "transfer": 0.0, "compute": 0.06, "communication": 0.01, "optimizer": 0.01})
    rank = RankEpoch(seconds(data=2.0, compute=5.0, optimizer=1.0, logging=2.0), seconds(), 10, device=time)
    rank = RankEpoch(**{**rank.__dict__, "device_bytes": 9, "recompiles": 3, "compile_s": 1.5})
    found = epoch_numbers([rank], Units(flops=1e9), device="NVIDIA H200", peak_flops=4e9)
    split = found["seconds"][0]
    assert split == pytest.approx(seconds(compute=6.0, communication=1.0, optimizer=1.0, logging=2.0))
    assert found["mfu"] == pytest.approx(1e9 * 10 / 10.0 / 4e9)
    assert found["device"] == {
        "name": "NVIDIA H200",
        "sampled_steps": 4,
        "ms": [{"data": 0.0, "transfer": 0.0, "compute": 15.0, "communication": 2.5, "optimizer": 2.5}],
        "caught_up": [0.25],
    }
    assert found["compile"] == {"recompiles": 3, "seconds": 1.5}
    assert found["computing"] == 1.0
    json.dumps(found, allow_nan=False)
