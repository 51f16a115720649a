"""Parallel environments of Grid Engine: which one gives a job its slots on one machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from paceline.core.errors import Conflict
from paceline.world.launch.schedulers.job import BatchJob

ONE_HOST = "$pe_slots"
"""Allocation rule of a parallel environment that gives all slots on one host."""
_OFTEN_ONE_HOST = ("smp", "threaded", "threads", "openmp", "shm")
_OFTEN_SEVERAL = "mpi"


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
        raise Conflict(
            f"{_promise(typed, rules)} {slots} slots on one machine (`--nodes 1`)", hint=_advice(fitting, rules)
        )
    return typed


def _promise(typed: str | None, rules: Mapping[str, str]) -> str:
    if typed is None:
        return "no parallel environment here promises"
    return f"parallel environment {typed} (allocation rule {rules[typed]}) does not promise"


def _advice(fitting: Sequence[str], rules: Mapping[str, str]) -> str:
    if fitting:
        return f"type `--parallel-environment {fitting[0]}`"
    names = ", ".join(f"{name} ({rule})" for name, rule in rules.items()) or "none"
    return f"one with the allocation rule `{ONE_HOST}` does (`man sge_pe`); available: {names}"
