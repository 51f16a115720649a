"""An epoch in pieces is the epoch: sums against those of the whole, and against fractions."""

from __future__ import annotations

import json
import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.observe.clock import PHASES
from paceline.observe.device_clock import DeviceTime
from paceline.observe.epoch_record import RankEpoch, Units, epoch_numbers
from paceline.observe.epoch_sums import WHOLE, EpochSums, Mean, added, whole

numbers = st.floats(-1e30, 1e30)


def seconds(**phases: float) -> dict[str, float]:
    return {**dict.fromkeys(PHASES, 0.0), **phases}


@given(st.lists(st.lists(numbers | st.just(math.nan) | st.just(math.inf), max_size=20), max_size=6))
def test_a_mean_is_the_same_however_it_is_cut(pieces: list[list[float]]) -> None:
    mean = Mean()
    for piece in pieces:
        mean.add(piece)
        mean = Mean(json.loads(json.dumps(mean.parts)), mean.number)  # through a checkpoint
    finite = [value for piece in pieces for value in piece if math.isfinite(value)]
    assert mean.number == len(finite)
    if finite:
        assert mean.value == math.fsum(finite) / len(finite)
        assert sum(map(Fraction, mean.parts)) == sum(map(Fraction, finite)), "not a bit is lost"
    else:
        assert math.isnan(mean.value)


def test_sums_go_through_a_checkpoint() -> None:
    rank = RankEpoch(seconds(compute=3.0), seconds(setup=1.0), 7, 70.0, 12.5, 16.0, None)
    sums = EpochSums(5, (1.5, 1e-20), 4, 1, (rank, rank))
    assert EpochSums.load(json.loads(json.dumps(sums.state()))) == sums
    assert EpochSums.load(None) == EpochSums(), "a checkpoint that is older than sums"


def test_as_many_ranks_add_up_one_by_one() -> None:
    then = [
        RankEpoch(seconds(compute=3.0, data=1.0), seconds(setup=2.0), 10, 100.0, 20.0, 24.0, 0.5),
        RankEpoch(seconds(compute=2.0, communication=2.0), seconds(setup=2.0), 6, 60.0, 12.0, 14.0, 0.25),
    ]
    now = [
        RankEpoch(seconds(compute=6.0, data=2.0), seconds(setup=1.0), 5, 50.0, 10.0, 12.0, 0.125, waits=[0.0, 0.0]),
        RankEpoch(
            seconds(compute=4.0, communication=4.0), seconds(setup=1.0), 3, 30.0, 6.0, 7.0, None, waits=[1.0, 3.0]
        ),
    ]
    found = whole(added(then, now), Units("clips", "frames", "tokens"))
    assert found.keys() == set(WHOLE)
    assert found["samples"] == 24
    assert found["seconds"] == [seconds(compute=9.0, data=3.0), seconds(compute=6.0, communication=6.0)]
    assert found["between"] == [seconds(setup=3.0)] * 2
    assert found["work"] == [36.0, 21.0]
    assert found["core_wait"] == [0.625, None], "of a part it is not known"
    assert found["rates"] == {"clips_per_s": 24 / 12, "frames_per_s": 48 / 12, "tokens_per_s": 240 / 12}


@pytest.mark.parametrize("number", [1, 3])
def test_another_number_of_ranks_lasts_as_long_and_loses_nothing(number: int) -> None:
    then = [
        RankEpoch(seconds(compute=3.0, data=1.0), seconds(setup=2.0), 10, 100.0, 20.0, 24.0, 0.5),
        RankEpoch(seconds(compute=2.0, communication=2.0), seconds(setup=2.0), 7, 60.0, 12.0, 15.0, 0.25),
    ]
    now = [RankEpoch(seconds(compute=8.0), seconds(), 5, 50.0, 10.0, 12.0, 0.0)] * number
    found = whole(added(then, now), Units("clips", "frames", "tokens"))
    assert found["samples"] == 17 + 5 * number
    assert [sum(rank.values()) for rank in found["seconds"]] == [12.0] * number
    assert found["seconds"][0] == seconds(compute=10.5, data=0.5, communication=1.0)
    assert sum(found["work"]) == pytest.approx(39.0 + 12.0 * number)
    assert found["rates"]["frames_per_s"] == pytest.approx((32.0 + 10.0 * number) / 12.0)
    assert found["core_wait"] == [0.375] * number


def test_time_of_a_device_is_divided_before_it_is_added() -> None:
    time = DeviceTime(4, 1, {"data": 0.0, "transfer": 0.0, "compute": 0.06, "communication": 0.01, "optimizer": 0.01})
    rank = RankEpoch(seconds(data=2.0, compute=5.0, optimizer=1.0, logging=2.0), seconds(), 10, device=time)
    divided = epoch_numbers([rank], Units())["seconds"][0]
    kept = EpochSums.load(json.loads(json.dumps(EpochSums(1, ranks=tuple(added([], [rank]))).state()))).ranks
    found = whole(added(kept, [rank]), Units())
    assert found["seconds"][0] == pytest.approx({phase: 2 * value for phase, value in divided.items()})
