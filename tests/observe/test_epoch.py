"""From what ranks measured to the record of an epoch, by hand; an epoch in pieces is the epoch."""

from __future__ import annotations

import json
import math
import random
from dataclasses import dataclass
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.observe.clock import PHASES
from paceline.observe.device_clock import DeviceTime
from paceline.observe.epoch import (
    TOTAL,
    EpochSums,
    Mean,
    RankEpoch,
    core_shares,
    epoch_record,
    join_launches,
    measured,
    wait_shares,
    whole_record,
)
from paceline.observe.records import Compilation, CoreShare, DeviceSteps, EpochRecord, Meetings, Memory, Number
from paceline.observe.throughput import RateWords, Units

numbers = st.floats(-1e30, 1e30)


def seconds(**phases: float) -> dict[str, float]:
    return {**dict.fromkeys(PHASES, 0.0), **phases}


def test_one_rank_without_lengths() -> None:
    rank = RankEpoch(seconds(data=1.0, compute=3.0), seconds(validation=2.0), 100, work=100, host_bytes=7)
    found = epoch_record([rank], Units())
    assert found == EpochRecord(
        samples=100,
        objects_per_s=25.0,
        core_wait=[None],
        work=[100],
        computing=0.75,
        seconds=[rank.seconds],
        between=[rank.between],
        rates={"samples_per_s": 25.0},
        memory=[Memory(7, None)],
    )


def test_ranks_are_added_up_over_the_time_of_the_longest() -> None:
    ranks = [
        RankEpoch(seconds(compute=8.0, communication=2.0), seconds(), 60, 600.0, 90.0, waits=[0.1, 0.3]),
        RankEpoch(seconds(compute=9.6, communication=0.4), seconds(), 40, 400.0, 110.0, waits=[0.05, 0.05]),
    ]
    found = epoch_record(
        ranks, Units("utterances", "seconds", "tokens", 5.0, {"seconds": RateWords("hours_per_hour", "hours")})
    )
    assert found.rates == {"utterances_per_s": 10.0, "hours_per_hour": 20.0, "tokens_per_s": 100.0}
    assert found.flops_per_s == 5.0 * 200.0 / 10.0
    assert found.mfu is None, "nobody knows the peak of a CPU"
    # Of 0.5 s at meetings 4 x 0.05 were the exchange; communication was 12 % of the ranks' time.
    assert found.meetings == Meetings(
        exchange=pytest.approx(0.12 * 0.4),
        waiting=pytest.approx(0.12 * 0.6),
        last=[0.0, 1.0],
        # The first rank waited (0.1 + 0.3 - 2 x 0.05) of the 0.5 s, and has 10 s of its own.
        waited_for=[0.0, pytest.approx(2.4 * 0.6 / 10.0)],
    )


def test_devices() -> None:
    time = DeviceTime(4, 1, {"data": 0.0, "transfer": 0.0, "compute": 0.06, "communication": 0.01, "optimizer": 0.01})
    rank = RankEpoch(seconds(data=2.0, compute=5.0, optimizer=1.0, logging=2.0), seconds(), 10, device=time)
    rank = RankEpoch(**{**rank.__dict__, "device_bytes": 9, "recompiles": 3, "compile_s": 1.5})
    found = epoch_record([rank], Units(flops=1e9), device="NVIDIA H200", peak_flops=4e9)
    split = found.seconds[0]
    assert split == pytest.approx(seconds(compute=6.0, communication=1.0, optimizer=1.0, logging=2.0))
    assert found.mfu == pytest.approx(1e9 * 10 / 10.0 / 4e9)
    assert found.device == DeviceSteps(
        name="NVIDIA H200",
        sampled_steps=4,
        ms=[{"data": 0.0, "transfer": 0.0, "compute": 15.0, "communication": 2.5, "optimizer": 2.5}],
        caught_up=[0.25],
    )
    assert found.compile == Compilation(recompiles=3, seconds=1.5)
    assert found.computing == 1.0
    json.dumps(found.to_json(), allow_nan=False)


# -- launches ----------------------------------------------------------------------------------------------------------


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
    found = whole_record(join_launches(then, now), Units("clips", "frames", "tokens"))
    assert found.samples == 24
    assert found.seconds == [seconds(compute=9.0, data=3.0), seconds(compute=6.0, communication=6.0)]
    assert found.between == [seconds(setup=3.0)] * 2
    assert found.work == [36.0, 21.0]
    assert found.core_wait == [0.625, None], "of a part it is not known"
    assert found.rates == {"clips_per_s": 24 / 12, "frames_per_s": 48 / 12, "tokens_per_s": 240 / 12}


@pytest.mark.parametrize("number", [1, 3])
def test_another_number_of_ranks_lasts_as_long_and_loses_nothing(number: int) -> None:
    then = [
        RankEpoch(seconds(compute=3.0, data=1.0), seconds(setup=2.0), 10, 100.0, 20.0, 24.0, 0.5),
        RankEpoch(seconds(compute=2.0, communication=2.0), seconds(setup=2.0), 7, 60.0, 12.0, 15.0, 0.25),
    ]
    now = [RankEpoch(seconds(compute=8.0), seconds(), 5, 50.0, 10.0, 12.0, 0.0)] * number
    found = whole_record(join_launches(then, now), Units("clips", "frames", "tokens"))
    assert found.samples == 17 + 5 * number
    assert [sum(rank.values()) for rank in found.seconds] == [12.0] * number
    assert found.seconds[0] == seconds(compute=10.5, data=0.5, communication=1.0)
    assert sum(found.work) == pytest.approx(39.0 + 12.0 * number)
    assert found.rates["frames_per_s"] == pytest.approx((32.0 + 10.0 * number) / 12.0)
    assert found.core_wait == [0.375] * number


def test_time_of_a_device_is_divided_before_it_is_added() -> None:
    time = DeviceTime(4, 1, {"data": 0.0, "transfer": 0.0, "compute": 0.06, "communication": 0.01, "optimizer": 0.01})
    rank = RankEpoch(seconds(data=2.0, compute=5.0, optimizer=1.0, logging=2.0), seconds(), 10, device=time)
    divided = epoch_record([rank], Units()).seconds[0]
    kept = EpochSums.load(json.loads(json.dumps(EpochSums(1, ranks=tuple(join_launches([], [rank]))).state()))).ranks
    found = whole_record(join_launches(kept, [rank]), Units())
    assert found.seconds[0] == pytest.approx({phase: 2 * value for phase, value in divided.items()})


@dataclass(frozen=True)
class Dropping(RankEpoch):
    dropped: int = measured(TOTAL, 0, number=Number("Dropped", unit="frames"))


def test_a_number_that_is_declared_is_added_over_launches_and_ranks_and_is_in_the_record() -> None:
    then = [Dropping(seconds(compute=1.0), seconds(), 1, dropped=number) for number in (1, 2)]
    now = [Dropping(seconds(compute=1.0), seconds(), 1, dropped=number) for number in (10, 20, 30)]
    launch, whole = epoch_record(now, Units()), whole_record(join_launches(then, now), Units())
    assert launch.to_json()["dropped"] == 60
    assert launch.with_whole(whole).to_json()["dropped"] == 63
    assert ("dropped", 60) in launch.numbers()


# -- meetings ----------------------------------------------------------------------------------------------------------


def waits(arrivals: list[list[float]], exchange_s: float) -> list[list[float]]:
    """By rank, from when each rank came to each meeting: all leave `exchange_s` after the last has come."""
    return [[max(each) + exchange_s - each[rank] for each in arrivals] for rank in range(len(arrivals[0]))]


def test_the_wait_of_the_last_is_the_exchange() -> None:
    arrivals = [[0.0, 0.3], [0.0, 0.5], [0.1, 0.0], [0.0, 0.1]]
    found = wait_shares(waits(arrivals, 0.05))
    assert found is not None
    idle = 0.3 + 0.5 + 0.1 + 0.1
    moving = 4 * 2 * 0.05
    assert found.exchange == pytest.approx(moving / (moving + idle))
    assert found.last == (0.25, 0.75)
    assert found.waited_for == pytest.approx((0.1 / (moving + idle), 0.9 / (moving + idle)))


@given(st.integers(2, 6), st.integers(1, 40), st.integers(0, 10**6))
def test_shares_of_any_arrivals(size: int, number: int, seed: int) -> None:
    draw = random.Random(seed)
    arrivals = [[draw.random() for _ in range(size)] for _ in range(number)]
    found = wait_shares(waits(arrivals, 0.1))
    assert found is not None
    assert sum(found.last) == pytest.approx(1.0)
    idle = sum(max(each) - came for each in arrivals for came in each)
    moving = 0.1 * size * number
    assert sum(found.waited_for) == pytest.approx(idle / (moving + idle))
    assert found.exchange == pytest.approx(moving / (moving + idle))


def test_nobody_to_meet() -> None:
    assert wait_shares([[0.1, 0.2]]) is None
    assert wait_shares([[], []]) is None


def test_who_shares_cores() -> None:
    """As torchrun, mpirun on two sockets, and a launcher that overlaps ranks leave them; hosts are apart."""
    hosts = ["a", "a", "b", "b"]
    assert core_shares(hosts, [range(8)] * 4) == [CoreShare(2, 8)] * 4
    assert core_shares(hosts, [[0], [1], [0], [0]]) == [CoreShare(1, 1)] * 2 + [CoreShare(2, 1)] * 2
    assert core_shares(["a"] * 3, [[0, 1], [2, 3], [1, 2]]) == [CoreShare(3, 4)] * 3, "the third joins the others"
    assert core_shares(["a"], [[]]) == [CoreShare(1, 1)]
