"""A real Grid Engine cluster of two machines: a submitted job, its ranks by mpirun, and one that goes back and on."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tests.launchers import small
from tests.launchers.conftest import need, wait_until
from tests.launchers.grid_engine import GridEngine

STEPS = 40
# Open MPI does not run for root unless told twice.
AS_ROOT = "OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1"


def test_a_submitted_job_goes_back_into_the_queue_and_on(
    tmp_path: Path, expected: list[float], grid_engine: GridEngine
) -> None:
    """Grid Engine warns a job's script by a signal before its time is over; here a rank sends it, to the same one."""
    need("mpirun", packages="openmpi-bin")
    out = tmp_path / "a run"
    submit = [sys.executable, "-m", "paceline", "submit", "sge", "--nodes", "2", "--procs-per-node", "2"]
    submit += ["--queue", "all.q", "--time", "1h", "--setup", f"echo $$ > {tmp_path}/script-pid"]
    submit += [
        "--env",
        f"{AS_ROOT} PYTHONPATH='{os.environ['PYTHONPATH']}' WARN='kill -USR1 $(cat {tmp_path}/script-pid)'",
    ]
    done = grid_engine.run([*submit, "--", *small.words(out, steps=STEPS, task="Warned")])
    assert done.returncode == 0, done.stderr
    batch = out / "batch"

    def is_over() -> bool:
        queued = grid_engine.run(["qstat"])
        return queued.returncode == 0 and queued.stdout == ""

    wait_until(is_over, lambda: grid_engine.run(["qstat", "-j", "*"]).stdout + read_logs(batch))
    small.assert_same_losses(out, expected)
    assert len(small.losses(out)) == STEPS, read_logs(batch)
    assert "asked to stop: saved after step" in read_logs(batch)
    assert len(list(batch.glob("sge-*.log"))) == 2, "the job was queued a second time"
    hosts = small.hosts(out)
    assert sorted(hosts) == sorted(host.name for host in grid_engine.hosts)
    small.assert_placed(out, "openmpi", hosts)


def read_logs(batch: Path) -> str:
    return "\n".join(path.read_text() for path in sorted(batch.glob("sge-*.log")))
