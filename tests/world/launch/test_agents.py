"""Launchers of several machines: who is missing or doubled, and ranks that start again on all of them."""

from __future__ import annotations

import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
from tools.chaos.processes import fork_ranks

from paceline.core.errors import PacelineError
from paceline.world.launch.agents import AgentRendezvous, LauncherUnreached, Node, NodesMissing
from paceline.world.launch.heartbeat import HeartbeatMonitor
from paceline.world.launch.launcher import launch
from tests.forked import Forked
from tests.world.failure.test_together import TIMEOUT_S, free_port


def node(rank: int, port: int, count: int = 2, timeout_s: float = 30.0) -> Node:
    return Node(rank, count, f"127.0.0.1:{port}", timeout_s)


def come(place: Node, procs: int = 2, max_restarts: int = 1) -> AgentRendezvous | PacelineError:
    """A launcher that meets the others once."""
    try:
        meeting = AgentRendezvous(place, procs, max_restarts)
        meeting.next_rendezvous()
    except PacelineError as error:
        return error
    return meeting


def test_machines_may_differ_in_ranks() -> None:
    port = free_port()
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(come, [node(0, port), node(1, port)], [2, 3])
    assert isinstance(first, AgentRendezvous)
    assert isinstance(second, AgentRendezvous)
    assert (first.size, second.size, first.rounds, second.rounds) == (5, 5, 1, 1)
    # When one starts again, the other is told; each attempt once.
    assert (first.num_nodes_waiting(), second.num_nodes_waiting()) == (0, 0)
    with ThreadPoolExecutor(1) as pool:
        again = pool.submit(second.next_rendezvous)
        while not first.num_nodes_waiting():
            assert not again.done()
        first.next_rendezvous()
        again.result()
    assert (first.num_nodes_waiting(), second.rounds) == (0, 2)


def test_a_machine_that_does_not_come_is_named() -> None:
    port = free_port()
    error = come(node(0, port, count=3, timeout_s=0.3))
    assert isinstance(error, NodesMissing)
    assert error.missing == (1, 2)
    assert "2 of 3 nodes did not arrive in 0.3 s: node 1, 2" in str(error)
    lonely = come(node(1, free_port(), timeout_s=0.3))
    assert isinstance(lonely, LauncherUnreached)
    assert "node 1 on" in str(lonely)


@pytest.mark.parametrize(
    ("other", "max_restarts", "part"), [(0, 1, "rank 0 cannot listen"), (1, 2, "--max-restarts 2")]
)
def test_launchers_that_were_not_started_alike(other: int, max_restarts: int, part: str) -> None:
    port = free_port()
    with ThreadPoolExecutor(2) as pool:
        places = node(0, port, timeout_s=2.0), node(other, port, timeout_s=2.0)
        answers = list(pool.map(come, places, [2, 2], [1, max_restarts]))
    assert any(part in str(answer) for answer in answers)
    assert all(isinstance(answer, PacelineError) for answer in answers)


def test_the_same_number_twice() -> None:
    port = free_port()
    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(come, node(0, port, count=3, timeout_s=3.0))
        second = pool.submit(come, node(1, port, count=3, timeout_s=3.0))
        third = pool.submit(come, node(1, port, count=3, timeout_s=3.0), procs=1)
        answers = [each.result() for each in (first, second, third)]
    assert sum("two launchers say --node-rank 1" in str(answer) for answer in answers) == 1


def main() -> int:
    """The launcher of a machine, a program of its own; two ranks on the first, one on the second."""
    fork_ranks()
    rank, port, restarts, job = sys.argv[1:]
    place, command = node(int(rank), int(port), timeout_s=60.0), [sys.executable, "-m", "tests.world.jobs", job]
    return launch(2 - int(rank), command, device="cpu", max_restarts=int(restarts), node=place)


def run_both(job: str, max_restarts: int, victim: int | None = None) -> list[tuple[int | None, str, str]]:
    """Two launchers, as on two machines; exit code, output and errors of each.

    The launcher `victim` is killed as soon as rank 0 says that it is ready.
    """
    port = str(free_port())
    with ExitStack() as stack:
        processes = [
            stack.enter_context(Forked(__name__, [str(rank), port, str(max_restarts), job])) for rank in range(2)
        ]
        for process in processes:
            stack.callback(process.kill)
        if victim is not None:
            assert processes[0].stdout.readline() == "ready\n"
            processes[victim].kill()
        texts = [process.communicate(timeout=2 * TIMEOUT_S) for process in processes]
    return [(process.returncode, *text) for process, text in zip(processes, texts, strict=True)]


def test_ranks_start_again_on_all_machines() -> None:
    """Rank 1 dies on the first machine; the second one's ranks are started again, too, and all agree on the attempt."""
    (first, out, _), (second, _, err) = run_both("one_is_killed", max_restarts=1)
    assert (first, second) == (0, 0), err
    assert out == "finished in attempt 1\n"
    *before, last = err.splitlines()
    assert last == "a rank ended early: starting all ranks again (0 more restarts allowed)"
    # Whether a rank that is left comes to say whom it lost, before its launcher ends it, is chance.
    assert not before or "rank 1 on " in err


def test_a_crash_is_printed_once_and_ends_both() -> None:
    done = run_both("one_crashes", max_restarts=0)
    assert [code for code, _, _ in done] == [1, 1]
    errors = "".join(err for _, _, err in done)
    assert errors.count("Traceback") == 1
    assert errors.splitlines()[-2].endswith("RuntimeError: rank one has a bug")
    assert errors.splitlines()[-1] == "  rank 1: starting, before the first step, collective 1 (barrier)"


def test_a_launcher_that_is_killed_is_named_by_the_other() -> None:
    """Its ranks save and leave, and so all do: for the launcher that is left this looks like an end that went well."""
    (first, out, err), (second, _, _) = run_both("save_when_told", max_restarts=1, victim=1)
    assert (first, second) == (1, -9)
    assert "rank 0 saved" in out
    assert err == f"error: the launcher of node 1 on {socket.gethostname()} ended without a word (killed?)\n"


def test_a_launcher_is_silent_when_nothing_new_was_heard_for_long() -> None:
    listener = HeartbeatMonitor(silent_s=5.0)
    assert listener.silent({0: 3, 1: 7}, 100.0) == set()  # counted from here, whatever was before
    assert listener.silent({0: 4, 1: 7}, 104.0) == set()
    assert listener.silent({0: 4, 1: 7}, 105.0) == {1}
    assert listener.silent({0: 4, 1: 8}, 106.0) == set()
    assert listener.silent({0: 4, 1: 8}, 109.0) == {0}
