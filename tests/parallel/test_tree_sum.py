"""What a process that sums in the order of the tree leaves behind; tests/train/test_exact_sums.py proves the bits."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

LEAVE = """
import os, sys
from datetime import timedelta
import torch
import torch.distributed as dist
from paceline.core.sum_tree import even_starts, layout
from paceline.parallel.tree_sum import TreeSum

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
sums, plan = TreeSum(dist.group.WORLD, torch.device("cpu"), patience), layout(even_starts(3, 3))
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
