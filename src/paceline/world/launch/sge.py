"""The batch script for Grid Engine: it gives the job slots on hosts, and `mpirun` inside the job starts the ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from paceline.core.errors import PacelineError
from paceline.world.launch.batch_script import (
    BatchJob,
    beginning,
    directive,
    job_name,
    log_file,
    mpirun,
    name,
    quote,
    ranks_in_background,
)

REQUEUE_CODE = 99
"""A script that ends with this is put back into the queue by Grid Engine itself."""
_SPECIAL = '"\\\\$:,'
"""In the path of a log: `host:path`, several with commas between, and variables."""


@dataclass(frozen=True)
class GridEngine:
    """Choices of a site that Grid Engine leaves open."""

    parallel_environment: str = "mpi"
    """What gives slots; its allocation rule decides on how many hosts they are."""
    mpi: Literal["openmpi", "mpich"] = "openmpi"
    gpu_resource: str = "gpu"
    """Name of the resource that counts GPUs; Grid Engine counts resources per slot."""
    memory_resource: str = "mem_free"
    """Name of the resource for memory, per slot too."""


class GpusPerSlot(PacelineError):
    """GPUs cannot be shared out evenly to the slots of a machine."""

    gpus: int
    slots: int
    sentence = "{gpus:#GPU} for {slots:#slot} on each machine: Grid Engine counts GPUs per slot"
    hint = "ask for as many ranks as GPUs and no --cpus-per-rank, or leave GPUs to --directives, in your site's words"


ONE_HOST = "$pe_slots"
"""Allocation rule of a parallel environment that gives all slots on one host."""
_OFTEN_ONE_HOST = ("smp", "threaded", "threads", "openmp", "shm")
_OFTEN_SEVERAL = "mpi"


class SlotsOnSeveralHosts(PacelineError):
    """One machine is asked for, and Grid Engine would give slots wherever some are free."""

    slots: int
    environment: str | None
    """As typed."""
    rules: Mapping[str, str]
    """Allocation rule of each parallel environment."""
    sentence = "{subject} {slots} slots on one machine (`--nodes 1`)"
    hint = "{advice}"

    @property
    def subject(self) -> str:
        if self.environment is None:
            return "no parallel environment here promises"
        rule = self.rules[self.environment]
        return f"parallel environment {self.environment} (allocation rule {rule}) does not promise"

    @property
    def advice(self) -> str:
        fitting = environments_of_one_host(self.rules, self.slots)
        if fitting:
            return f"type `--parallel-environment {fitting[0]}`"
        known = ", ".join(f"{name} ({rule})" for name, rule in self.rules.items()) or "none"
        return f"one with the allocation rule `{ONE_HOST}` does (`man sge_pe`); there are: {known}"


def environments_of_one_host(rules: Mapping[str, str], slots: int) -> list[str]:
    """Return the parallel environments that give `slots` slots on one host, those with a usual name first."""
    fitting = [name for name, rule in rules.items() if rule in (ONE_HOST, str(slots))]
    return sorted(fitting, key=lambda name: (name not in _OFTEN_ONE_HOST, name))


def choose_environment(typed: str | None, rules: Mapping[str, str] | None, job: BatchJob) -> str:
    """Return the parallel environment of a job: as typed, or one whose allocation rule keeps one machine's slots there.

    Args:
        typed: The user's choice.
        rules: Allocation rule by parallel environment, as `qconf` shows them; None where there is no `qconf`.
        job: The job.
    """
    slots = job.nodes * job.procs_per_node * (job.cpus_per_rank or 1)
    if job.nodes > 1 or slots == 1:
        return typed or _OFTEN_SEVERAL
    if rules is None or (typed is not None and typed not in rules):
        return typed or _OFTEN_ONE_HOST[0]
    fitting = environments_of_one_host(rules, slots)
    if typed is None and fitting:
        return fitting[0]
    if typed is None or typed not in fitting:
        raise SlotsOnSeveralHosts(slots, typed, rules)
    return typed


def sge_script(job: BatchJob, site: GridEngine) -> str:
    """Return the script for `qsub`.

    Grid Engine warns by USR1 at the soft time limit and before a stop, and by USR2 before a kill (`-notify`), all
    processes of the script's group at once. The ranks know only USR1, so they get a group of their own (`set -m`).
    The script then queues itself again. Ending with 99 would be shorter, but Grid Engine 8.1.9 keeps a job that had
    several hosts waiting for a clean-up of the others; it is what is left where jobs may not submit jobs.
    """
    lines = ["#!/bin/bash", *(f"#$ {line}" for line in _directives(job, site)), "", *beginning(job)]
    lines += ['MASTER_ADDR=$(head -n 1 "$PE_HOSTFILE" | cut -d " " -f 1)', "export MASTER_ADDR"]
    if job.nodes == 1:
        lines += list(_one_host(site))
    lines += ["", "set -m", *ranks_in_background(mpirun(job, site.mpi), job, pass_on="USR1 USR2")]
    if job.requeue:
        lines += ['if [ -n "$told" ] && [ "$code" -eq 0 ]; then', f'  qsub "$JOB_SCRIPT" || exit {REQUEUE_CODE}', "fi"]
    return "\n".join([*lines, 'exit "$code"', ""])


def _directives(job: BatchJob, site: GridEngine) -> Iterator[str]:
    slots_per_node = job.procs_per_node * (job.cpus_per_rank or 1)
    slots = job.nodes * slots_per_node
    if job.gpus_per_node % slots_per_node:
        raise GpusPerSlot(job.gpus_per_node, slots_per_node)
    yield "-S /bin/bash"
    yield f"-N {job_name(job.name)}"
    yield "-V"
    yield f"-pe {name('--parallel-environment', site.parallel_environment)} {slots}"
    if job.queue is not None:
        yield f"-q {name('--queue', job.queue)}"
    if job.account is not None:
        yield f"-A {name('--account', job.account)}"
    if job.time_s is not None:
        yield f"-l h_rt={job.time_s},s_rt={max(job.time_s - job.signal_s, 1)}"
    if job.memory_mib is not None:
        yield f"-l {name('--memory-resource', site.memory_resource)}={-(-job.memory_mib // slots_per_node)}M"
    if job.gpus_per_node:
        yield f"-l {name('--gpu-resource', site.gpu_resource)}={job.gpus_per_node // slots_per_node}"
    yield "-notify"
    yield "-j y"
    yield f"-o {log_file(job.logs, 'sge-$JOB_ID.log', not_in_folder=_SPECIAL)}"
    yield f"-r {'y' if job.requeue else 'n'}"
    yield from map(directive, job.directives)


def _one_host(site: GridEngine) -> Iterator[str]:
    """Refuse slots on several hosts, before the ranks find themselves far from each other and from their GPUs."""
    words = f"error: --nodes 1, but parallel environment {site.parallel_environment} gave slots on several hosts:"
    yield 'hosts=$(cut -d " " -f 1 "$PE_HOSTFILE" | sort -u)'
    yield f'[ "$(wc -l <<< "$hosts")" -eq 1 ] || {{ echo {quote(words)} $hosts >&2; exit 1; }}'
