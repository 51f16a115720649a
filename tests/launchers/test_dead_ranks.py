"""A rank that dies or hangs: within twice the time-out the others have said who it was and ended, all with an error.

The message names the rank, its machine, the step and the collective; the stacks of the others are in their logs. No
launcher helps where ranks are started by hand. Ranks that never come are in tests/world/test_failure.py.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.forked import Forked
from tests.launchers import small
from tests.world.failure.test_together import free_port

COLLECTIVE_S = 8.0
RANKS = 3
HOST = socket.gethostname()


def start(words: list[str], stack: ExitStack, **env: str) -> Forked:
    """Start `paceline WORDS`, in a process that need not import torch again; the ranks of a launcher do."""
    process = stack.enter_context(Forked("paceline.cli.main", words, {**os.environ, **env}))
    stack.callback(process.kill)
    return process


def errors_in_time(processes: list[Forked], speaker: Forked) -> str:
    """What all have said on stderr. Who has not ended within twice the time-out of the bad moment fails the test."""
    assert any(line == "now\n" for line in speaker.stdout)
    deadline = time.monotonic() + 2 * COLLECTIVE_S
    return "".join(process.communicate(timeout=max(deadline - time.monotonic(), 0.1))[1] for process in processes)


def command(folder: Path, *more: str) -> list[str]:
    return small.words(folder, "--timeout-s", str(COLLECTIVE_S), *more, steps=10, task="Ends")


# Where the others find themselves when they notice.
PLACES = {
    "start": r"starting, before the first step, collective \d+ \((broadcast of \d+ float32|gather of values)\)",
    "step": r"training, step 3, collective \d+ \(sum of gradients of \d+ float32\)",
    "save": r"(saving, step 4|training, step 5), collective \d+ \(",  # the first save is at the end of the epoch
}


@pytest.mark.parametrize(
    "end",
    [
        *("1 step killed", "0 save killed", "2 step stuck"),
        *(pytest.param(end, marks=pytest.mark.long) for end in ("2 start killed", "1 save stuck")),
    ],
)
def test_it_is_named_and_all_end_in_time(end: str, tmp_path: Path) -> None:
    bad, place, how = end.split()
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(RANKS), "END": end}
    with ExitStack() as stack:
        processes = [start(command(tmp_path / "run"), stack, **meeting, RANK=str(rank)) for rank in range(RANKS)]
        text = errors_in_time(processes, processes[int(bad)])
    codes = [process.returncode for process in processes]
    assert codes.pop(int(bad)) == (-9 if how == "killed" else 1)
    assert codes == [1] * (RANKS - 1)
    fate = "ended without a word" if how == "killed" else r"(runs, but did not come|ended without a word)"
    assert re.search(rf"lost the other ranks: rank {bad} on {HOST} {fate}", text), text
    assert re.search(rf"\n  rank [^{bad}]: {PLACES[place]}", text), text
    assert "Traceback" not in text
    if how == "stuck":
        last = {"step": "training, step 2", "save": "saving, step 4"}[place]
        assert re.search(rf"\n  rank {bad}: last seen {last}, collective \d+ \(", text), text
    if place != "start":  # the run, and so the logs, are there
        logs = [(tmp_path / "run" / "logs" / f"rank-{rank}.log").read_text() for rank in range(RANKS)]
        if how == "stuck":
            assert re.search(r"all threads were here:\n(.|\n)*small\.py\", line \d+ in _end", logs[int(bad)])
        del logs[int(bad)]
        for log in logs:
            assert re.search(r' ERROR (.|\n)*File ".*src/paceline/train/loop.py", line \d+', log), log
            assert "all threads were here:\n" in log


def test_ranks_that_a_launcher_ends_at_once_have_left_their_stacks(tmp_path: Path) -> None:
    """Ours ends them as soon as it sees the dead one, as mpirun does: there is no time to look for who is gone."""
    with ExitStack() as stack:
        launcher = start(
            command(tmp_path / "run", "--procs", str(RANKS), "--on-failure", "stop"), stack, END="1 step killed"
        )
        text = errors_in_time([launcher], launcher)
    assert launcher.returncode == 1
    # The launcher says it, unless a rank that is left has found out before the launcher looked.
    assert re.search(rf"rank 1 on {HOST} (was ended by SIGKILL|ended without a word)", text), text
    for rank in (0, 2):
        log = (tmp_path / "run" / "logs" / f"rank-{rank}.log").read_text()
        assert re.search(
            rf"\nrank {rank} on {HOST} lost the other ranks: {PLACES['step']}; all threads were here:\n", log
        )


def test_a_stopped_rank_that_wakes_when_all_are_gone_does_not_blame_them(tmp_path: Path) -> None:
    """The first rank, which has told why, served the store: nobody is left to be asked."""
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2", "END": "1 step stopped"}
    with ExitStack() as stack:
        first, second = (start(command(tmp_path / "run"), stack, **meeting, RANK=str(rank)) for rank in range(2))
        assert first.wait(timeout=60) == 1
        second.send_signal(signal.SIGCONT)
        text = errors_in_time([second], second)
    assert second.returncode == 1
    assert re.search(rf"rank 1 on {HOST} lost the other ranks: it did not run for \d+ s itself", text), text
    assert "ended without a word" not in text
    assert "Traceback" not in text


def test_a_stopped_rank_under_our_own_launcher(tmp_path: Path) -> None:
    """The launcher lets it go on, so that it ends like the others, and says where it was."""
    with ExitStack() as stack:
        words = command(tmp_path / "run", "--procs", str(RANKS), "--on-failure", "stop")
        launcher = start(words, stack, END="1 step stopped")
        text = errors_in_time([launcher], launcher)
    assert launcher.returncode == 1
    assert f"lost the other ranks: rank 1 on {HOST} ended without a word (killed? out of memory?) or is stopped" in text
    assert re.search(rf"\n  rank [02]: {PLACES['step']}", text), text
    assert "Traceback" not in text
    assert re.search(r"small\.py\", line \d+ in _end", (tmp_path / "run" / "logs" / "rank-1.log").read_text())
