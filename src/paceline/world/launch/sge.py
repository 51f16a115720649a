"""The batch script for Grid Engine: it gives the job slots on hosts, and `mpirun` inside the job starts the ranks."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from paceline.core.errors import PacelineError
from paceline.world.launch.batch_script import BatchJob, beginning, ranks_in_background

REQUEUE_CODE = 99
"""A script that ends with this is put back into the queue by Grid Engine itself."""


@dataclass(frozen=True)
class GridEngine:
    """Choices of a site that Grid Engine leaves open."""

    parallel_environment: str = "mpi"
    mpi: Literal["openmpi", "mpich"] = "openmpi"
    gpu_resource: str = "gpu"
    """Name of the resource that counts GPUs; Grid Engine counts resources per slot."""
    memory_resource: str = "mem_free"
    """Name of the resource for memory, per slot too."""


class GpusPerSlot(PacelineError):
    """GPUs cannot be shared out evenly to the slots of a machine."""

    gpus: int
    slots: int
    sentence = "{gpus} GPUs for {slots} slots on each machine: Grid Engine counts GPUs per slot"
    hint = "ask for as many ranks as GPUs and no --cpus-per-rank, or leave GPUs to --directives, in your site's words"


def sge_script(job: BatchJob, site: GridEngine) -> str:
    """Return the script for `qsub`.

    Grid Engine warns by USR1 at the soft time limit and before a stop, and by USR2 before a kill (`-notify`), all
    processes of the script's group at once. The ranks know only USR1, so they get a group of their own (`set -m`).
    The script then queues itself again. Ending with 99 would be shorter, but Grid Engine 8.1.9 keeps a job that had
    several hosts waiting for a clean-up of the others; it is what is left where jobs may not submit jobs.
    """
    lines = ["#!/bin/bash", *(f"#$ {line}" for line in _directives(job, site)), "", *beginning(job)]
    lines += ['MASTER_ADDR=$(head -n 1 "$PE_HOSTFILE" | cut -d " " -f 1)', "export MASTER_ADDR"]
    lines += ["", "set -m", *ranks_in_background(_mpirun(job, site), job, pass_on="USR1 USR2")]
    if job.requeue:
        lines += ['if [ -n "$told" ] && [ "$code" -eq 0 ]; then', f'  qsub "$JOB_SCRIPT" || exit {REQUEUE_CODE}', "fi"]
    return "\n".join([*lines, 'exit "$code"', ""])


def _directives(job: BatchJob, site: GridEngine) -> Iterator[str]:
    slots_per_node = job.procs_per_node * (job.cpus_per_rank or 1)
    slots = job.nodes * slots_per_node
    if job.gpus_per_node % slots_per_node:
        raise GpusPerSlot(job.gpus_per_node, slots_per_node)
    yield "-S /bin/bash"
    yield f"-N {job.name}"
    yield "-V"
    yield f"-pe {site.parallel_environment} {slots}"
    if job.queue is not None:
        yield f"-q {job.queue}"
    if job.account is not None:
        yield f"-A {job.account}"
    if job.time_s is not None:
        yield f"-l h_rt={job.time_s},s_rt={max(job.time_s - job.signal_s, 1)}"
    if job.memory_mib is not None:
        yield f"-l {site.memory_resource}={-(-job.memory_mib // slots_per_node)}M"
    if job.gpus_per_node:
        yield f"-l {site.gpu_resource}={job.gpus_per_node // slots_per_node}"
    yield "-notify"
    yield "-j y"
    yield f'-o "{job.logs}/sge-$JOB_ID.log"'
    yield f"-r {'y' if job.requeue else 'n'}"
    yield from job.directives


def _mpirun(job: BatchJob, site: GridEngine) -> str:
    """Open MPI gives its ranks on other hosts only the variables that it is told; MPICH gives them all."""
    if site.mpi == "mpich":
        return shlex.join(["mpiexec", "-np", str(job.ranks), "-ppn", str(job.procs_per_node)])
    names = ["MASTER_ADDR", *(name for name, _ in job.environment)]
    exported = [word for name in names for word in ("-x", name)]
    # One slot per core: a rank then takes several. With one slot per rank, its threads are ours to choose: bound to the
    # core of its slot it could use no other.
    cores = ["--map-by", f"slot:PE={job.cpus_per_rank}"] if job.cpus_per_rank is not None else ["--bind-to", "none"]
    return shlex.join(["mpirun", "-np", str(job.ranks), *cores, *exported])
