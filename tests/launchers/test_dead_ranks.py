"""A rank that dies or hangs: within twice the time-out the others have said who it was and ended, all with an error.

No launcher helps: the ranks are started by hand. Ranks that never come are in tests/world/test_failure.py.
"""

from __future__ import annotations

import os
import socket
import subprocess
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.launchers import small
from tests.world.test_failure import free_port

COLLECTIVE_S = 8.0
RANKS = 3


@pytest.mark.parametrize("end", ["1 step killed", "2 step stuck", "0 save killed"])
def test_it_is_named_and_all_end_in_time(end: str, tmp_path: Path) -> None:
    command = small.command(tmp_path / "run", "--timeout-s", str(COLLECTIVE_S), steps=10, task="Ends")
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    env = {**os.environ, **meeting, "END": end, "WORLD_SIZE": str(RANKS)}
    bad = int(end.split()[0])
    with ExitStack() as stack:
        processes = [
            stack.enter_context(
                subprocess.Popen(
                    command, env={**env, "RANK": str(rank)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
                )
            )
            for rank in range(RANKS)
        ]
        for process in processes:
            stack.callback(process.kill)
        stdout = processes[bad].stdout
        assert stdout is not None
        assert any(line == "now\n" for line in stdout)
        # From here on the time counts: whoever has not ended when it is over fails the test.
        deadline = time.monotonic() + 2 * COLLECTIVE_S
        errors = [process.communicate(timeout=max(deadline - time.monotonic(), 0.1))[1] for process in processes]
    codes = [process.returncode for process in processes]
    assert codes[bad] == (-9 if "killed" in end else 1)
    assert [code for rank, code in enumerate(codes) if rank != bad] == [1] * (RANKS - 1)
    text = "".join(errors)
    assert f"lost the other ranks: rank {bad} on {socket.gethostname()} ended without a word" in text
