"""Seconds become steps."""

from __future__ import annotations

import pytest
import torch

from paceline.config.settings import ReduceSettings
from paceline.data.grain import Batch
from paceline.parallel.averaged.strategy import GROWTH, Averaged, first_interval, next_interval
from paceline.parallel.step import Step
from paceline.world.link import Link
from tests.ranks import ranks


def test_steps_stay_steps() -> None:
    assert first_interval(50) == 50
    assert next_interval(50, None, 7, [1.0, 100.0]) == 50


@pytest.mark.parametrize(
    ("seconds", "steps", "expected"),
    [
        ([1.0, 1.0], 10, 50),  # 0.1 s a step, 5 s
        ([1.0, 2.0], 10, 25),  # the slowest rank decides
        ([20.0, 1.0], 2, 1),  # a step takes longer than the interval
        ([0.001, 0.001], 4, 4 * GROWTH),  # no more than so many times the last
        ([0.0, 0.0], 1, GROWTH),
    ],
)
def test_as_many_as_the_slowest_rank_does(seconds: list[float], steps: int, expected: int) -> None:
    assert first_interval(None) == 1
    assert next_interval(None, 5.0, steps, seconds) == expected


@ranks(2)
def test_the_step_that_completes_an_average_carries_the_numbers_of_all_ranks(link: Link) -> None:
    weight = torch.nn.Parameter(torch.full((3,), float(link.world.rank)))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    settings = ReduceSettings(reduce="param", sync_step=2)
    strategy = Averaged([weight], link, settings, optimizer=optimizer, buffers={})
    records = []
    for number in range(2):
        strategy.begin(Batch(0, number, 2, 8, 8.0, []))
        step = Step(number, torch.tensor(1.0 + link.world.rank + number), 4, True, link.is_first)
        records.append(strategy.finish(step))
    first, second = records
    assert first.is_local
    assert first.average is None
    assert float(first.loss_sum) == 1.0 + link.world.rank  # of this rank, and it stays so
    assert not second.is_local
    assert second.average is not None
    assert [(each.number, float(each.loss_sum), each.count) for each in second.average.steps] == [(0, 3, 8), (1, 5, 8)]
    assert (float(second.loss_sum), second.count) == (5, 8)
    assert (float(second.ranks_with_data), float(second.ranks_to_stop)) == (2, 1)
    assert weight.tolist() == [0.5] * 3
    assert strategy.sync() is None
    strategy.detach()


@ranks(2)
def test_sync_returns_the_average_that_it_took(link: Link) -> None:
    weight = torch.nn.Parameter(torch.full((3,), float(link.world.rank)))
    settings = ReduceSettings(reduce="param", sync_step=5)
    strategy = Averaged([weight], link, settings, optimizer=torch.optim.SGD([weight], lr=0.1), buffers={})
    strategy.begin(Batch(0, 0, 2, 8, 8.0, []))
    assert strategy.finish(Step(0, torch.tensor(1.0), 4, True, False)).average is None
    assert not strategy.is_together
    average = strategy.sync()
    assert average is not None
    assert [(each.number, each.loss) for each in average.steps] == [(0, 0.25)]
    assert strategy.is_together
    strategy.detach()
