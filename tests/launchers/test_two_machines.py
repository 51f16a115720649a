"""Two machines: two torchrun agents, `paceline launch` on both, and one mpirun over both."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.launchers import small
from tests.launchers.conftest import need, run, run_all
from tests.launchers.hosts import Host

RANKS = str(small.RANKS)
PER_NODE = str(small.RANKS // 2)


def names(machines: list[Host]) -> list[str]:
    return [host.name for host in machines]


def on_each(machines: list[Host], words: list[str], behind: list[str]) -> list[list[str]]:
    """The same command on each machine, with its own number."""
    return [host.command([*words, "--node-rank", str(rank), *behind]) for rank, host in enumerate(machines)]


def test_two_torchrun_agents(tmp_path: Path, expected: list[float], machines: list[Host]) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", PER_NODE]
    torchrun += ["--master-addr", machines[0].name, "--master-port", "29511"]
    done = run_all(on_each(machines, torchrun, ["-m", "paceline", *small.words(tmp_path / "run")]))
    assert [code for code, _, _ in done] == [0, 0], done
    small.assert_same_losses(tmp_path / "run", expected)
    small.assert_placed(tmp_path / "run", "torchrun", names(machines))


def test_paceline_launch(tmp_path: Path, expected: list[float], machines: list[Host]) -> None:
    launch = [sys.executable, "-m", "paceline", "launch", "--nnodes", "2", "--nproc-per-node", PER_NODE]
    launch += ["--master-addr", machines[0].address, "--master-port", "29512", "--device", "cpu"]
    done = run_all(on_each(machines, launch, ["--", *small.words(tmp_path / "run")]))
    assert [(code, err) for code, _, err in done] == [(0, ""), (0, "")], done
    small.assert_same_losses(tmp_path / "run", expected)
    small.assert_placed(tmp_path / "run", "procs", names(machines))


def test_open_mpi_over_both(tmp_path: Path, expected: list[float], machines: list[Host]) -> None:
    """No MASTER_ADDR: the ranks meet where mpirun runs."""
    need("mpirun.openmpi", packages="openmpi-bin")
    where = ",".join(f"{host.name}:{PER_NODE}" for host in machines)
    mpirun = ["mpirun.openmpi", "--allow-run-as-root", "--host", where, "-x", "PYTHONPATH"]
    mpirun += ["--mca", "plm_rsh_agent", machines[0].remote_shell, "--mca", "plm", "rsh"]
    run(machines[0].command([*mpirun, *small.command(tmp_path / "run")]))
    small.assert_same_losses(tmp_path / "run", expected)
    small.assert_placed(tmp_path / "run", "openmpi", names(machines))


@pytest.mark.long
def test_mpich_over_both(tmp_path: Path, expected: list[float], machines: list[Host]) -> None:
    need("mpiexec.mpich", packages="mpich")
    where = ",".join(f"{host.name}:{PER_NODE}" for host in machines)
    mpiexec = ["mpiexec.mpich", "-launcher", "ssh", "-launcher-exec", machines[0].remote_shell, "-hosts", where]
    environment = {"MASTER_ADDR": machines[0].name, "MASTER_PORT": "29513"}
    run(machines[0].command([*mpiexec, "-np", RANKS, *small.command(tmp_path / "run")]), environment)
    small.assert_same_losses(tmp_path / "run", expected)
    small.assert_placed(tmp_path / "run", "mpich", names(machines))
