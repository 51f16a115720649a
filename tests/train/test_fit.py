"""`paceline.fit` in one process of several, without our launcher: a failed call leaves the next one free to work."""

from __future__ import annotations

import os
import socket
from typing import Any

import pytest
import torch

import paceline
from paceline.observe.callback import RunInfo
from paceline.train.validate import UnknownMonitor
from paceline.world.link import Link
from tests.crash import _context
from tests.ranks import run_ranks
from tests.train.small import SmallTask


def fail_and_fit_again(rank: int, port: int) -> None:
    """What a rank of torchrun does."""
    torchrun = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in torchrun.items()}, MASTER_ADDR="127.0.0.1")
    settings: dict[str, Any] = {"global_batch": 8, "steps": 2, "device": "cpu", "threads": 1, "level": 0, "workers": 0}
    assert str(UnknownMonitor("f1", [f"dev/f1_{label}" for label in range(100)])).endswith("dev/f1_11 and 88 more")
    with pytest.raises(UnknownMonitor):
        paceline.fit(SmallTask(), monitor="tets/loss", progress="none", **settings)
    assert not torch.distributed.is_initialized(), "the process group was left behind"
    assert paceline.fit(SmallTask(), progress="none", **settings).status == "finished"


def test_a_failed_fit_on_several_ranks_can_be_followed_by_another() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    both = [_context().Process(target=fail_and_fit_again, args=(rank, port)) for rank in range(2)]
    for process in both:
        process.start()
    for process in both:
        process.join(120)
    assert [process.exitcode for process in both] == [0, 0]


def in_a_group_without_variables(link: Link) -> tuple[float, int, bool]:
    """What `mp.spawn` with an address does: the group is there (the pool's), and no variable tells of it."""
    assert "RANK" not in os.environ
    seen: list[int] = []

    class Told(paceline.Callback):
        def start(self, info: RunInfo) -> None:
            seen.append(info.world_size)

    settings = {"global_batch": 8, "grains": 2, "steps": 3, "device": "cpu", "threads": 1, "level": 0, "workers": 0}
    result = paceline.fit(SmallTask(), watchers=[Told()], progress="none", **settings)
    return result.loss, sum(seen), torch.distributed.is_initialized()


def test_a_process_group_without_variables_is_one_run() -> None:
    """On ce01e4b each process trained a run of its own, without a word."""
    ((loss, size, has_group),) = run_ranks(1, in_a_group_without_variables)
    assert (size, has_group) == (1, False)
    assert run_ranks(2, in_a_group_without_variables) == [(loss, 2, True), (loss, 0, True)]
