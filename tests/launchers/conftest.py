"""What the launcher tests share: the losses to reach, machines, and schedulers that end with the session."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from tests.launchers import grid_engine as sge
from tests.launchers import hosts, slurm, small

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 240.0


@pytest.fixture(scope="session", autouse=True)
def _environment() -> Iterator[None]:
    """What the ranks inherit: this checkout, the commands of this interpreter, no daemon's variables."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{ROOT / 'src'}{os.pathsep}{ROOT}")
        # torch.distributed.launch says that it is deprecated; as an error it would not start.
        patch.delenv("PYTHONWARNINGS", raising=False)
        for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK"):
            patch.delenv(name, raising=False)
        yield


@pytest.fixture(scope="session")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of one process that no launcher started."""
    out = tmp_path_factory.mktemp("alone") / "run"
    run(small.command(out))
    return small.losses(out)


def run(words: Sequence[str], env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command that must end well."""
    done = subprocess.run(
        words, env={**os.environ, **(env or {})}, capture_output=True, text=True, timeout=TIMEOUT_S, cwd=ROOT
    )
    assert done.returncode == 0, f"{' '.join(words)}\n{done.stdout}\n{done.stderr}"
    return done


def run_all(commands: Sequence[Sequence[str]], env: dict[str, str] | None = None) -> list[tuple[int, str, str]]:
    """Run commands at the same time, as on several machines; exit code, output and errors of each."""
    processes = [
        subprocess.Popen(
            words,
            env={**os.environ, **(env or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        for words in commands
    ]
    try:
        texts = [process.communicate(timeout=TIMEOUT_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(process.returncode, *text) for process, text in zip(processes, texts, strict=True)]


def wait_until(ready: Callable[[], bool], situation: Callable[[], str]) -> None:
    """Ask a scheduler until it says yes; what it said last is shown if it never does."""
    deadline = time.monotonic() + TIMEOUT_S
    while not ready():
        assert time.monotonic() < deadline, situation()
        time.sleep(0.2)


def need(*programs: str, packages: str) -> None:
    """Skip where a program is not installed, and say what would bring it."""
    missing = [name for name in programs if shutil.which(name) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed (Debian: apt-get install {packages})")


@pytest.fixture(scope="session")
def machines() -> Iterator[list[hosts.Host]]:
    """Two machines with a network between them."""
    reason = hosts.why_not() if sys.platform == "linux" else "network namespaces are Linux's"
    if reason is not None:
        pytest.skip(reason)
    with hosts.machines(2) as made:
        yield made


@pytest.fixture(scope="session")
def slurm_cluster(machines: list[hosts.Host]) -> Iterator[slurm.Slurm]:
    need(*slurm.NEEDED, packages=slurm.PACKAGES)
    with slurm.cluster(machines) as made:
        yield made


@pytest.fixture(scope="session")
def grid_engine(machines: list[hosts.Host]) -> Iterator[sge.GridEngine]:
    need(*sge.NEEDED, packages=sge.PACKAGES)
    with sge.cluster(machines) as made:
        yield made
