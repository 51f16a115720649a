"""The batch script for SLURM: `srun` starts the ranks, which find each other through the job's list of hosts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from paceline.world.launch.batch_script import (
    BatchJob,
    beginning,
    directive,
    job_name,
    join,
    log_file,
    name,
    ranks_in_background,
)

_SPECIAL = '"\\'


def slurm_script(job: BatchJob) -> str:
    """Return the script for `sbatch`.

    Before the job's time is over SLURM sends USR1 to this script only (`B:`), which passes it to `srun`, and `srun` to
    the ranks: they save and leave, and the job goes back into the queue. A job that SLURM itself pre-empts or that
    loses a node is put there by SLURM.
    """
    lines = ["#!/bin/bash", *(f"#SBATCH {line}" for line in _directives(job)), "", *beginning(job)]
    srun = ["srun", "--kill-on-bad-exit=1"]
    if job.cpus_per_rank is not None:
        srun.append(f"--cpus-per-task={job.cpus_per_rank}")  # not inherited from the job since SLURM 22.05
    lines += ["", *ranks_in_background(join(srun), job, pass_on="USR1")]
    if job.requeue:
        lines += ['if [ -n "$told" ] && [ "$code" -eq 0 ]; then', '  scontrol requeue "$SLURM_JOB_ID"', "fi"]
    return "\n".join([*lines, 'exit "$code"', ""])


def _directives(job: BatchJob) -> Iterator[str]:
    yield f"--job-name={job_name(job.name)}"
    yield f"--nodes={job.nodes}"
    yield f"--ntasks-per-node={job.procs_per_node}"
    if job.gpus_per_node:
        yield f"--gpus-per-node={job.gpus_per_node}"
    if job.cpus_per_rank is not None:
        yield f"--cpus-per-task={job.cpus_per_rank}"
    if job.time_s is not None:
        yield f"--time={_clock(job.time_s)}"
        yield f"--signal=B:USR1@{job.signal_s}"
    if job.memory_mib is not None:
        yield f"--mem={job.memory_mib}M"
    if job.queue is not None:
        yield f"--partition={name('--partition', job.queue)}"
    if job.account is not None:
        yield f"--account={name('--account', job.account)}"
    # A % begins a pattern, a backslash says that there are none, the quotes are for spaces.
    yield f"--output={log_file(Path(str(job.logs).replace('%', '%%')), 'slurm-%j.log', not_in_folder=_SPECIAL)}"
    yield "--open-mode=append"
    yield "--requeue" if job.requeue else "--no-requeue"
    yield from map(directive, job.directives)


def _clock(time_s: int) -> str:
    """Days-hours:minutes:seconds; SLURM reads fewer parts in its own way."""
    minutes, rest = divmod(time_s, 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    return f"{days}-{hours:02}:{minutes:02}:{rest:02}"
