"""Real ranks that fail in real ways. What the user sees: one message, one exit code, no hang."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest
from torch.distributed import HashStore

from paceline.config.errors import PacelineError
from paceline.world.discover import World
from paceline.world.failure import Failure, FailureBoard, fail_together

TIMEOUT_S = 60


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run_by_hand(job: str, ranks: list[int], size: int, **env: str) -> tuple[list[int], str, str]:
    """Start these ranks with torch's variables only, so that rank 0 serves the store; exit codes, stdout, stderr."""
    common = {**os.environ, "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), **env}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.world.jobs", job],
            env={**common, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in ranks
    ]
    try:
        texts = [process.communicate(timeout=TIMEOUT_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [process.returncode for process in processes], "".join(t[0] for t in texts), "".join(t[1] for t in texts)


def test_ranks_that_meet_by_themselves_and_meet_again() -> None:
    codes, out, err = run_by_hand("start_twice", [0, 1], 2)
    assert (codes, err) == ([0, 0], "")
    assert out == "sum 1 of 2 by environment, attempt 0\n" * 2


def test_a_missing_rank_is_named_on_all_ranks_and_printed_once() -> None:
    codes, _, err = run_by_hand("add_up", [0, 1], 3, START_S="3")
    assert codes == [2, 2]
    assert err.count("1 of 3 ranks did not arrive in 3 s: rank 2") == 1
    assert f"{socket.gethostname()}: 0-1" in err
    assert "Traceback" not in err


def test_the_first_rank_missing() -> None:
    codes, _, err = run_by_hand("add_up", [1], 2, START_S="1")
    assert codes == [2]
    assert "rank 0 at 127.0.0.1:" in err
    assert "was not reached in 1 s" in err
    assert "Traceback" not in err


def test_two_first_ranks() -> None:
    codes, _, err = run_by_hand("add_up", [0, 0], 2, START_S="3")
    assert codes == [2, 2]
    assert "rank 0 cannot listen at 127.0.0.1:" in err
    assert "1 of 2 ranks did not arrive" in err


@pytest.mark.parametrize("job", ["one_crashes", "one_crashes_while_others_compute"])
def test_a_crash_ends_all_ranks_and_is_printed_once(job: str) -> None:
    codes, _, err = run_by_hand(job, [0, 1, 2], 3)
    assert codes == [1, 1, 1]
    assert err.count("Traceback") == 1
    assert err.count("RuntimeError: rank one has a bug\n") == 2  # the end of the traceback, and our line below it
    assert "rank 1 on" in err


@pytest.mark.parametrize("job", ["one_is_mistaken", "all_are_mistaken_before_they_meet"])
def test_a_mistake_is_printed_once_without_traceback(job: str) -> None:
    codes, _, err = run_by_hand(job, [0, 1], 2)
    assert codes == [2, 2]
    assert err == "error: train.json is not there\n  give a file that exists\n"


def test_a_rank_that_dies_without_a_word() -> None:
    codes, _, err = run_by_hand("one_is_killed", [0, 1, 2], 3)
    assert codes == [1, -9, 1]
    assert err.count("lost the other ranks") == 1


def test_the_first_report_wins() -> None:
    board = FailureBoard(HashStore())
    assert board.read() is None
    first, second = Failure(1, "a", "crash", "x", "trace"), Failure(2, "b", "user", "y")
    assert board.post(first) == first
    assert board.post(second) == first
    assert board.read() == first
    assert (first.exit_code, second.exit_code) == (1, 2)


def test_one_rank_fails_like_any_program(capsys: pytest.CaptureFixture[str]) -> None:
    alone = World(0, 0, 1, 1, 0, 1, "plain", None)

    def mistaken() -> None:
        raise PacelineError("what and why")

    def broken() -> None:
        raise ZeroDivisionError

    assert fail_together(alone, lambda: None) == 0
    assert fail_together(alone, lambda: 3) == 3
    assert fail_together(alone, mistaken) == 2
    assert capsys.readouterr().err == "error: what and why\n"
    with pytest.raises(ZeroDivisionError):
        fail_together(alone, broken)
