"""Machines that a scheduler gave to the job, read from its variables; ranks may not be started there yet."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from paceline.core.errors import Unreadable
from paceline.world.discover.hostlist import expand

ReadText = Callable[[str], "str | None"]


@dataclass(frozen=True)
class Allocation:
    """The machines of a job."""

    scheduler: str
    job: str
    hosts: tuple[str, ...]
    """Machines in the scheduler's order; the first one runs the job's script."""
    slots: int | None = None
    """Processes or cores that the job may use in all, where the scheduler says so."""


def read_text(path: str) -> str | None:
    """Return the text of a file; None if this machine does not have it."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError:
        return None


def find_allocation(env: Mapping[str, str], read: ReadText = read_text) -> Allocation | None:
    """Return the job of this process, of SLURM, LSF, PBS or Grid Engine; None outside of all.

    Grid Engine and PBS keep their lists of hosts on the first one: elsewhere only the job's number is known.
    """
    for name in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"):
        if env.get(name):
            tasks = env.get("SLURM_NTASKS", "")
            slots = int(tasks) if tasks.isdecimal() else None
            return Allocation("slurm", env.get("SLURM_JOB_ID", ""), tuple(expand(env[name])), slots)
    for scheduler, job, find_slots in (("lsf", "LSB_JOBID", _of_lsf), ("pbs", "PBS_JOBID", _of_pbs)):
        if env.get(job):
            slots_by_host = find_slots(env, read)
            return Allocation(scheduler, env[job], tuple(slots_by_host), sum(slots_by_host.values()) or None)
    # JOB_ID alone is a name that anything may use.
    return _of_sge(env, read) if env.get("SGE_TASK_ID") or env.get("PE_HOSTFILE") else None


def _of_sge(env: Mapping[str, str], read: ReadText) -> Allocation:
    text = read(env["PE_HOSTFILE"]) if env.get("PE_HOSTFILE") else None
    hosts = parse_hostfile(text) if text is not None else {}
    nslots = env.get("NSLOTS", "")
    slots = int(nslots) if nslots.isdecimal() else sum(hosts.values()) or None
    return Allocation("sge", env.get("JOB_ID", ""), tuple(hosts), slots)


def _of_pbs(env: Mapping[str, str], read: ReadText) -> dict[str, int]:
    """Return PBS' slots by host: a file with a line per slot."""
    text = read(env["PBS_NODEFILE"]) if env.get("PBS_NODEFILE") else None
    return dict(Counter((text or "").split()))


def _of_lsf(env: Mapping[str, str], read: ReadText) -> dict[str, int]:
    """Return LSF's slots by host: `LSB_MCPU_HOSTS=node1 4 node2 4`, else a file with a line per slot.

    Where `jsrun` starts the ranks, the first host is the one that the script runs on, and has none.
    """
    words = env.get("LSB_MCPU_HOSTS", "").split()
    slots = {host: int(number) for host, number in zip(words[::2], words[1::2], strict=False) if number.isdecimal()}
    for name in ("LSB_DJOB_RANKFILE", "LSB_DJOB_HOSTFILE"):
        if not slots and env.get(name):
            slots = dict(Counter((read(env[name]) or "").split()))
    if "JSM_NAMESPACE_RANK" in env and len(slots) > 1:
        del slots[next(iter(slots))]
    return slots


def parse_hostfile(text: str) -> dict[str, int]:
    """Grid Engine's lines `host slots queue cores` as slots by host; a host may have a line per queue."""
    slots: dict[str, int] = {}
    for line in text.splitlines():
        words = line.split()
        if not words:
            continue
        if len(words) < 2 or not words[1].isdecimal():
            raise Unreadable(
                f"PE_HOSTFILE: {line!r} is not `host slots queue cores`",
                hint="Grid Engine writes this file, with lines such as `node1 4 all.q@node1 UNDEFINED`",
            )
        slots[words[0]] = slots.get(words[0], 0) + int(words[1])
    return slots
