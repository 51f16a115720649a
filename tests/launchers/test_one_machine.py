"""The same command under each launcher of one machine gives the losses of one process."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.launchers import small
from tests.launchers.conftest import need, run

RANKS = 2


def test_open_mpi(tmp_path: Path, expected: list[float]) -> None:
    need("mpirun.openmpi", packages="openmpi-bin")
    run(
        [
            "mpirun.openmpi",
            "--allow-run-as-root",
            "--oversubscribe",
            "-np",
            str(RANKS),
            *small.command(tmp_path / "run"),
        ]
    )
    small.assert_same_losses(tmp_path / "run", expected)
    small.assert_placed(tmp_path / "run", "openmpi", ranks=RANKS)


def test_mpich(tmp_path: Path, expected: list[float]) -> None:
    need("mpiexec.mpich", packages="mpich")
    run(["mpiexec.mpich", "-np", str(RANKS), *small.command(tmp_path / "run")])
    small.assert_same_losses(tmp_path / "run", expected)
    small.assert_placed(tmp_path / "run", "mpich", ranks=RANKS)


@pytest.mark.parametrize("module", ["torch.distributed.run", "torch.distributed.launch"])
def test_torchrun(module: str, tmp_path: Path, expected: list[float]) -> None:
    """`torch.distributed.run` is torchrun; `launch` puts `--local-rank=N` before our command."""
    launcher = [sys.executable, "-m", module, "--standalone", "--nproc-per-node", str(RANKS), "-m", "paceline"]
    run([*launcher, *small.words(tmp_path / "run")])
    small.assert_same_losses(tmp_path / "run", expected)
    small.assert_placed(tmp_path / "run", "torchrun", ranks=RANKS)
