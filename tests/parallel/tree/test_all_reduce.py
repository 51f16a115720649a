"""Sums in the order of the tree leave no state behind; tests/promises/test_exact_sums.py proves the bits."""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.core.sum_tree import even_starts, layout
from paceline.parallel.tree.all_reduce import TreeAllReduce

LEAVE = """
import os, sys
from datetime import timedelta
import torch
import torch.distributed as dist
from paceline.core.sum_tree import even_starts, layout
from paceline.parallel.tree.all_reduce import TreeAllReduce

torch.set_num_threads(1)
children = []
for rank in range(3):
    child = os.fork()
    if child == 0:
        break
    children.append(child)
else:
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    print("codes", codes)
    sys.exit(0)

patience = timedelta(seconds=60)
store = dist.FileStore(sys.argv[1], 3)
dist.init_process_group("gloo", store=store, rank=rank, world_size=3, timeout=patience)
sums, plan = TreeAllReduce(dist.group.WORLD, torch.device("cpu"), patience), layout(even_starts(3, 3))
numbers = torch.ones(sums.pad(300_000))
sums.start(numbers.clone(), [numbers], plan)
sums.poll()
sums.finish()
if rank < 2:  # the third does not come: these wait in a thread when they leave
    sums.start(numbers.clone(), [numbers], plan)
    sums.poll()
dist.barrier()
sys.exit(3)
"""


def test_ranks_that_leave_in_the_middle_of_a_sum_keep_their_exit_code(tmp_path: Path) -> None:
    script = tmp_path / "leave.py"
    script.write_text(LEAVE, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "store")],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
        check=False,
    )
    assert "codes [3, 3, 3]" in done.stdout, done.stdout + done.stderr


class Silent:
    """A message from a peer that is gone: whoever waits for it learns so."""

    def __init__(self, waited: list[int], number: int) -> None:
        self._waited, self._number = waited, number

    def wait(self, timeout: timedelta | None = None) -> None:
        self._waited.append(self._number)
        raise RuntimeError(f"message {self._number} did not come")


class Gone:
    """A group of three ranks of which only this one is there."""

    def __init__(self) -> None:
        self.waited: list[int] = []
        self._num_messages = 0

    def size(self) -> int:
        return 3

    def rank(self) -> int:
        return 0

    def recv(self, *_: Any) -> Silent:
        self._num_messages += 1
        return Silent(self.waited, self._num_messages)

    send = recv


def test_after_an_error_nothing_more_is_waited_for() -> None:
    """Neither for a sum that was started later, nor for those of the same time; the first error is raised, once."""
    group = Gone()
    sums, plan = TreeAllReduce(group, torch.device("cpu")), layout(even_starts(3, 3))  # type: ignore[arg-type]
    for _ in range(2):
        sums.start(torch.ones(6), [torch.ones(6)], plan)
    sums._go_on_beside()  # as the thread beside the backward pass does
    assert group.waited == [1]
    sums.start(torch.ones(6), [torch.ones(6)], plan)
    sums._plain.append(Silent(group.waited, 99))  # type: ignore[arg-type]
    sums._go_on_beside()
    with pytest.raises(RuntimeError, match="^message 1 did not come$"):
        sums.finish()
    assert group.waited == [1]
    sums.finish()
    assert group.waited == [1]
