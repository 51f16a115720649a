"""The learning-rate range test: losses as a raw PyTorch loop has them, divergence where theory says."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from paceline.config.settings import TrainConfig
from paceline.data.grain import Grain
from paceline.lab.tune.plot import plot
from paceline.lab.tune.range_test import Point, Suggestion, diverged_at, rate_at, smooth, suggest, wider
from paceline.lab.tune.rate_sweep import is_cut_short, sweep
from paceline.train.task import Task
from paceline.world.link import Link
from tests.ranks import run_ranks
from tests.train.small import BATCH, SmallTask, alone, fresh_net, raw_steps, sgd


def config(**settings: Any) -> TrainConfig:
    plain = {"global_batch": BATCH, "order": "none", "optimizer": "sgd", "lr": 0.3, "level": 0, "workers": 0}
    return TrainConfig(**{**plain, "epochs": 1, "schedule": "cosine", "warmup_steps": 3, **settings})


def test_the_losses_are_those_of_a_plain_loop_under_the_same_rates(tmp_path: Path) -> None:
    steps = 30
    points = sweep(SmallTask(), config(out=tmp_path / "run"), alone(), first=1e-4, last=0.02, steps=steps)
    net = fresh_net()
    raw = list(raw_steps(net, sgd(net), steps, rate=lambda step: rate_at(step, steps, 1e-4, 0.02)))
    assert [point.loss for point in points] == raw
    assert [point.rate for point in points] == [rate_at(step, steps, 1e-4, 0.02) for step in range(steps)]
    assert (points[0].rate, points[-1].rate) == pytest.approx((1e-4, 0.02), rel=1e-12)
    assert list(tmp_path.iterdir()) == []  # nothing is written, whatever folder is named


CURVATURE = 4.0


class Parabola(Task):
    """loss = curvature / 2 * w^2: plain SGD converges below 2 / curvature and diverges above, whatever the data."""

    def model(self) -> nn.Module:
        model = nn.Linear(1, 1, bias=False)
        nn.init.constant_(model.weight, 1.0)
        return model

    def train_data(self) -> TensorDataset:
        return TensorDataset(torch.ones(64, 1))

    def loss(self, model: nn.Module, grain: Grain) -> Any:
        (x,) = grain.data
        return CURVATURE / 2 * model(x).square().sum(), len(grain)


def found(link: Link) -> list[Point]:
    plain = config(momentum=0.0, global_batch=8, grains=2)
    return sweep(Parabola(), plain, link, first=1e-3, last=100.0, steps=100)


@pytest.mark.parametrize("size", [1, 2])
def test_divergence_is_where_theory_has_it_and_ends_the_sweep(size: int) -> None:
    ranks = run_ranks(size, found)
    points = ranks[0]
    assert [len(others) for others in ranks[1:]] == [0] * (size - 1)  # the first rank has them
    assert len(points) < 100  # it was stopped
    said = suggest(points)
    limit = 2 / CURVATURE
    # By then the weight is so small that it takes some steps above the limit to be seen.
    assert said.diverges is not None
    assert limit < said.diverges < 12 * limit
    assert said.steepest is not None
    assert said.steepest < limit
    assert said.rate == min(said.steepest, said.diverges / 10)


def test_the_average_has_no_pull_to_its_start() -> None:
    assert smooth([3.0] * 5) == pytest.approx([3.0] * 5)
    assert smooth([1.0, 2.0]) == pytest.approx([1.0, (0.09 * 1 + 0.1 * 2) / 0.19])
    assert smooth([1.0, math.inf, math.nan]) == pytest.approx([1.0, 1.0, 1.0])


def curve(*losses: float) -> list[Point]:
    return [Point(10 ** (-5 + number / 20), loss) for number, loss in enumerate(losses)]


def test_the_steepest_place_of_a_known_curve() -> None:
    """A loss that falls as a logistic function of log(rate): steepest at its middle, seen later through smoothing."""
    losses = [2 - 1 / (1 + math.exp(-(number - 50) / 4)) for number in range(100)]
    said = suggest(curve(*losses))
    assert said.diverges is None
    assert said.steepest is not None
    place = round(20 * (math.log10(said.steepest) + 5))
    assert 50 <= place <= 50 + 10  # the average looks back 1 / (1 - 0.9) steps
    assert said.rate == said.steepest


def test_divergence_is_told_from_noise() -> None:
    falling = [2.3 - 0.02 * number for number in range(100)]
    assert diverged_at(falling) is None
    assert diverged_at([*falling, *[0.8] * 50]) is None  # twice the best and more, but far below the start
    assert diverged_at([*falling, *[1e3] * 5]) == 100
    assert diverged_at([*falling[:30], math.nan, 1.0]) == 30
    assert diverged_at([2.3, 2.3, math.inf]) == 2


def test_a_loss_that_never_falls_gets_no_suggestion() -> None:
    said = suggest(curve(*[2.0 + 0.01 * number for number in range(60)]))
    assert (said.steepest, said.rate, said.doubt) == (None, None, "high")
    assert Suggestion(1e-2, 0.05).rate == pytest.approx(0.005)


def noisy(level: float, deviation: float, num: int, seed: int) -> list[float]:
    chance = random.Random(seed)
    return [chance.gauss(level, deviation) for _ in range(num)]


def test_noise_between_batches_is_no_fall() -> None:
    """Rates so small that nothing is learned: whatever the noise, its steepest place is no answer."""
    doubts = [suggest(curve(*noisy(2.3, 0.2, 200, seed))).doubt for seed in range(200)]
    assert doubts.count("flat") >= 196


def falling(middle: int, num: int) -> list[float]:
    """2.3 to 0.3 around a step."""
    return [2.3 - 2 / (1 + math.exp(-(number - middle) / 4)) for number in range(num)]


def test_what_a_sweep_must_have_seen() -> None:
    """The rule is the smaller of two rates: it is known where the other cannot be smaller."""
    # 20 steps are a factor of ten; the average looks back ten steps.
    assert suggest(curve(*falling(50, 100))).doubt is None  # diverges beyond step 99, so a tenth is beyond step 79
    assert suggest(curve(*falling(50, 70))).doubt == "open"
    diverging = [*falling(50, 70), *[40.0] * 10]
    said = suggest(curve(*diverging))
    assert said.tenth is not None
    assert said.steepest is not None
    assert said.rate == said.tenth < said.steepest
    # Untrained weights have 2.3; the first of these rates throws them far away, and they never come back.
    thrown = [2.3, 60.0, 300.0, *[100 / (1 + 0.2 * number) for number in range(60)]]
    assert suggest(curve(*thrown)).doubt == "high"
    assert suggest(curve(2.3, 9.0, math.nan)).doubt == "high"
    assert suggest(curve(*[2.3] * 60, *[50.0] * 5)).doubt == "hasty"
    assert suggest(curve(*falling(-5, 80))).doubt == "early"
    # After the lowest, a fall is one from a height that it has just been thrown to.
    bounced = [*falling(50, 90), *[0.3 + 0.2 * number for number in range(8)], *[0.5] * 12]
    said = suggest(curve(*bounced))
    assert said.steepest == suggest(curve(*bounced[:90])).steepest
    assert suggest(curve(*falling(5, 8))).doubt == "short"
    for unknown in (thrown, falling(50, 70), falling(-5, 80)):
        assert suggest(curve(*unknown)).rate is None


def test_an_interrupted_sweep_suggests_only_what_it_has_seen() -> None:
    fall_and_rise = [*falling(50, 90), *[0.3 + 0.05 * number for number in range(20)]]
    whole = suggest(curve(*fall_and_rise))
    assert whole.rate is not None
    for num in (0, 1, 5, 30, 60, 90):
        assert suggest(curve(*fall_and_rise[:num]), is_interrupted=True).doubt == "interrupted"
    assert suggest(curve(*fall_and_rise), is_interrupted=True) == whole
    assert is_cut_short(curve(*fall_and_rise), 200)
    assert not is_cut_short(curve(*fall_and_rise), 110)
    assert not is_cut_short(curve(2.3, 2.3, math.nan), 200)  # it diverged: that is its end


def test_the_next_sweep_goes_where_the_answer_may_be() -> None:
    assert wider("flat", 1e-9, 1e-8, 1e-6, 10.0) == (1e-8, 10.0)
    assert wider("high", 5.0, 50.0, 1e-6, 10.0) == (1e-6, 50.0)
    assert wider("early", 1e-7, 1.0, 1e-6, 10.0) == (pytest.approx(1e-9), 1.0)
    assert wider("open", 1e-5, 20.0, 1e-6, 10.0) == (1e-5, 2000.0)


def test_the_plot_has_its_lowest_point_where_the_curve_has() -> None:
    losses = [abs(number - 60) / 10 + 1.0 for number in range(100)]
    lines = plot(curve(*losses), {"^": 10 ** (-5 + 50 / 20)})
    assert all(len(line) <= 80 for line in lines)
    drawn = [line[11:] for line in lines[:12]]
    assert 0.5 < drawn[-1].index("o") / 63 < 0.8
    assert drawn[0].startswith("o")
    assert lines[13][11:].index("^") == round(50 / 99 * 63)
    assert plot([], {}) == []
