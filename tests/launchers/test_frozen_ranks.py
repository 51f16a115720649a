"""Processes that are stopped, or cut off, instead of dead: nothing about them ends a connection.

Rank 0 serves the store here, so that the others cannot even ask who is missing. All cases run at the same time.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests import crash
from tests.launchers import small

COLLECTIVE_S = 4.0
HOST = socket.gethostname()
CASES = {
    "start": "0 start stopped",
    "backward": "0 backward stopped",
    "step": "0 step stopped",
    "save": "0 save stopped",
    "validation": "0 validation stopped",
    "stuck": "0 step stopped,1 step stuck",  # no collective of rank 1 ends: its watch must
    "second": "1 step stopped",
}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class Job:
    """Two ranks that were started by hand."""

    ranks: list[Any]
    outputs: list[Path]
    run: Path

    def wait_for(self, text: str, timeout_s: float = 180.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not any(text in path.read_text() for path in self.outputs if path.exists()):
            assert time.monotonic() < deadline, [path.read_text() for path in self.outputs if path.exists()]
            time.sleep(0.05)


def start(folder: Path, end: str) -> Job:
    folder.mkdir()
    words = small.words(folder / "run", "--timeout-s", str(COLLECTIVE_S), steps=10, task="Ends")
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2", "END": end}
    outputs = [folder / f"rank-{rank}" for rank in range(2)]
    ranks = [crash.command(words, outputs[rank], {**meeting, "RANK": str(rank)}) for rank in range(2)]
    return Job(ranks, outputs, folder / "run")


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Job]]:
    """All cases, up to the moment at which a rank is frozen in each."""
    folder = tmp_path_factory.mktemp("frozen")
    made = {case: start(folder / case, end) for case, end in CASES.items()}
    for job in made.values():
        job.wait_for("now\n")
    yield made
    for job in made.values():
        for rank in job.ranks:
            rank.kill()
            rank.join()


@pytest.mark.parametrize("case", CASES)
def test_the_others_name_it_and_end(case: str, jobs: dict[str, Job]) -> None:
    job, frozen = jobs[case], int(CASES[case][0])
    other = job.ranks[1 - frozen]
    other.join(6 * COLLECTIVE_S)  # 1.5 times the time-out; all cases at once share two cores
    text = job.outputs[1 - frozen].read_text()
    assert other.exitcode == 1, text
    fate = "does not answer" if frozen == 0 else "ended without a word (killed? out of memory?) or is stopped"
    assert text.count(f"rank {1 - frozen} on {HOST} lost the other ranks: rank {frozen} on {HOST} {fate}") == 1, text
    assert re.search(rf"\n  rank {1 - frozen}: \w+, ", text)
    assert "Traceback" not in text
    if case != "start":  # the run, and so the logs, are there
        log = (job.run / "logs" / f"rank-{1 - frozen}.log").read_text()
        assert " lost the other ranks: " in log
        assert "all threads were here:\n" in log
    if case == "stuck":
        assert "no answer from the store for 6 s (1.5 times --timeout-s)" in text


def test_a_frozen_launcher_does_not_end_ranks_that_get_on(tmp_path: Path) -> None:
    """Ctrl-Z stops it, and it serves the store; the ranks finish, and it says so when it goes on."""
    words = small.words(tmp_path / "run", "--timeout-s", "1.5", "--procs", "2", steps=10, task="Slow")
    launcher = crash.command(words, tmp_path / "output", {})
    job = Job([launcher], [tmp_path / "output"], tmp_path / "run")
    try:
        job.wait_for("now\n")
        os.kill(launcher.pid, signal.SIGSTOP)
        deadline = time.monotonic() + 60
        while len(small.losses(job.run)) < 10:  # 5 s: more than three time-outs
            assert time.monotonic() < deadline
            time.sleep(0.1)
        os.kill(launcher.pid, signal.SIGCONT)
        launcher.join(60)
    finally:
        launcher.kill()
    assert launcher.exitcode == 0, job.outputs[0].read_text()
    assert "lost" not in job.outputs[0].read_text()
