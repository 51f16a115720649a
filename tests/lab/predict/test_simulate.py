"""The simulator against closed forms: queues, overlap, largest of many, and failures."""

from __future__ import annotations

import math
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest

from paceline.lab.predict.simulate import (
    Averages,
    Faults,
    Gradients,
    Noise,
    Shards,
    Simulated,
    Steps,
    disturb,
    simulate,
)

QUIET = Noise(np.ones(1), np.ones(1))


def steps(ranks: int, compute_s: float = 1.0, last_s: float = 0.5, data_s: float = 0.0, rest_s: float = 0.0) -> Steps:
    shape = (1, ranks)
    return Steps(np.full(shape, compute_s), np.full(shape, last_s), np.full(shape, data_s), rest_s)


def parts(simulated: Simulated) -> float:
    return sum(
        (
            simulated.compute_s,
            simulated.communication_s,
            simulated.waiting_s,
            simulated.data_s,
            simulated.rest_s,
        )
    )


def test_one_rank_computes() -> None:
    simulated = simulate(steps(1, data_s=0.25, rest_s=0.5), QUIET, Gradients((), ()), 10)
    assert simulated.step_s == pytest.approx(1.75)
    assert parts(simulated) == pytest.approx(1.75)


@pytest.mark.parametrize(
    ("seconds", "ends"),
    [
        ((0.1, 0.1), 1.1),  # the first is done before backward is
        ((0.7, 0.1), 0.5 + 0.25 + 0.7 + 0.1),  # the link is never free again
        ((0.0, 0.3), 1.3),
    ],
)
def test_buckets_go_through_the_link_while_backward_runs(seconds: tuple[float, float], ends: float) -> None:
    """The first bucket is complete halfway through the last backward, which takes 0.5 of 1 second."""
    simulated = simulate(steps(4), QUIET, Gradients(seconds, (0.5, 1.0)), 5)
    assert simulated.step_s == pytest.approx(ends)
    assert simulated.communication_s == pytest.approx(ends - 1.0)
    assert simulated.waiting_s == pytest.approx(0.0)


def test_computing_beside_the_link_is_slowed_down_as_long_as_it_is_busy() -> None:
    simulated = simulate(steps(2), QUIET, Gradients((0.2, 0.1), (0.5, 1.0), slow_down=1.5), 3)
    assert simulated.compute_s == pytest.approx(1.0 + 0.5 * 0.2)


@pytest.mark.parametrize("ranks", [4, 64, 1024])
def test_the_slowest_of_many_is_as_late_as_statistics_say(ranks: int) -> None:
    """Means of the largest of n normal numbers: 1.029, 2.344 and 3.251 standard deviations (order statistics)."""
    expected = {4: 1.029, 64: 2.344, 1024: 3.251}[ranks]
    ratios = np.random.default_rng(3).normal(1.0, 0.02, 400_000)
    simulated = simulate(steps(ranks), Noise(ratios, np.ones(1)), Gradients((0.0,), (1.0,)), 2000)
    assert simulated.step_s == pytest.approx(1 + 0.02 * expected, rel=2e-3)
    assert simulated.waiting_s == pytest.approx(0.02 * expected, rel=0.05)
    assert simulated.waiting_s < 0.02 * math.sqrt(2 * math.log(ranks))


def test_a_slow_machine_sets_the_pace() -> None:
    noise = Noise(np.ones(1), np.array([1.0, 1.3]))
    simulated = simulate(steps(64), noise, Gradients((0.0,), (1.0,)), 10)
    assert simulated.step_s == pytest.approx(1.3)


def test_uneven_work_is_waited_for() -> None:
    work = Steps(np.array([[2.0, 1.0, 1.0]]), np.zeros((1, 3)), np.zeros((1, 3)), 0.0)
    simulated = simulate(work, QUIET, Gradients((0.0,), (1.0,)), 4)
    assert simulated.step_s == pytest.approx(2.0)
    assert simulated.waiting_s == pytest.approx(2 / 3)


def test_shards_add_what_is_exposed() -> None:
    assert simulate(steps(4), QUIET, Shards(0.5), 4).step_s == pytest.approx(1.5)


def test_averages_are_waited_for_once_in_an_interval() -> None:
    simulated = simulate(steps(4), QUIET, Averages(10, 0, 0.6, 0.2, 0.2), 100)
    assert simulated.step_s == pytest.approx(1.1)
    assert simulated.communication_s == pytest.approx(0.1)
    assert parts(simulated) == pytest.approx(simulated.step_s)


@pytest.mark.parametrize(("first_s", "blocked"), [(3.0, 0.0), (7.0, 2.0)])
def test_overlap_hides_an_average_that_takes_no_longer(first_s: float, blocked: float) -> None:
    """Five steps of a second go on; what is longer is waited for, in each interval but the first."""
    simulated = simulate(steps(4), QUIET, Averages(10, 5, first_s, 0.0, 0.0), 1000)
    assert simulated.step_s == pytest.approx(1 + blocked / 10 * 99 / 100)


def test_a_second_hop_begins_between_two_steps() -> None:
    """The first hop is there after 1.5 steps, is seen after 2, and the second takes 4: one more than five steps."""
    simulated = simulate(steps(4), QUIET, Averages(10, 5, 1.5, 4.0, 0.0), 1000)
    assert simulated.step_s == pytest.approx(1 + 1.0 / 10 * 99 / 100)


def test_ranks_that_step_apart_wait_less_for_noise() -> None:
    noise = Noise(np.array([0.9, 1.1]), np.ones(1))
    together = simulate(steps(64), noise, Gradients((0.0,), (1.0,)), 400).step_s
    apart = simulate(steps(64), noise, Averages(100, 0, 0.0, 0.0, 0.0), 400).step_s
    assert together == pytest.approx(1.1)
    assert apart < 1.04


def test_one_seed_gives_one_answer() -> None:
    noise = Noise(np.array([0.9, 1.0, 1.3]), np.array([1.0, 1.1]))
    meeting = Gradients((0.1, 0.2), (0.5, 1.0))
    first, again, other = (simulate(steps(16), noise, meeting, 200, seed) for seed in (5, 5, 6))
    np.testing.assert_array_equal(first.seconds, again.seconds)
    assert not np.array_equal(first.seconds, other.seconds)


FAULTS = Faults(1 / 10_000, 60.0, 5.0, 300.0)


def test_goodput_is_that_of_the_formula() -> None:
    """Daly's expected time of a piece of work with a checkpoint: M exp(R/M) (exp((tau + C)/M) - 1)."""
    simulated = Simulated(np.ones(200_000), np.ones(200_000), 1.0, 0, 0, 0, 0)
    mean_s = 10_000.0
    expected = 300.0 / (mean_s * math.exp(60 / mean_s) * math.expm1(305 / mean_s))
    found = np.mean([disturb(simulated, FAULTS, seed).goodput for seed in range(40)])
    assert found == pytest.approx(expected, rel=4e-3)


def test_survivors_lose_recoveries_and_checkpoints_only() -> None:
    simulated = Simulated(np.ones(200_000), np.ones(200_000), 1.0, 0, 0, 0, 0)
    disturbed = disturb(simulated, replace(FAULTS, survives=True), 1)
    lost = disturbed.total_s - 200_000 - disturbed.num_saves * 5
    assert lost == pytest.approx(60 * disturbed.num_failures, abs=disturbed.num_failures)


def test_without_failures_only_checkpoints_cost() -> None:
    simulated = Simulated(np.ones(1000), np.ones(1000), 1.0, 0, 0, 0, 0)
    disturbed = disturb(simulated, replace(FAULTS, per_s=0.0))
    assert (disturbed.total_s, disturbed.num_failures, disturbed.lost_s) == (1015.0, 0, 0.0)


def test_a_run_that_fails_all_the_time_never_ends() -> None:
    simulated = Simulated(np.ones(1000), np.ones(1000), 1.0, 0, 0, 0, 0)
    assert disturb(simulated, replace(FAULTS, per_s=10.0)).goodput == 0


def test_a_thousand_ranks_fit_into_little_memory() -> None:
    noise = Noise(np.random.default_rng(1).normal(1, 0.02, 1000), np.ones(1))
    tracemalloc.start()
    simulate(steps(1024), noise, Gradients((0.01,) * 8, tuple(np.linspace(0.1, 1, 8))), 500)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 100e6
