"""Device, backend and threads of a rank, from plain values."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

import paceline
from paceline.world.launch.launcher import count_procs
from paceline.world.resources import (
    MoreRanksThanDevices,
    NoCudaDevice,
    backend_of,
    device_name,
    threads_by_environment,
    threads_of,
    threads_per_rank,
)
from paceline.world.roll_call import Present
from tests.train.small import SmallTask


@pytest.mark.parametrize(
    ("cores", "sharers", "asked", "threads"), [(8, 2, None, 4), (2, 4, None, 1), (7, 2, None, 3), (2, 4, 3, 3)]
)
def test_threads(cores: int, sharers: int, asked: int | None, threads: int) -> None:
    assert threads_per_rank(cores, sharers, asked) == threads


def test_device() -> None:
    assert device_name("auto", 1, 2, num_devices=0) == "cpu"
    assert device_name("cpu", 1, 2, num_devices=2) == "cpu"
    assert device_name("auto", 1, 2, num_devices=2) == "cuda:1"
    # The launcher shows each rank one GPU of its own.
    assert device_name("cuda", 3, 4, num_devices=1) == "cuda:0"
    assert device_name("cuda", 3, 4, num_devices=2, share_devices=True) == "cuda:1"


def test_devices_that_are_not_there() -> None:
    with pytest.raises(NoCudaDevice) as refused:
        device_name("cuda", 0, 1, num_devices=0)
    assert "--device cpu" in refused.value.hint
    with pytest.raises(MoreRanksThanDevices, match=r"4 ranks.* 2 CUDA"):
        device_name("auto", 0, 4, num_devices=2)


def test_procs() -> None:
    assert count_procs("auto", "auto", num_devices=8) == 8
    assert count_procs("auto", "auto", num_devices=0) == 1
    assert count_procs("auto", "cpu", num_devices=8) == 1
    assert count_procs(3, "auto", num_devices=0) == 3
    assert count_procs(3, "cpu", num_devices=1) == 3
    with pytest.raises(MoreRanksThanDevices, match=r"3 ranks.* 2 CUDA"):
        count_procs(3, "auto", num_devices=2)


def entry(rank: int, host: str = "a", cores: tuple[int, ...] = (0, 1, 2, 3), gpu: str | None = None) -> Present:
    return Present(rank, host, 1, "cpu", cores, gpu)


def test_backend_follows_the_devices() -> None:
    assert backend_of([entry(0), entry(1)], False) == "gloo"
    assert backend_of([entry(0, gpu="x"), entry(1, gpu="y")], False) == "cpu:gloo,cuda:nccl"
    # Two nodes may have GPUs of equal number, even of equal name.
    assert backend_of([entry(0, "a", gpu="x"), entry(1, "b", gpu="x")], False) == "cpu:gloo,cuda:nccl"
    shared = [entry(0, gpu="x"), entry(1, gpu="x"), entry(2, gpu="y")]
    assert backend_of(shared, True) == "cpu:gloo,cuda:gloo"
    with pytest.raises(MoreRanksThanDevices, match=r"3 ranks.* 2 CUDA"):
        backend_of(shared, False)


def test_threads_are_shared_only_with_ranks_on_the_same_cores() -> None:
    roll = [entry(0), entry(1), entry(2, host="b")]
    assert threads_of(roll[0], roll, None) == 2
    bound = [entry(0, cores=(0, 1)), entry(1, cores=(2, 3))]
    assert threads_of(bound[0], bound, None) == 2
    assert threads_of(bound[0], bound, 5) == 5


@pytest.mark.parametrize(
    ("words", "launcher", "local_size", "threads"),
    [
        ("1", "plain", 1, 1),
        ("6", "procs", 2, 6),
        ("4,2", "plain", 1, 4),
        (" 3 ", "slurm", 8, 3),
        ("1", "torchrun", 2, None),  # set by torchrun itself
        ("1", "torchrun", 1, 1),
        ("2", "torchrun", 2, 2),
        ("", "plain", 1, None),
        ("many", "plain", 1, None),
        ("0", "plain", 1, None),
    ],
)
def test_threads_that_the_environment_asks_for(words: str, launcher: str, local_size: int, threads: int | None) -> None:
    assert threads_by_environment({"OMP_NUM_THREADS": words}, launcher, local_size) == threads
    assert threads_by_environment({}, launcher, local_size) is None


def test_a_run_respects_them_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    """On ce01e4b torch was given all cores."""
    assert os.environ["OMP_NUM_THREADS"] == "1"  # conftest.py

    class Counts(SmallTask):
        def before_stage(self, model: Any, stage: int) -> None:
            self.threads = torch.get_num_threads()

    task = Counts()
    paceline.fit(task, epochs=1, progress="lines", level=0, device="cpu")
    assert task.threads == 1
    assert "1 thread each (OMP_NUM_THREADS=1)" in capsys.readouterr().out
    paceline.fit(task, epochs=1, progress="lines", level=0, device="cpu", threads=2)
    assert task.threads == 2
    assert "2 threads each, no launcher" in capsys.readouterr().out
