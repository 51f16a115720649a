"""The batch script for LSF: it gives the job slots on hosts, and `mpirun` or `jsrun` in the job starts the ranks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from paceline.world.launch.batch_script import (
    BatchJob,
    beginning,
    directive,
    job_name,
    join,
    log_file,
    mpirun,
    name,
    ranks_in_background,
)

Starter = Literal["openmpi", "mpich", "jsrun"]
REQUEUE_CODE = 99
"""A script that ends with this is put back into the queue by LSF (`-Q`)."""
_SPECIAL = '"\\$'


def lsf_script(job: BatchJob, starter: Starter = "openmpi") -> str:
    """Return the script for `bsub`, which reads it from its input.

    Before the job's time is over LSF sends USR1 (`-wa`, `-wt`) to all processes of the job's group, and USR2 at its
    end. The ranks know only USR1, so they get a group of their own (`set -m`).
    """
    lines = ["#!/bin/bash", *(f"#BSUB {line}" for line in _directives(job, starter)), "", *beginning(job)]
    if starter == "jsrun":
        command = join(_jsrun(job))  # the first host runs this script only: the ranks find the others by themselves
    else:
        lines += ["MASTER_ADDR=${LSB_MCPU_HOSTS%% *}", "export MASTER_ADDR"]
        command = mpirun(job, starter)
    lines += ["", "set -m", *ranks_in_background(command, job, pass_on="USR1 USR2")]
    if job.requeue:
        lines.append(f'[ -z "$told" ] || [ "$code" -ne 0 ] || exit {REQUEUE_CODE}')
    return "\n".join([*lines, 'exit "$code"', ""])


def _directives(job: BatchJob, starter: Starter) -> Iterator[str]:
    yield f"-J {job_name(job.name)}"
    if starter == "jsrun":
        yield f"-nnodes {job.nodes}"
    else:
        slots = job.procs_per_node * (job.cpus_per_rank or 1)
        yield f"-n {job.nodes * slots}"
        yield f'-R "span[ptile={slots}]"'
        if job.gpus_per_node:
            yield f'-gpu "num={job.gpus_per_node}"'  # for each host
    if job.time_s is not None:
        minutes = -(-job.time_s // 60)
        yield f"-W {minutes // 60}:{minutes % 60:02}"
        yield f"-wa 'USR1' -wt '{-(-job.signal_s // 60)}'"
    if job.memory_mib is not None:
        yield f'-R "rusage[mem={job.memory_mib}MB]"'
    if job.queue is not None:
        yield f"-q {name('--queue', job.queue)}"
    if job.account is not None:
        yield f"-P {name('--account', job.account)}"
    yield f"-o {log_file(Path(str(job.logs).replace('%', '%%')), 'lsf-%J.log', not_in_folder=_SPECIAL)}"
    yield "-r" if job.requeue else "-rn"
    if job.requeue:
        yield f'-Q "{REQUEUE_CODE}"'
    yield from map(directive, job.directives)


def _jsrun(job: BatchJob) -> list[str]:
    """One resource set per rank: `jsrun` counts GPUs and cores for each."""
    gpus = -(-job.gpus_per_node // job.procs_per_node)
    words = ["jsrun", "-n", str(job.ranks), "-r", str(job.procs_per_node), "-a", "1", "-c", str(job.cpus_per_rank or 1)]
    return [*words, *(["-g", str(gpus)] if gpus else []), "-b", "none"]
