"""The collectives, against numbers worked out by hand."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist

from paceline.world.discover.environment import World
from paceline.world.link import Link
from paceline.world.start import start
from tests.ranks import RanksFailed, ranks, run_ranks


@ranks(1, 2, 4)
def test_all_reduce_sums_and_takes_extremes_in_place(link: Link) -> None:
    size, rank = link.world.size, link.world.rank
    for op, expected in (("sum", size * (size + 1) / 2), ("max", float(size)), ("min", 1.0)):
        tensor = torch.full((3,), rank + 1.0, dtype=torch.float64)
        link.all_reduce(tensor, op=op)
        assert tensor.tolist() == [expected] * 3


@ranks(1, 2)
def test_all_reduce_in_the_background(link: Link) -> None:
    tensor = torch.ones(1000) * (link.world.rank + 1)
    work = link.all_reduce(tensor, async_op=True)
    if work is not None:
        work.wait()
    assert (work is None) == (link.world.size == 1)
    assert tensor.unique().tolist() == [sum(range(1, link.world.size + 1))]


@ranks(1, 2, 4)
def test_values_travel(link: Link) -> None:
    size, rank = link.world.size, link.world.rank
    assert link.gather_objects({"rank": rank}) == [{"rank": other} for other in range(size)]
    assert link.broadcast_object(f"from {rank}") == "from 0"
    assert link.broadcast_object(f"from {rank}", src=size - 1) == f"from {size - 1}"
    tensor = torch.tensor([rank])
    link.broadcast(tensor, src=size - 1)
    assert tensor.item() == size - 1
    assert link.is_first == (rank == 0)
    assert len(link.hosts) == size


@ranks(2, 4)
def test_a_barrier_lets_nobody_through_early(link: Link, tmp_path) -> None:
    (tmp_path / str(link.world.rank)).touch()
    link.barrier()
    assert len(list(tmp_path.iterdir())) == link.world.size


def _pid_and_sum(link: Link, value: float) -> tuple[int, float]:
    tensor = torch.tensor([value * (link.world.rank + 1)])
    link.all_reduce(tensor)
    return os.getpid(), tensor.item()


def test_the_pool_is_reused_and_returns_by_rank() -> None:
    first = run_ranks(2, _pid_and_sum, 1.0)
    second = run_ranks(4, _pid_and_sum, 2.0)
    assert [pid for pid, _ in first] == [pid for pid, _ in second[:2]]
    assert [total for _, total in first] == [3.0, 3.0]
    assert [total for _, total in second] == [20.0] * 4


def _one_rank_fails(link: Link) -> None:
    if link.world.rank == 1:
        raise ValueError("one is enough")
    link.barrier()


def _one_rank_hangs(link: Link) -> None:
    if link.world.rank == 0:
        link.store.get("a key that nobody sets")


def test_a_failing_rank_is_shown_and_the_pool_recovers() -> None:
    with pytest.raises(RanksFailed, match=r"(?s)rank 1:.*ValueError: one is enough"):
        run_ranks(2, _one_rank_fails)
    assert [total for _, total in run_ranks(2, _pid_and_sum, 1.0)] == [3.0, 3.0]


def test_a_hanging_rank_is_given_up_and_its_stack_shown() -> None:
    with pytest.raises(RanksFailed, match=r"(?s)rank 0 gave no answer.*_one_rank_hangs"):
        run_ranks(2, _one_rank_hangs, timeout_s=3.0)
    assert [total for _, total in run_ranks(2, _pid_and_sum, 1.0)] == [3.0, 3.0]


def test_one_rank_needs_no_process_group() -> None:
    threads = torch.get_num_threads()
    with start(World(0, 0, 1, 1, 0, 1, "plain", None), device="cpu", threads=threads) as link:
        tensor = torch.ones(2)
        assert link.all_reduce(tensor, async_op=True) is None
        link.broadcast(tensor)
        link.barrier()
        assert link.gather_objects(7) == [7]
        assert link.broadcast_object(7) == 7
        assert tensor.tolist() == [1.0, 1.0]
        assert not dist.is_initialized()


def tensors_of(rank: int) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(rank)
    tensors = {
        "flags": torch.tensor([True, False, rank > 0]),  # 3 bytes: what follows is not aligned
        "weights": torch.randn(rank + 1, 4, generator=random).T,
        "half": torch.randn((), generator=random).half(),
        "empty": torch.zeros(0, 3),
        "count": torch.tensor(rank * 2**40),
    }
    return {} if rank == 2 else tensors


@ranks(1, 2, 4)
def test_tensors_that_differ_between_ranks_are_gathered_on_the_first(link: Link) -> None:
    gathered = link.gather_tensors(tensors_of(link.world.rank))
    assert len(gathered) == (link.world.size if link.is_first else 0)
    for rank, tensors in enumerate(gathered):
        expected = tensors_of(rank)
        assert list(tensors) == list(expected)
        for name, tensor in tensors.items():
            assert tensor.dtype == expected[name].dtype
            assert torch.equal(tensor, expected[name])
