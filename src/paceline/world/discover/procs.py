"""`--procs` beside a launcher that has started the ranks already."""

from __future__ import annotations

from typing import Literal

from paceline.config.problems import Problem, SettingsInvalid
from paceline.core.units import counted
from paceline.world.discover.environment import World

_TYPED = {
    "openmpi": ("mpirun (Open MPI)", "mpirun -np {procs} ..."),
    "mpich": ("mpirun (MPICH)", "mpirun -np {procs} ..."),
    "slurm": ("srun", "srun --ntasks-per-node={procs} ..."),
    "torchrun": ("torchrun", "torchrun --nproc-per-node={procs} ..."),
    "procs": ("paceline launch", "paceline launch --nproc-per-node {procs} -- ..."),
    "jsm": ("jsrun", "jsrun --np {procs} ..."),
    "pals": ("mpiexec (PALS)", "mpiexec --ppn {procs} ..."),
    "ray": ("Ray Train", "ScalingConfig(num_workers={procs})"),
    "azureml": ("AzureML", "process_count_per_instance: {procs}"),
    "vertex": ("Vertex AI", "paceline launch --nproc-per-node {procs} -- ..."),
    "sagemaker": ("SageMaker", "paceline launch --nproc-per-node {procs} -- ..."),
    "kubeflow": ("Kubeflow", "paceline launch --nproc-per-node {procs} -- ..."),
    "environment": ("RANK and WORLD_SIZE in the environment", "WORLD_SIZE={procs} ..."),
}
"""Launcher -> what people call it, and how it is told the number of ranks."""


def check_procs(world: World, asked: int | Literal["auto"], prog: str) -> None:
    """Refuse a number of ranks that the launcher around this process has not started; 1 and `auto` ask for nothing."""
    if world.launcher == "plain" or asked in (1, "auto", world.local_size):
        return
    name, typed = _TYPED.get(world.launcher, (world.launcher, ""))
    ranks = f"{counted(world.local_size, 'rank')}"
    what = f"this process was started by {name}, with {ranks} on this machine"
    hint = "leave out --procs" + (f", or type `{typed.format(procs=asked)}`" if typed else "")
    raise SettingsInvalid([Problem("--procs", what, hint, str(asked))], prog)
