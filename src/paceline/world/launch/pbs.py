"""The batch script for PBS (OpenPBS, PBS Professional): it gives the job machines, and `mpiexec` starts the ranks."""

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
    quote,
    ranks_in_background,
)

Starter = Literal["openmpi", "mpich", "pals"]
_SPECIAL = '"\\$'


def pbs_script(job: BatchJob, script: Path, starter: Starter = "openmpi") -> str:
    """Return the script for `qsub`; `script` is where it is kept, from where it queues itself again.

    PBS has no warning before the end of the time, so the script has a clock of its own that sends it USR1. At the end
    PBS sends TERM, by which the ranks save and leave, too, if they are given the time.
    """
    lines = ["#!/bin/bash", *(f"#PBS {line}" for line in _directives(job)), "", *beginning(job)]
    lines += ['MASTER_ADDR=$(head -n 1 "$PBS_NODEFILE")', "export MASTER_ADDR"]
    if starter == "pals":
        lines.append(f"export WORLD_SIZE={job.ranks}")  # which PALS does not say
        command = join(["mpiexec", "-n", str(job.ranks), "--ppn", str(job.procs_per_node)])
    else:
        command = mpirun(job, starter, slot_is_rank=True)
    lines += [""]
    if job.time_s is not None:
        lines += [f"(sleep {max(job.time_s - job.signal_s, 1)}; kill -USR1 $$) &", "clock=$!"]
    lines += ["set -m", *ranks_in_background(command, job, pass_on="USR1")]
    if job.time_s is not None:
        lines.append('kill "$clock" 2>/dev/null')
    if job.requeue:
        lines += ['if [ -n "$told" ] && [ "$code" -eq 0 ]; then', f"  qsub {quote(str(script))}", "fi"]
    return "\n".join([*lines, 'exit "$code"', ""])


def _directives(job: BatchJob) -> Iterator[str]:
    yield f"-N {job_name(job.name)[:15]}"  # older versions take no more letters
    chunk = [f"{job.nodes}", f"ncpus={job.procs_per_node * (job.cpus_per_rank or 1)}", f"mpiprocs={job.procs_per_node}"]
    if job.gpus_per_node:
        chunk.append(f"ngpus={job.gpus_per_node}")
    if job.memory_mib is not None:
        chunk.append(f"mem={job.memory_mib}mb")
    yield f"-l select={':'.join(chunk)}"
    yield "-l place=scatter" if job.nodes > 1 else "-l place=pack"
    if job.time_s is not None:
        minutes, rest = divmod(job.time_s, 60)
        yield f"-l walltime={minutes // 60:02}:{minutes % 60:02}:{rest:02}"
    if job.queue is not None:
        yield f"-q {name('--queue', job.queue)}"
    if job.account is not None:
        yield f"-A {name('--account', job.account)}"
    yield "-j oe"
    yield f"-o {log_file(job.logs, 'pbs.log', not_in_folder=_SPECIAL + ':^')}"
    yield f"-r {'y' if job.requeue else 'n'}"
    yield from map(directive, job.directives)
