"""`paceline.fit` in one process of several, without our launcher: a failed call leaves the next one free to work."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import torch

import paceline
from paceline.observe.callback import RunInfo
from paceline.world.link import Link
from tests.ranks import run_ranks
from tests.train.small import SmallTask

AGAIN = """
import threading
import torch.distributed as dist
import paceline
from paceline.train.validate import UnknownMonitor
from tests.train.small import SmallTask

settings = {"global_batch": 8, "steps": 2, "device": "cpu", "threads": 1, "level": 0, "workers": 0, "progress": "none"}
try:
    paceline.fit(SmallTask(), monitor="tets/loss", **settings)
except UnknownMonitor:
    assert not dist.is_initialized(), "the process group was left behind"
print(paceline.fit(SmallTask(), **settings).status)
"""


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def test_a_failed_fit_on_several_ranks_can_be_followed_by_another(tmp_path: Path) -> None:
    port = free_port()
    root = Path(__file__).parents[2]
    processes = []
    for rank in range(2):
        torchrun = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": port}
        env = {**os.environ, **{name: str(value) for name, value in torchrun.items()}, "MASTER_ADDR": "127.0.0.1"}
        env["PYTHONPATH"] = os.pathsep.join([str(root), env.get("PYTHONPATH", "")])
        processes.append(
            subprocess.Popen(
                [sys.executable, "-c", AGAIN],
                cwd=tmp_path,
                env=env,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    results = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], results
    assert [output.splitlines()[-1] for output, _ in results] == ["finished", "finished"]


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
