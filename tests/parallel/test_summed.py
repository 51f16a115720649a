"""Summed gradients against one process that sees everything, and against torch's own DistributedDataParallel."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from paceline.data.grain import Batch
from paceline.parallel.step import GrainNumbers, RankNumbers, Tally
from paceline.parallel.summed import FastAdd, Summed
from paceline.world.link import Link
from tests.ranks import ranks

BATCH = Batch(0, 0, 1, 1, 1.0, [])


def numbers(loss: float | torch.Tensor, count: int, has_data: bool, wants_stop: bool) -> RankNumbers:
    return RankNumbers([GrainNumbers(torch.as_tensor(loss), count)], has_data, wants_stop)


class Branches(nn.Module):
    """Several layers, one of which some inputs never reach."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.layers = nn.ModuleList(nn.Linear(8, 8, dtype=torch.float64) for _ in range(5))
        self.rare = nn.Linear(8, 8, dtype=torch.float64)

    def forward(self, x: torch.Tensor, use_rare: bool = True) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.rare(x) if use_rare else x


def data(rank: int) -> torch.Tensor:
    return torch.randn(4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))


def reference(size: int) -> list[torch.Tensor | None]:
    """All ranks' losses in one process."""
    model = Branches()
    for rank in range(size):
        loss(model, rank).backward()
    return [parameter.grad for parameter in model.parameters()]


def loss(model: nn.Module, rank: int) -> torch.Tensor:
    """Rank 1 never uses the rare layer; everybody calls the model twice."""
    x = data(rank)
    return model(x, rank != 1).square().sum() + model(-x, rank != 1).sum()


def reduced(link: Link, model: nn.Module, strategy: Summed, has_data: bool = True) -> Tally:
    strategy.begin(BATCH)
    value = loss(model, link.world.rank) if has_data else None
    if value is not None:
        strategy.last_backward()
        value.backward()
    return strategy.reduce(numbers(0.0 if value is None else value.detach(), 4, has_data, False)).tally


@ranks(2, 4)
def test_sums_with_unused_parameters_and_two_forwards(link: Link) -> None:
    model = Branches()
    strategy = Summed(list(model.parameters()), link, FastAdd(link), bucket_bytes=600)
    assert len(strategy.gradient_groups()) > 3
    for _ in range(3):
        tally = reduced(link, model, strategy)
        for parameter, expected in zip(model.parameters(), reference(link.world.size), strict=True):
            torch.testing.assert_close(parameter.grad, expected, rtol=1e-13, atol=1e-13)
    total = sum(float(loss(Branches(), rank).detach()) for rank in range(link.world.size))
    assert [float(value) for value in tally] == [pytest.approx(total), 4 * link.world.size, link.world.size, 0]


@ranks(4)
def test_ranks_without_data_send_zeros_and_get_the_sum(link: Link) -> None:
    model = Branches()
    strategy = Summed(list(model.parameters()), link, FastAdd(link))
    tally = reduced(link, model, strategy, has_data=link.world.rank < 2)
    for parameter, expected in zip(model.parameters(), reference(2), strict=True):
        torch.testing.assert_close(parameter.grad, expected, rtol=1e-13, atol=1e-13)
    assert tally.ranks_with_data == 2


@ranks(2)
def test_accumulation_communicates_once(link: Link) -> None:
    model = Branches()
    strategy = Summed(list(model.parameters()), link, FastAdd(link))
    sent: list[int] = []
    original = link.all_reduce

    def counted(tensor: torch.Tensor, **options: object) -> object:
        sent.append(tensor.numel())
        return original(tensor, **options)  # type: ignore[arg-type]

    link.all_reduce = counted  # type: ignore[method-assign, assignment]
    strategy.begin(BATCH)
    for grain in range(4):
        value = loss(model, grain % 2)
        if grain == 3:
            strategy.last_backward()
        value.backward()
        assert not sent or grain == 3
    strategy.reduce(numbers(0.0, 0, True, False))
    parameters = list(model.parameters())
    assert sum(sent) == sum(parameter.numel() for parameter in parameters) + 4 + len(parameters)  # tally, marks
    expected = reference(2)
    for parameter, once in zip(model.parameters(), expected, strict=True):
        assert once is not None
        torch.testing.assert_close(parameter.grad, 4 * once, rtol=1e-13, atol=1e-13)


@ranks(2)
def test_equals_torch_ddp(link: Link) -> None:
    ours, theirs = Branches(), Branches()
    strategy = Summed(list(ours.parameters()), link, FastAdd(link))
    strategy.begin(BATCH)
    value = ours(data(link.world.rank)).square().sum()
    strategy.last_backward()
    value.backward()
    strategy.reduce(numbers(0.0, 0, True, False))
    wrapped = DistributedDataParallel(theirs)
    wrapped(data(link.world.rank)).square().sum().backward()
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert mine.grad is not None
        assert other.grad is not None
        assert torch.equal(mine.grad, other.grad * 2)  # DDP gives the mean


@ranks(2)
def test_nothing_of_a_step_is_left_in_the_next(link: Link) -> None:
    model = Branches()
    strategy = Summed(list(model.parameters()), link, FastAdd(link), bucket_bytes=600)
    for use_rare in (True, False, True):
        strategy.begin(BATCH)
        for grain in range(2):  # the rare layer has a gradient in the first grain of the first rank alone
            is_rare = use_rare and link.is_first and grain == 0
            if grain == 1:
                strategy.last_backward()
            model(data(10 * link.world.rank + grain), is_rare).sum().backward()
        strategy.reduce(numbers(0.0, 8, True, False))
        alone = Branches()
        for rank in range(2):
            for grain in range(2):
                alone(data(10 * rank + grain), use_rare and rank == grain == 0).sum().backward()
        for parameter, expected in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(parameter.grad, expected.grad, rtol=1e-13, atol=1e-13)


@ranks(2)
def test_sparse_gradients_are_summed(link: Link) -> None:
    torch.manual_seed(1)
    table = nn.Embedding(6, 3, sparse=True, dtype=torch.float64)
    strategy = Summed(list(table.parameters()), link, FastAdd(link))
    for _ in range(2):
        strategy.begin(BATCH)
        for grain, words in enumerate(([0, 2, 2], [1 + link.world.rank])):
            if grain == 1:
                strategy.last_backward()
            table(torch.tensor(words)).sum().backward()
        strategy.reduce(numbers(0.0, 1, True, False))
        assert table.weight.grad is not None
        assert table.weight.grad.layout == torch.strided
        assert table.weight.grad[:, 0].tolist() == [2, 1, 5, 0, 0, 0]


@ranks(2)
def test_half_precision_keeps_the_tally_exact(link: Link) -> None:
    model = nn.Linear(4, 4).half()
    strategy = Summed(list(model.parameters()), link, FastAdd(link))
    strategy.begin(BATCH)
    value = model(torch.ones(2, 4, dtype=torch.float16)).sum()
    strategy.last_backward()
    value.backward()
    summed = strategy.reduce(numbers(1.25, 100_003, True, link.is_first)).tally  # 100003 is no fp16 number
    assert summed == (2.5, 200_006, 2, 1)


@ranks(2)
def test_detached_hooks_no_longer_reduce(link: Link) -> None:
    model = Branches()
    Summed(list(model.parameters()), link, FastAdd(link)).detach()
    model(data(link.world.rank)).sum().backward()
    alone = Branches()
    alone(data(link.world.rank)).sum().backward()
    for mine, other in zip(model.parameters(), alone.parameters(), strict=True):
        assert torch.equal(mine.grad, other.grad)  # type: ignore[arg-type]


@ranks(2)
def test_half_on_the_wire_is_torchs_compression_hook(link: Link) -> None:
    """torch's hook averages; by two, which is exact. Its bf16 hook refuses CPU tensors, so that one is by hand."""
    x = data(link.world.rank).float()
    theirs = DistributedDataParallel(Branches().float())
    theirs.register_comm_hook(None, fp16_compress_hook)
    theirs(x).square().sum().backward()
    expected = {"fp16": [parameter.grad * 2 for parameter in theirs.module.parameters()], "bf16": []}  # type: ignore[union-attr]
    for rank in range(2):
        alone = Branches().float()
        alone(data(rank).float()).square().sum().backward()
        rounded = [parameter.grad.bfloat16() for parameter in alone.parameters()]  # type: ignore[union-attr]
        sums = [before + now for before, now in zip(expected["bf16"], rounded, strict=True)] if rank else rounded
        expected["bf16"] = sums
    for wire, gradients in expected.items():
        ours = Branches().float()
        strategy = Summed(list(ours.parameters()), link, FastAdd(link, wire), bucket_bytes=300)  # type: ignore[arg-type]
        strategy.begin(BATCH)
        value = ours(x).square().sum()
        strategy.last_backward()
        value.backward()
        assert strategy.reduce(numbers(1.25, 100_003, True, link.is_first)).tally == (2.5, 200_006, 2, 1)
        for parameter, gradient in zip(ours.parameters(), gradients, strict=True):
            assert parameter.grad is not None
            torch.testing.assert_close(parameter.grad, gradient.float(), rtol=1e-3, atol=1e-7)
            assert torch.equal(parameter.grad, gradient.float()), wire
        strategy.detach()
