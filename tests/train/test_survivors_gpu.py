"""Ranks that share a GPU lose one of them, and go on; and NCCL's group of one is left and formed again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from paceline.observe.journal import read
from paceline.world.discover.environment import World
from paceline.world.start import start
from tests.chaos.runs import differences, read_run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
ROOT = Path(__file__).parents[2]
DEVICE = "cuda"
TASK = """
import os
from functools import partial
from pathlib import Path

import paceline.world.start
from tests.chaos.tasks import MARKS, Plain


class Noted(Plain):
    def model(self):
        if MARKS in os.environ:
            Path(f"{os.environ[MARKS]}-{self.world.rank}").write_text(str(os.getpid()))
        return super().model()


# No option of a run: ranks that share a GPU are right, but slow.
paceline.world.start.start = partial(paceline.world.start.start, share_devices=True)
"""


def command(folder: Path, out: Path, *more: str) -> list[str]:
    task = folder / "shared_gpu.py"
    task.write_text(TASK)
    plain = ["--out", out, "--device", DEVICE, "--epochs", "12", "--global-batch", "8", "--grains", "4"]
    plain += ["--precision", "fp64", "--save-every-steps", "20", "--log-every", "1", "--progress", "lines"]
    return [sys.executable, "-m", "paceline", "train", f"{task}:Noted", *map(str, plain), *more]


@pytest.mark.parametrize("victim", [0, 2])
def test_the_others_go_on(victim: int, tmp_path: Path) -> None:
    paths = f"{ROOT / 'src'}:{ROOT}:{os.environ.get('PYTHONPATH', '')}"
    env = {**os.environ, "PYTHONPATH": paths, "CHAOS_STEP_S": "0.02"}
    whole, disturbed, marks = tmp_path / "whole", tmp_path / "disturbed", tmp_path / "marks"
    subprocess.run(command(tmp_path, whole), check=True, env=env, capture_output=True, timeout=120)
    words = command(tmp_path, disturbed, "--procs", "3", "--on-failure", "continue", "--max-restarts", "2")
    with (tmp_path / "log").open("w") as log:
        running = subprocess.Popen(words, env={**env, "CHAOS_MARKS": str(marks)}, stdout=log, stderr=log)
        try:
            until(lambda: marks.exists() and marks.read_text().count(f"{victim} step\n") >= 30)
            os.kill(int(marks.with_name(f"marks-{victim}").read_text()), signal.SIGKILL)
            assert running.wait(180) == 0, (tmp_path / "log").read_text()
        finally:
            running.kill()
            running.wait()
    assert [line["lost"][0]["rank"] for line in read(disturbed / "metrics.jsonl", "ranks") if line["lost"]] == [victim]
    assert differences(read_run(disturbed), read_run(whole), 0.0) == []


def until(is_so: Callable[[], bool], seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_group_of_one_is_left_and_formed_again() -> None:
    """As far as one GPU can show it: NCCL's communicator is aborted with a sum that was started, and the next works."""
    world = World(0, 0, 1, 1, 0, 1, "plain", None)
    for _ in range(3):
        link = start(world, device="cuda", group_of_one=True)
        assert "cuda:nccl" in dist.get_backend_config()
        numbers = torch.ones(1 << 20, dtype=torch.float32, device="cuda")
        dist.all_reduce(numbers)
        assert float(numbers.sum()) == 1 << 20
        dist.all_reduce(numbers, async_op=True)
        link.abandon()
        assert not dist.is_initialized()
