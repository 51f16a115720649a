"""Batch norm over ranks against torch's batch norm over the joined batch."""

from __future__ import annotations

import copy
import pickle
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import nn

from paceline.core.errors import InvalidSetting
from paceline.data.grain import Batch
from paceline.parallel.batch_norm.synchronized import JoinedBatchNorm, JoinedNorms, NotCalled
from paceline.world.link import Link
from tests.ranks import RanksFailed, ranks, run_ranks
from tests.train.apart import fit

SHAPES: dict[str, tuple[type[nn.Module], tuple[int, ...]]] = {
    "1d": (nn.BatchNorm1d, ()),
    "1d with time": (nn.BatchNorm1d, (7,)),
    "2d": (nn.BatchNorm2d, (3, 2)),
    "3d": (nn.BatchNorm3d, (2, 2, 2)),
}
CHANNELS = 5


def grain(rank: int, rest: tuple[int, ...]) -> torch.Tensor:
    """Of another size on every rank, and far from 0."""
    random = torch.Generator().manual_seed(rank)
    return torch.randn(3 + rank, CHANNELS, *rest, generator=random, dtype=torch.float64) * (rank + 1) + 100.0


def make(kind: type[nn.Module], **options: Any) -> nn.Sequential:
    torch.manual_seed(1)
    norm = kind(CHANNELS, **options)
    if options.get("affine", True):
        nn.init.normal_(norm.weight)  # type: ignore[arg-type]
        nn.init.normal_(norm.bias)  # type: ignore[arg-type]
    return nn.Sequential(norm).double()


def step_of(num_grains: int) -> Batch:
    return Batch(0, 0, num_grains, num_grains, float(num_grains), [])


def run(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Output, with a gradient that differs by element."""
    output: torch.Tensor = net(x)
    (output.sin() * output).sum().backward()
    return output


@ranks(2, 4)
def test_equals_the_joined_batch(link: Link) -> None:
    rank, size = link.world.rank, link.world.size
    for group in {2, size}:
        for kind, rest in SHAPES.values():
            for options in ({}, {"affine": False}, {"momentum": None}, {"track_running_stats": False}):
                ours, theirs = make(kind, **options), make(kind, **options)
                before = list(ours.parameters())
                norms = JoinedNorms(ours, link.world, group, timeout=timedelta(seconds=30))
                assert [a is b for a, b in zip(ours.parameters(), before, strict=True)] == [True] * len(before)
                norms.begin_step(step_of(size))
                members = range(rank // group * group, rank // group * group + group)
                for _ in range(2):
                    ours.zero_grad()
                    theirs.zero_grad()
                    mine = grain(rank, rest).requires_grad_()
                    joined = torch.cat([grain(member, rest) for member in members]).requires_grad_()
                    output, whole = run(ours, mine), run(theirs, joined)
                    sizes = [3 + member for member in members]
                    at = members.index(rank)
                    close(output, whole.split(sizes)[at])
                    assert joined.grad is not None
                    close(mine.grad, joined.grad.split(sizes)[at])
                for mine_, their in zip(ours.parameters(), theirs.parameters(), strict=True):
                    assert mine_.grad is not None
                    total = mine_.grad.clone()
                    torch.distributed.all_reduce(total)
                    if group == size:
                        close(total, their.grad)
                for name, buffer in theirs.state_dict().items():
                    if "running" in name or "tracked" in name:
                        close(ours.state_dict()[name], buffer)
                norms.detach()


def close(ours: Any, theirs: Any) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-12)


@ranks(2)
def test_without_a_grain_for_every_rank_each_is_alone(link: Link) -> None:
    ours, theirs = make(nn.BatchNorm1d), make(nn.BatchNorm1d)
    norms = JoinedNorms(ours, link.world, 2, timeout=timedelta(seconds=30))
    norms.begin_step(step_of(1))
    if link.is_first:  # the other has no grain; nobody waits
        close(ours(grain(0, ())), theirs(grain(0, ())))
    norms.begin_step(step_of(2))
    ours.eval()
    theirs.eval()
    if link.is_first:
        assert isinstance(ours[0], JoinedBatchNorm)
        close(ours(grain(0, ())), theirs(grain(0, ())))


class Scaled(nn.BatchNorm1d):
    """A batch norm with a forward and a value of its own."""

    factor = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.factor * super().forward(x)


class Around(nn.BatchNorm1d):
    """One whose forward computes by itself."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.batch_norm(x, None, None, training=True)


@ranks(2)
def test_what_a_class_of_its_own_does_around_the_norm_stays(link: Link) -> None:
    rank = link.world.rank
    ours, theirs = make(Scaled), make(Scaled)
    for net in (ours, theirs):
        assert isinstance(net[0], Scaled)
        net[0].factor = 3.0
    norms = JoinedNorms(ours, link.world, 2, timeout=timedelta(seconds=30))
    norms.begin_step(step_of(2))
    mine, joined = grain(rank, ()), torch.cat([grain(0, ()), grain(1, ())])
    close(ours(mine), theirs(joined).split([3, 4])[rank])
    copies = [copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))]  # plain ones, while the layers are joined
    for each in copies:
        assert type(each[0]) is Scaled
        close(each(mine), theirs.double()(mine))
    norms.detach()
    around = make(Around)
    norms = JoinedNorms(around, link.world, 2, timeout=timedelta(seconds=30))
    norms.begin_step(step_of(1))
    around(mine)  # alone it may compute as it likes
    norms.begin_step(step_of(2))
    with pytest.raises(NotCalled, match="forward of Around, a batch norm, does not call"):
        around(mine)


@ranks(4)
def test_groups_must_divide_the_ranks(link: Link) -> None:
    with pytest.raises(InvalidSetting, match="is 3, and the number of ranks, 4, is not a multiple") as raised:
        JoinedNorms(make(nn.BatchNorm1d), link.world, 3, timeout=timedelta(seconds=30))
    assert raised.value.hint == "set it to 2 or 4, or `all`"


def test_ranks_train_as_one_that_sees_the_whole_batch(tmp_path: Any) -> None:
    """With one grain per rank joined, 2 and 4 ranks are one rank with one grain."""
    common = {"epochs": 3, "precision": "fp64", "global_batch": 40, "limit_batches": 2}
    alone = run_ranks(1, fit, {"has_norm": True}, {**common, "grains": 1})[0]
    for size in (2, 4):
        joined = run_ranks(size, fit, {"has_norm": True}, {**common, "sync_batchnorm": "all"})
        for each in joined:
            for name, tensor in alone["state"].items():
                torch.testing.assert_close(each["state"][name], tensor, rtol=1e-10, atol=1e-12, msg=name)
        assert joined[0]["loss"] == pytest.approx(alone["loss"], rel=1e-11)
    with pytest.raises(RanksFailed, match="a step has 4 grains for 2 ranks"):
        run_ranks(2, fit, {"has_norm": True}, {**common, "sync_batchnorm": 2, "grains": 4})
