"""`start` on this machine; its decisions are tested with resources.py and discover/interfaces.py."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch

from paceline.config.settings import WorldSettings
from paceline.core.errors import Conflict
from paceline.world.discover.environment import World
from paceline.world.link import Link
from paceline.world.resources import NoCudaDevice
from paceline.world.rounds import RoundOver
from paceline.world.start import from_settings, start
from tests.crash import run_until_death
from tests.ranks import ranks, run_ranks

PLAIN = World(0, 0, 1, 1, 0, 1, "plain", None)


@ranks(2)
def test_threads_are_set_for_real(link: Link) -> None:
    assert link.threads == torch.get_num_threads() == 1


@ranks(2)
def test_a_group_that_is_there_already_is_used_and_stays(link: Link) -> None:
    """torch raised "trying to initialize the default process group twice" on ce01e4b."""
    group = torch.distributed.group.WORLD  # as Ray Train, or a script, has made it
    with start(link.world, device="cpu", threads=1, start_timeout_s=30.0) as guest:
        assert guest.gather_objects(guest.world.rank) == [0, 1]
        assert torch.distributed.group.WORLD is group
    with pytest.raises(ArithmeticError), start(link.world, device="cpu", threads=1, start_timeout_s=30.0):
        raise ArithmeticError
    assert torch.distributed.group.WORLD is group
    assert link.gather_objects(link.world.rank) == [0, 1]


@ranks(2)
def test_a_group_without_variables_is_noticed(link: Link) -> None:
    """Each rank trained for itself before: without RANK the environment says that it is alone."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    before = {name: os.environ.pop(name) for name in names if name in os.environ}
    try:
        with from_settings(WorldSettings(device="cpu", threads=1, start_timeout_s=30.0)) as guest:
            world = guest.world
            assert (world.rank, world.size, world.launcher) == (link.world.rank, 2, "group")
            assert (world.local_rank, world.local_size, world.nodes) == (link.world.rank, 2, 1)
            assert guest.gather_objects(world.rank) == [0, 1]
    finally:
        os.environ.update(before)


@ranks(2)
def test_a_group_that_is_not_the_jobs_is_refused(link: Link) -> None:
    with pytest.raises(Conflict, match=f"rank {link.world.rank} of 2, but the environment says rank 5 of 8"):
        start(replace(link.world, rank=5, size=8), device="cpu", threads=1)


def leave(link: Link) -> None:
    """End, and close all connections, as soon as this rank has them."""


def test_a_rank_may_leave_while_another_still_connects() -> None:
    for _ in range(8):
        run_ranks(4, leave)


def test_cuda_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(NoCudaDevice):
        start(PLAIN, device="cuda")


@pytest.mark.gpu
def test_cuda_is_chosen_and_needs_no_group_alone() -> None:
    with start(PLAIN, device="auto", threads=1) as link:
        assert link.device == torch.device("cuda:0")
        tensor = torch.ones(2, device=link.device)
        link.all_reduce(tensor)
        assert tensor.tolist() == [1.0, 1.0]


def one_makes_a_group(link: Link) -> None:
    """Rank 1 never comes to make it, as one that is frozen in the first step of a round."""
    link.abandon()
    is_over = False

    def check() -> None:
        if is_over:
            raise RoundOver("round 0 has lost a member")

    world = replace(link.world, attempt=link.world.attempt + 1)
    with start(world, device="cpu", threads=1, start_timeout_s=60, timeout_s=60, check=check):
        if world.rank == 0:
            is_over = True
            with pytest.raises(RoundOver):
                torch.distributed.new_group([0, 1])


def test_who_waits_for_a_lost_rank_to_make_a_group_is_told() -> None:
    """It waited for the time-out, and was then taken for stuck and killed."""
    assert run_until_death(2, one_makes_a_group) == [0, 0]
