"""`--procs N` with real processes: what comes out, the exit code, signals, restarts."""

from __future__ import annotations

import signal
import socket
import sys
from pathlib import Path

import pytest
from tools.chaos.processes import fork_ranks

from paceline.world.launch.launcher import launch
from tests.forked import Forked

TIMEOUT_S = 60


def main() -> int:
    """The launcher of two ranks, a program of its own; its words: how to start them, restarts, job, its arguments."""
    how, restarts, *job = sys.argv[1:]
    if how == "forked":
        fork_ranks()
    command = [sys.executable, "-m", "tests.world.jobs", *job]
    return launch(2, command, device="cpu", max_restarts=int(restarts), grace_s=20.0)


def begin(job: str, *arguments: str, max_restarts: int = 0, how: str = "forked") -> Forked:
    """Start a launcher; `how` its ranks begin: `forked` from it, or `started` as users have them."""
    return Forked(__name__, [how, str(max_restarts), job, *arguments])


def finish(process: Forked) -> tuple[int | None, str, str]:
    try:
        out, err = process.communicate(timeout=TIMEOUT_S)
    finally:
        process.kill()
    return process.returncode, out, err


def run(job: str, *arguments: str, max_restarts: int = 0, how: str = "forked") -> tuple[int | None, str, str]:
    return finish(begin(job, *arguments, max_restarts=max_restarts, how=how))


def test_two_procs_add_up_and_nothing_else_is_said() -> None:
    assert run("add_up", how="started") == (0, "sum 1 of 2 by procs, attempt 0\n", "")


def test_arguments_arrive_unchanged(tmp_path: Path) -> None:
    arguments = ["$HOME", "${local_rank}", "$$", "a b"]
    code, _, err = run("show_arguments", str(tmp_path), *arguments, how="started")
    assert (code, err) == (0, "")
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == dict.fromkeys("01", " ".join(arguments))


def test_a_crash_is_printed_once() -> None:
    code, _, err = run("one_crashes")
    assert code == 1
    assert err.count("Traceback") == 1
    assert "ChildFailedError" not in err
    assert err.splitlines()[-2].endswith("RuntimeError: rank one has a bug")
    assert err.splitlines()[-1] == "  rank 1: starting, before the first step, collective 1 (barrier)"


@pytest.mark.parametrize("max_restarts", [0, 2])
def test_a_mistake_gives_exit_code_2_and_is_not_tried_again(max_restarts: int) -> None:
    assert run("all_are_mistaken_before_they_meet", max_restarts=max_restarts) == (
        2,
        "",
        "error: train.json is not there\n  give a file that exists\n",
    )


def test_a_killed_rank_is_named() -> None:
    code, _, err = run("one_is_killed")
    assert code == 1
    first, second = err.splitlines()
    assert first == f"error: rank 1 on {socket.gethostname()} was ended by SIGKILL (out of memory? see `dmesg`)"
    assert second.startswith("  last seen starting, before the first step, ")


def test_the_others_learn_from_the_launcher_who_was_killed() -> None:
    code, _, err = run("one_is_killed_and_the_other_listens")
    assert code == 1
    host = socket.gethostname()
    lost = f"rank 0 on {host} lost the other ranks: rank 1 on {host} ended without a word (killed? out of memory?)"
    assert lost in err


def test_a_killed_rank_is_restarted_over_gloo() -> None:
    code, out, err = run("one_is_killed", max_restarts=1)
    assert (code, out) == (0, "finished in attempt 1\n")
    assert err == "a rank ended early: starting all ranks again (0 more restarts allowed)\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_ranks_save_and_leave_when_told(number: signal.Signals) -> None:
    process = begin("save_when_told", max_restarts=1)
    assert process.stdout.readline() == "ready\n"
    process.send_signal(number)
    code, out, err = finish(process)
    assert (code, err) == (0, "")
    assert sorted(out.splitlines()) == ["rank 0 saved", "rank 1 saved"]


def test_a_signal_before_ranks_can_handle_it_is_no_crash() -> None:
    """It was exit code 1, without a word."""
    process = begin("wait_for_interrupt", max_restarts=1)
    assert [process.stdout.readline() for _ in range(2)] == ["ready\n"] * 2
    process.send_signal(signal.SIGTERM)
    code, _, err = finish(process)
    assert (code, err) == (143, "SIGTERM: asked to stop before the ranks had begun, so nothing was done\n")


def test_ranks_do_not_outlive_a_killed_launcher() -> None:
    process = begin("compute_forever", how="started")
    assert [process.stdout.readline() for _ in range(2)] == ["ready\n"] * 2
    process.kill()
    # The ranks hold the other ends of these pipes: they close when the last rank has ended. Linux sends them SIGTERM,
    # of which this job dies; elsewhere their watch notices.
    _, _, err = finish(process)
    where = "  starting, before the first step, collective 1 (barrier)"
    assert set(err.splitlines()) <= {where, *(f"rank {rank}: the launcher is gone, leaving" for rank in range(2))}


def test_control_c() -> None:
    process = begin("wait_for_interrupt", max_restarts=1)
    assert [process.stdout.readline() for _ in range(2)] == ["ready\n"] * 2
    process.send_signal(signal.SIGINT)
    code, _, err = finish(process)
    assert (code, err) == (130, "")
