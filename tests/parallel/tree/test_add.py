"""Buckets that are added in the order of the tree against one process that adds all grains in this order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from paceline.core.sum_tree import even_starts
from paceline.data.grain import Batch
from paceline.parallel.alone import AloneInTree
from paceline.parallel.step import GrainNumbers, RankNumbers, Sums
from paceline.parallel.strategy import Strategy
from paceline.parallel.summed import Summed
from paceline.parallel.tree.add import TreeAdd
from paceline.parallel.tree.all_reduce import TreeAllReduce
from paceline.world.link import Link
from tests.ranks import run_ranks

NUM_STATISTICS = 3


def network(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(7, 7) for _ in range(5))).to(dtype)


def run_step(strategy: Strategy, model: nn.Module, batch: Batch, first: int) -> Sums:
    """Run the grains of a batch, the first of which has this number."""
    strategy.begin(batch)
    numbers = []
    for index in range(len(batch.grains)):
        random = torch.Generator().manual_seed(first + index)
        x = torch.randn(3, 7, generator=random).to(next(model.parameters()).dtype)
        loss = model(x).square().sum()
        if index + 1 == len(batch.grains):
            strategy.last_backward()
        loss.backward()
        strategy.end_grain()
        numbers.append(GrainNumbers(loss.detach(), 3, torch.randn(NUM_STATISTICS, generator=random)))
    return strategy.reduce(RankNumbers(numbers))


def summed(link: Link, num_grains: int, dtype: torch.dtype, bucket_bytes: int) -> None:
    grains: list[Any] = [None] * num_grains
    model, alone = network(dtype), network(dtype)
    adder = TreeAdd(TreeAllReduce(link.group, link.device), torch.float32, NUM_STATISTICS)
    strategy = Summed(list(model.parameters()), link, adder, bucket_bytes=bucket_bytes)
    reference = AloneInTree(list(alone.parameters()))
    starts = even_starts(num_grains, link.world.size)
    first, end = starts[link.world.rank : link.world.rank + 2]
    for _ in range(2):
        batch = Batch(0, 0, num_grains, num_grains, 1.0, grains[first:end], starts=starts)
        sums = run_step(strategy, model, batch, first)
        expected = run_step(reference, alone, Batch(0, 0, num_grains, num_grains, 1.0, grains), 0)
        assert (sums.tally.loss_sum, sums.tally.count) == expected.tally[:2]
        assert (sums.tally.ranks_with_data, sums.tally.ranks_to_stop) == (link.world.size, 0)
        assert sums.statistics is not None
        assert expected.statistics is not None
        assert torch.equal(sums.statistics, expected.statistics)
        for parameter, other in zip(model.parameters(), alone.parameters(), strict=True):
            assert parameter.grad is not None
            assert other.grad is not None
            assert torch.equal(parameter.grad, other.grad)


@pytest.mark.parametrize(("ranks", "num_grains"), [(2, 2), (2, 7), (3, 2), (3, 8), (4, 6)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_and_numbers_have_the_bits_of_one_rank(ranks: int, num_grains: int, dtype: torch.dtype) -> None:
    run_ranks(ranks, summed, num_grains, dtype, 300)
