"""Processes that do not belong to a job: they reach its store, and can put neither data nor code into it.

Also ranks that were started so that they cannot meet: what is wrong is said, and no rank waits for ever.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import crash
from tests.launchers import small
from tests.launchers.test_frozen_ranks import Job, free_port

STEPS = 40  # half a second each: the stranger needs some to import torch

# With torch's own client, as anybody has it: overwrite all keys that a job may use, and report a failure of its ranks.
STRANGER = """
import os, sys
from datetime import timedelta
import torch.distributed as dist

class Bomb:
    def __reduce__(self):
        return os.mkdir, (sys.argv[2],)

import pickle
bomb = pickle.dumps(Bomb()).decode("latin-1")
report = '{"rank": 1, "host": "nowhere", "kind": "user", "message": "a stranger was here"}'
where = ("127.0.0.1", int(sys.argv[1]))
store = dist.TCPStore(*where, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=5))
for attempt in ("paceline/attempt0", "paceline/attempt0/size2"):
    store.set(f"{attempt}/failure/first", report)
    for key in ("run folder", "start1/verdict", "start1/present/0", "start1/group/0", "size"):
        store.set(f"{attempt}/{key}", bomb)
print("inside", flush=True)
"""


def start(folder: Path, rank: int, **env: str) -> Job:
    words = small.words(folder / "run", steps=STEPS, task="Slow")
    words[words.index("--start-timeout-s") + 1] = env.pop("START_S", "60")
    output = folder / f"rank-{rank}"
    return Job([crash.command(words, output, {**env, "RANK": str(rank)})], [output], folder / "run")


def end(jobs: list[Job], timeout_s: float = 60.0) -> tuple[list[int | None], str]:
    """Exit codes and output of ranks that are to end by themselves."""
    deadline = time.monotonic() + timeout_s
    for job in jobs:
        job.ranks[0].join(max(deadline - time.monotonic(), 0.1))
        job.ranks[0].kill()
    return [job.ranks[0].exitcode for job in jobs], "".join(job.outputs[0].read_text() for job in jobs)


def test_a_stranger_changes_nothing_and_is_named(tmp_path: Path) -> None:
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    ranks = [start(tmp_path, rank, **meeting) for rank in range(2)]
    try:
        ranks[0].wait_for("now\n")
        words = [sys.executable, "-c", STRANGER, meeting["MASTER_PORT"], str(tmp_path / "owned")]
        stranger = subprocess.run(words, capture_output=True, text=True, timeout=60)
    finally:
        codes, text = end(ranks)
    assert (stranger.returncode, stranger.stdout) == (1, ""), stranger.stdout
    assert codes == [0, 0], text
    assert "a stranger was here" not in text
    assert text.count("warning: a process at 127.0.0.1 connected to the store of this job") == 1
    assert not (tmp_path / "owned").exists()
    assert len(small.losses(tmp_path / "run")) == STEPS


CASES: dict[str, tuple[list[dict[str, str]], list[str]]] = {
    "sizes": (
        [{"WORLD_SIZE": "2"}, {"WORLD_SIZE": "3"}],
        [
            "different numbers of ranks (WORLD_SIZE)",
            " is one of 2",
            " is one of 3",
            "give all ranks the same WORLD_SIZE",
        ],
    ),
    "more than rank 0 knows": (
        [{"WORLD_SIZE": "3"}, {"WORLD_SIZE": "2"}],
        ["different numbers of ranks (WORLD_SIZE)", " is one of 2", " is one of 3"],
    ),
    "secrets": (
        [{"PACELINE_SECRET": "0123456789abcdef"}, {"PACELINE_SECRET": "fedcba9876543210"}],
        ["has another secret than PACELINE_SECRET", "export the same PACELINE_SECRET", "was turned away"],
    ),
    "an address of nobody": (
        [{"MASTER_ADDR": "192.0.2.1"}],
        ["192.0.2.1 is not an address of this machine", "export MASTER_ADDR=<an address of rank 0's machine>"],
    ),
    "a name of nobody": (
        [{"MASTER_ADDR": "no-such-host.invalid"}] * 2,
        [
            "rank 0 cannot listen at no-such-host.invalid:",
            "rank 1 on",
            "no name server knows 'no-such-host.invalid': export MASTER_ADDR=",
        ],
    ),
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[list[int | None], str]]:
    """All cases at once."""
    jobs = {}
    local = {"LOCAL_WORLD_SIZE": "2"}
    for case, (environments, _) in CASES.items():
        folder = tmp_path_factory.mktemp("case")
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2", "START_S": "8"}
        jobs[case] = [
            start(folder, rank, **meeting | local | {"LOCAL_RANK": str(rank)} | env)
            for rank, env in enumerate(environments)
        ]
    return {case: end(ranks) for case, ranks in jobs.items()}


@pytest.mark.parametrize("case", CASES)
def test_ranks_that_cannot_meet_say_why(case: str, outcomes: dict[str, tuple[list[int | None], str]]) -> None:
    codes, text = outcomes[case]
    assert set(codes) == {2}, (codes, text)
    assert "Traceback" not in text
    for part in CASES[case][1]:
        assert part in text, text
