"""Batch-norm statistics on several ranks against one process that runs all grains in order."""

from __future__ import annotations

import torch
from torch import nn

from paceline.parallel.batch_norm.shares import RunningStatistics
from paceline.world.link import Link
from tests.ranks import ranks

GRAINS = 6


def make() -> nn.Module:
    norms = [nn.BatchNorm1d(3, momentum=momentum) for momentum in (0.3, 0.1, 0.1, None)]
    net = nn.Sequential(*norms).double()
    net[2].eval()  # frozen: its statistics are read, never written
    net[2].running_mean += 1.5  # type: ignore[operator]
    return net


def grain(step: int, number: int) -> torch.Tensor:
    return torch.randn(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(100 * step + number))


def run(net: nn.Module, x: torch.Tensor, step: int) -> None:
    """From the third step on the first layer is called twice per grain, as by a method that replays."""
    net(x)
    if step >= 3:
        net[0](2 * x + 1)  # type: ignore[operator]


@ranks(1, 2, 3, 4)
def test_equal_to_one_process(link: Link) -> None:
    net, alone = make(), make()
    statistics = RunningStatistics(net, link)
    statistics.share()
    rank, size = link.world.rank, link.world.size
    for step in range(6):
        num_grains = 2 if step == 2 else GRAINS  # fewer than some numbers of ranks
        statistics.begin_step(GRAINS)
        for number in range(rank, num_grains, size):
            statistics.before_grain(number)
            run(net, grain(step, number), step)
            statistics.after_grain()
        statistics.end_step(num_grains)
        for number in range(num_grains):
            run(alone, grain(step, number), step)
        if step in (1, 4):  # somebody reads in between
            check(net, alone, statistics)
            statistics.share()
    check(net, alone, statistics)


def check(net: nn.Module, alone: nn.Module, statistics: RunningStatistics) -> None:
    statistics.total()
    for (name, mine), other in zip(net.state_dict().items(), alone.state_dict().values(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-13, atol=1e-13, msg=name)


@ranks(2)
def test_means_over_all_calls_before_the_first_call(link: Link) -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3, momentum=None))
    statistics = RunningStatistics(net, link)
    statistics.share()
    statistics.total()
    assert net[1].running_var.tolist() == [1.0, 1.0, 1.0]  # type: ignore[union-attr, operator]
    assert int(net[1].num_batches_tracked) == 0  # type: ignore[arg-type]
