"""A real SLURM cluster of two machines: srun, and a job in the queue that is put back there and goes on."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launchers import small
from tests.launchers.conftest import wait_until
from tests.launchers.slurm import Slurm

STEPS = 40


@pytest.fixture(scope="module")
def by_srun(tmp_path_factory: pytest.TempPathFactory, slurm_cluster: Slurm) -> Path:
    out = tmp_path_factory.mktemp("srun") / "run"
    done = slurm_cluster.run(["srun", "-N2", "-n4", *small.command(out, steps=STEPS)])
    assert done.returncode == 0, done.stderr
    return out


def test_srun(by_srun: Path, expected: list[float], slurm_cluster: Slurm) -> None:
    small.assert_same_losses(by_srun, expected)
    small.assert_placed(by_srun, "slurm", [host.name for host in slurm_cluster.hosts])


def test_a_submitted_job_is_requeued_and_goes_on_exactly(by_srun: Path, tmp_path: Path, slurm_cluster: Slurm) -> None:
    """SLURM warns a job before its time is over; here `scancel` sends the same signal to the same process."""
    out = tmp_path / "a run"
    note = tmp_path / "it's $HOME"
    submit = [sys.executable, "-m", "paceline", "submit", "slurm", "--nodes", "2", "--procs-per-node", "2"]
    submit += ["--time", "1h", "--memory", "100M", "--partition", "main", "--setup", 'echo "$NOTE" > "$NOTE"']
    submit += ["--env", f"WARN='scancel --signal=USR1 --batch $SLURM_JOB_ID' NOTE=\"{note.as_posix()}\""]
    done = slurm_cluster.run([*submit, "--", *small.words(out, steps=STEPS, task="Warned")])
    assert done.returncode == 0, done.stderr
    job = done.stdout.split()[3]
    log = out / "batch" / f"slurm-{job}.log"

    def is_over() -> bool:
        return slurm_cluster.job(job)["JobState"] in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT")

    wait_until(is_over, lambda: f"{slurm_cluster.job(job)}\n{log.read_text() if log.exists() else 'no log'}")
    state = slurm_cluster.job(job)
    assert (state["JobState"], state["Restarts"], state["NumNodes"]) == ("COMPLETED", "1", "2"), log.read_text()
    assert small.losses(out) == small.losses(by_srun)
    assert len(small.losses(out)) == STEPS
    assert note.read_text() == f"{note}\n"
    assert sorted(path.suffix for path in (out / "batch").iterdir()) == [".log", ".sh"]


def test_what_slurm_refuses_is_said(tmp_path: Path, slurm_cluster: Slurm) -> None:
    submit = [sys.executable, "-m", "paceline", "submit", "slurm", "--partition", "nowhere"]
    done = slurm_cluster.run([*submit, "--", *small.words(tmp_path / "run")])
    assert done.returncode == 2
    assert "nvalid partition" in done.stderr
    assert f"the script is kept in {tmp_path / 'run' / 'batch'}" in done.stderr


def test_launchers_started_by_srun_find_their_place(tmp_path: Path, slurm_cluster: Slurm) -> None:
    """One per machine, without --node-rank and --master-addr."""
    launch = [sys.executable, "-m", "paceline", "launch", "--nnodes", "2", "--nproc-per-node", "2", "--device", "cpu"]
    done: subprocess.CompletedProcess[str] = slurm_cluster.run(
        ["srun", "-N2", "-n2", "--ntasks-per-node=1", *launch, "--", *small.words(tmp_path / "run", steps=1)]
    )
    assert done.returncode == 0, done.stderr
    small.assert_placed(tmp_path / "run", "procs", [host.name for host in slurm_cluster.hosts])


def test_doctor_looks_at_the_whole_allocation(tmp_path: Path, slurm_cluster: Slurm) -> None:
    doctor = [sys.executable, "-m", "paceline", "doctor", "--device", "cpu", "--folder", str(tmp_path), "--json"]
    done = slurm_cluster.run(["srun", "-N2", "-n2", *doctor])
    found = {entry["what"]: entry for entry in json.loads(done.stdout)}
    assert done.returncode == 0, done.stdout
    assert found["ranks"]["found"].startswith("2 on plh[1-2], by slurm")
    assert "gloo uses that of 10.213.7." in found["interfaces"]["found"]
    assert (found["run folder"]["verdict"], found["allocation"]["verdict"]) == ("ok", "ok")
    assert "64 MiB" in found["all-reduce bandwidth"]["found"]
