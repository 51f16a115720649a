"""`--procs` beside a launcher: the number that is there, or a refusal that names who started the ranks."""

from __future__ import annotations

import pytest

from paceline.cli.main import main
from paceline.config.problems import SettingsInvalid
from paceline.world.discover.environment import World
from paceline.world.discover.procs import check_procs
from tests.world.discover.test_environment import OPEN_MPI


@pytest.mark.parametrize(
    ("launcher", "said"),
    [
        ("openmpi", "mpirun -np 3 ..."),
        ("mpich", "mpirun -np 3 ..."),
        ("slurm", "srun --ntasks-per-node=3 ..."),
        ("torchrun", "torchrun --nproc-per-node=3 ..."),
        ("procs", "paceline launch --nproc-per-node 3 -- ..."),
    ],
)
def test_another_number_than_the_launcher_s_is_refused(launcher: str, said: str) -> None:
    world = World(0, 0, 4, 2, 0, 2, launcher, "host:1")
    with pytest.raises(SettingsInvalid, match="with 2 ranks on this machine") as refused:
        check_procs(world, 3, "paceline train")
    assert refused.value.hint == f"leave out --procs, or type `{said}`"
    for fine in (1, 2, "auto"):
        check_procs(world, fine, "paceline train")  # type: ignore[arg-type]
    check_procs(World(0, 0, 1, 1, 0, 1, "plain", None), 3, "paceline train")


@pytest.mark.parametrize("words", ["train digits --epochs 1", "doctor", "tune digits --lr"])
def test_each_command_says_so(words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    alone = OPEN_MPI | dict.fromkeys(("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"), "1")
    alone |= dict.fromkeys(("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"), "0")
    for name, value in alone.items():
        monkeypatch.setenv(name, value)
    assert main([*words.split(), "--procs", "3"]) == 2
    shown = capsys.readouterr().err
    assert "--procs 3: this process was started by mpirun (Open MPI), with 1 rank on this machine" in shown
