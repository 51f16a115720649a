"""Statistics that are summed in every step: those of one process that runs the grains one after the other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from paceline.core.sum_tree import fold
from paceline.parallel.batch_norm.per_step import StepStatistics
from paceline.world.discover.environment import World
from paceline.world.link import Link

GRAINS = 5


def alone() -> Link:
    return Link(World(0, 0, 1, 1, 0, 1, "test", None), torch.device("cpu"), 1, ("here",))


def make() -> nn.Sequential:
    torch.manual_seed(3)
    layers = [nn.BatchNorm1d(4, dtype=torch.float64), nn.BatchNorm1d(4, momentum=0.3, dtype=torch.float64)]
    return nn.Sequential(*layers, nn.BatchNorm1d(4, momentum=None, dtype=torch.float64))


def grain(step: int, number: int) -> torch.Tensor:
    random = torch.Generator().manual_seed(100 * step + number)
    return 3 * torch.randn(6, 4, dtype=torch.float64, generator=random) + 1


def run(statistics: StepStatistics, net: nn.Module, step: int, num_grains: int) -> None:
    statistics.begin_step(num_grains)
    contributions: list[Any] = []
    for number in range(num_grains):
        statistics.before_grain(number)
        net(grain(step, number))
        contributions.append(statistics.after_grain())
    statistics.end_step(num_grains)
    statistics.finish_step(None if contributions[0] is None else fold(contributions, num_grains, 0)[0])


def check(net: nn.Module, other: nn.Module) -> None:
    for (name, ours), value in zip(net.state_dict().items(), other.state_dict().values(), strict=True):
        torch.testing.assert_close(ours, value, rtol=1e-13, atol=1e-13, msg=name)


@pytest.mark.parametrize("num_grains", [1, 2, GRAINS])
def test_as_one_grain_after_the_other(num_grains: int) -> None:
    net, plain = make(), make()
    statistics = StepStatistics(net, alone(), torch.float64)
    for step in range(4):
        if step == 2:  # frozen between two steps, and trained again
            net[0].eval(), plain[0].eval()
        if step == 3:
            net[0].train(), plain[0].train()
        run(statistics, net, step, num_grains)
        for number in range(num_grains):
            plain(grain(step, number))
        check(net, plain)


def test_a_loss_that_evaluates_sees_the_statistics_before_the_step() -> None:
    net, plain = make(), make()
    statistics = StepStatistics(net, alone(), torch.float64)
    run(statistics, net, 0, GRAINS)
    for number in range(GRAINS):
        plain(grain(0, number))
    statistics.begin_step(GRAINS)
    for number in range(GRAINS):
        statistics.before_grain(number)
        net(grain(1, number))
        statistics.after_grain()
        torch.testing.assert_close(net.eval()(grain(2, 0)), plain.eval()(grain(2, 0)), rtol=1e-12, atol=1e-12)
        net.train()
        plain.train()


def test_a_step_that_was_left_is_not_counted() -> None:
    """An error in mid-step: the step is run again, as if it had not begun."""
    net, whole = make(), make()
    statistics, others = (StepStatistics(each, alone(), torch.float64) for each in (net, whole))
    statistics.begin_step(GRAINS)
    statistics.before_grain(0)
    net(grain(0, 0))
    for step in (0, 1):
        run(statistics, net, step, GRAINS)
        run(others, whole, step, GRAINS)
    for (name, ours), value in zip(net.state_dict().items(), whole.state_dict().values(), strict=True):
        assert torch.equal(ours, value), name
