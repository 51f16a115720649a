"""Real ranks that fail in real ways. What the user sees: one message, one exit code, no hang."""

from __future__ import annotations

import os
import re
import socket
import time
from contextlib import ExitStack

import pytest
from torch.distributed import HashStore

from paceline.core.errors import PacelineError
from paceline.world.discover.environment import World
from paceline.world.failure.board import Failure, FailureBoard
from paceline.world.failure.together import fail_together
from paceline.world.failure.watchdog import repeats
from tests.forked import Forked

TIMEOUT_S = 60


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run_by_hand(job: str, ranks: list[int], size: int, **env: str) -> tuple[list[int], str, str]:
    """Start these ranks with torch's variables only, so that rank 0 serves the store; exit codes, stdout, stderr."""
    common = {**os.environ, "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), **env}
    processes = [Forked("tests.world.jobs", [job], {**common, "RANK": str(rank)}) for rank in ranks]
    try:
        texts = [process.communicate(timeout=TIMEOUT_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
    codes = [code for process in processes if (code := process.returncode) is not None]
    return codes, "".join(t[0] for t in texts), "".join(t[1] for t in texts)


def test_ranks_that_meet_by_themselves_and_meet_again() -> None:
    codes, out, err = run_by_hand("start_twice", [0, 1], 2)
    assert (codes, err) == ([0, 0], "")
    assert out == "sum 1 of 2 by environment, attempt 0\n" * 2


def test_a_missing_rank_is_named_once_on_each_console() -> None:
    codes, _, err = run_by_hand("add_up", [0, 1], 3, START_S="3")
    assert codes == [2, 2]
    assert err.count("1 of 3 ranks did not arrive in 3 s: rank 2") == 2
    assert err.count(" ends too: rank ") == 1
    assert f"{socket.gethostname()}: 0-1" in err
    assert "Traceback" not in err


def test_ranks_that_wait_in_vain_end_within_twice_the_time_out() -> None:
    """At start-up; tests/launchers/test_dead_ranks.py has the rest."""
    start_s = 4.0
    common = {"WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "START_S": str(start_s)}
    with ExitStack() as stack:
        processes = []
        for rank in (0, 2):
            env = {**os.environ, **common, "RANK": str(rank)}
            processes.append(stack.enter_context(Forked("tests.world.jobs", ["come_or_not"], env)))
            stack.callback(processes[-1].kill)
        for process in processes:
            assert process.stdout.readline() == "here\n"
        deadline = time.monotonic() + 2 * start_s
        errors = [process.communicate(timeout=max(deadline - time.monotonic(), 0.1))[1] for process in processes]
    assert [process.returncode for process in processes] == [2, 2]
    assert [error.count("1 of 3 ranks did not arrive in 4 s: rank 1") for error in errors] == [1, 1]


def test_who_did_not_come_is_named_where_no_collective_ends() -> None:
    """The watch itself compares how many collectives the ranks have begun."""
    codes, _, err = run_by_hand("one_is_stuck_on_a_device", [0, 1, 2], 3)
    assert codes == [1, 1, 1]
    host = socket.gethostname()
    assert err.count(f"lost the other ranks: rank 1 on {host} runs, but did not come") == 1
    assert "\n  rank 1: last seen starting, before the first step, collective 1 (barrier)\n" in err
    assert re.search(r"\n  rank [02]: starting, before the first step, collective 2 \(barrier\)\n", err)
    assert "no word from them for 3 s" in err


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


@pytest.mark.parametrize(
    "job", ["one_is_mistaken", "the_first_is_mistaken_before_it_meets", "all_are_mistaken_before_they_meet"]
)
def test_a_mistake_is_printed_once_on_each_console_without_traceback(job: str) -> None:
    """Ranks that are started by hand have a console each; one of them says that it is another's mistake."""
    codes, _, err = run_by_hand(job, [0, 1], 2, TORCH_CPP_LOG_LEVEL="ERROR")  # as the command line has it
    assert codes == [2, 2]
    message, host = "error: train.json is not there\n  give a file that exists\n", socket.gethostname()
    repeats = [f"rank {rank} ends too: rank {1 - rank} on {host} reports\n{message}" for rank in (0, 1)]
    assert err in (repeats[0] + message, message + repeats[1])


@pytest.mark.parametrize(
    ("launcher", "local_rank", "host", "expected"),
    [
        ("environment", 1, "here", True),
        ("procs", 1, "here", False),
        ("procs", 0, "there", True),
        ("procs", 1, "there", False),
        ("torchrun", 0, "there", True),
        ("openmpi", 0, "there", False),
        ("slurm", 0, "there", False),
    ],
)
def test_consoles_that_lack_a_mistake(launcher: str, local_rank: int, host: str, expected: bool) -> None:
    world = World(1, local_rank, 4, 2, 0, 2, launcher, "a:1")
    assert repeats(world, "here", Failure(0, host, "user", "error: no")) == expected
    assert not repeats(world, "here", Failure(1, host, "user", "error: no")), "its own"
    assert not repeats(world, "here", Failure(0, host, "crash", "no", "Traceback")), "it has a traceback"


def test_a_rank_that_dies_without_a_word() -> None:
    codes, _, err = run_by_hand("one_is_killed", [0, 1, 2], 3)
    assert codes == [1, -9, 1]
    assert err.count(f"lost the other ranks: rank 1 on {socket.gethostname()} ended without a word") == 1
    assert re.search(r"\n  rank [02]: starting, before the first step, collective 2 \(barrier\)\n", err)


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
