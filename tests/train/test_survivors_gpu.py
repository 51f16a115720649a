"""Ranks that share a GPU lose one after the other, take in a replacement and go on; and NCCL's group of one is left and
formed again.

Processes that import torch are what takes the time, so there are few: one undisturbed run beside one that is attacked.
`SURVIVORS_DEVICE=cpu pytest -m gpu` has its ranks compute on the CPU.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tools.chaos.runs import differences, read_run

from paceline.observe.journal import read
from paceline.world.discover.environment import World
from paceline.world.link import break_off
from paceline.world.start import start

DEVICE = os.environ.get("SURVIVORS_DEVICE", "cuda")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(DEVICE == "cuda" and not torch.cuda.is_available(), reason="needs a CUDA device"),
]
ROOT = Path(__file__).parents[2]
TASK = """
import os
from functools import partial
from pathlib import Path

import paceline.world.start
from tools.chaos.tasks import MARKS, Plain


class Noted(Plain):
    def model(self):
        if MARKS in os.environ:
            Path(f"{os.environ[MARKS]}-{self.world.rank}").write_text(str(os.getpid()))
        return super().model()


# No option of a run: ranks that share a GPU are right, but slow.
paceline.world.start.start = partial(paceline.world.start.start, share_devices=True)
"""


# The launcher would refuse more ranks than there are GPUs; what it is told here is not what the ranks compute on.
LAUNCH = ("launch", "--nproc-per-node", "3", "--device", "cpu", "--max-restarts", "1", "--")


def command(folder: Path, out: Path, *launch: str) -> list[str]:
    plain = ["--out", out, "--device", DEVICE, "--epochs", "8", "--global-batch", "8", "--grains", "4"]
    plain += ["--precision", "fp64", "--save-every-steps", "20", "--log-every", "1", "--progress", "lines"]
    task = f"{folder / 'shared_gpu.py'}:Noted"
    return [sys.executable, "-m", "paceline", *launch, "train", task, *map(str, plain)]


@contextmanager
def started(words: list[str], env: dict[str, str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("w") as file, subprocess.Popen(words, env=env, stdout=file, stderr=file) as process:
        try:
            yield process
        finally:
            process.kill()


def test_the_others_go_on_and_a_replacement_joins(tmp_path: Path) -> None:
    """Rank 2 is killed and replaced, then rank 0: 3 ranks, 2, 3, 2; bit for bit one process that nobody disturbed."""
    (tmp_path / "shared_gpu.py").write_text(TASK)
    whole, disturbed, marks, hold = (tmp_path / name for name in ("whole", "disturbed", "marks", "hold"))
    env = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    watched = {**env, "CHAOS_STEP_S": "0.02", "CHAOS_MARKS": str(marks), "CHAOS_HOLD": str(hold), "CHAOS_HOLD_S": "0.5"}
    words = command(tmp_path, disturbed, *LAUNCH)

    def kill(rank: int) -> None:
        os.kill(int(marks.with_name(f"marks-{rank}").read_text()), signal.SIGKILL)

    def lines() -> list[dict[str, object]]:
        return list(read(disturbed / "metrics.jsonl", "ranks")) if disturbed.exists() else []

    with ExitStack() as stack:
        alone = stack.enter_context(started(command(tmp_path, whole), env, tmp_path / "log-alone"))
        running = stack.enter_context(started(words, watched, tmp_path / "log"))

        def until(is_so: Callable[[], bool]) -> None:
            deadline = time.monotonic() + 120.0
            while not is_so():
                log = (tmp_path / "log").read_text()
                assert running.poll() is None, log
                assert time.monotonic() < deadline, log
                time.sleep(0.02)

        until(lambda: marks.exists() and marks.read_text().count("2 step\n") >= 20)
        hold.touch()  # it is not to end before the replacement is there
        kill(2)
        until(lambda: any(line["joined"] for line in lines()))
        hold.unlink()
        before = marks.read_text().count("0 step\n")
        until(lambda: marks.read_text().count("0 step\n") >= before + 5)
        kill(0)
        assert running.wait(120) == 0, (tmp_path / "log").read_text()
        assert alone.wait(120) == 0, (tmp_path / "log-alone").read_text()
    assert [line["ranks"] for line in lines()] == [3, 2, 3, 2]
    assert [[each["rank"] for each in line["lost"]] for line in lines()] == [[], [2], [], [0]]  # type: ignore[attr-defined]
    assert differences(read_run(disturbed), read_run(whole), 0.0) == []


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_group_of_one_is_left_and_formed_again() -> None:
    """As far as one GPU can show it: NCCL's communicator is aborted with a sum that was started, and the next works.

    By the thread that has left a round, and by another one first, as when a rank is lost that is waited for.
    """
    world = World(0, 0, 1, 1, 0, 1, "plain", None)
    for breaks_off in (False, True, True, False):
        link = start(world, device="cuda", group_of_one=True)
        assert "cuda:nccl" in dist.get_backend_config()
        numbers = torch.ones(1 << 20, dtype=torch.float32, device="cuda")
        dist.all_reduce(numbers)
        assert float(numbers.sum()) == 1 << 20
        dist.all_reduce(numbers, async_op=True)
        if breaks_off:
            thread = threading.Thread(target=break_off)
            thread.start()
            thread.join()
        link.abandon()
        assert not dist.is_initialized()
