"""Findings of the doctor: pure judgements on facts and measurements, with what to do about problems."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from paceline.core.plugins import are_enabled
from paceline.core.units import counted
from paceline.world.discover.allocation import Allocation
from paceline.world.discover.environment import World
from paceline.world.discover.hostlist import fold
from paceline.world.discover.interfaces import HostIsLoopback
from paceline.world.doctor.facts import Facts
from paceline.world.doctor.measure import Reduction, SharedFolder

Verdict = Literal["ok", "warning", "problem"]
_GIB = 1024
OVERLOAD = 1.0
"""Other processes per core from which on a machine is too busy to train on."""


@dataclass(frozen=True)
class Finding:
    """One line of the doctor's table."""

    what: str
    verdict: Verdict
    found: str
    todo: str = ""
    reductions: tuple[Reduction, ...] = ()
    """Measured ones that it is about, for `paceline predict --link-file`."""


def ranks(world: World, roll: Sequence[Facts], allocation: Allocation | None) -> Iterator[Finding]:
    """Yield the number of ranks, and a warning if the scheduler has room for more."""
    hosts = list(dict.fromkeys(facts.host for facts in roll))
    found = f"{world.size} on {fold(hosts)}, by {world.launcher} ({'; '.join(world.why)})"
    if allocation is not None and allocation.slots is not None and world.size == 1 < allocation.slots:
        starters = {"slurm": "srun", "lsf": "mpirun", "pbs": "mpiexec"}
        starter = starters.get(allocation.scheduler, "mpirun -np $NSLOTS")
        yield Finding("ranks", "warning", found, f"check the whole allocation: `{starter} paceline doctor`")
    else:
        yield Finding("ranks", "ok", found)
    if world.meeting is not None:
        served = "the launcher" if world.launcher_hosts_store else "rank 0"
        yield Finding("meeting point", "ok", f"all ranks reached {served} at {world.meeting}")
    if allocation is not None:
        where = fold(allocation.hosts) or "hosts that only the first one knows"
        yield Finding("allocation", "ok", f"{allocation.scheduler} job {allocation.job}: {where}")


def versions(roll: Sequence[Facts]) -> Iterator[Finding]:
    for name in ("python", "torch", "paceline", "cuda", "nccl", "driver"):
        values = {facts.host: str(getattr(facts, name) or "none") for facts in roll}
        different = sorted(set(values.values()))
        if len(different) == 1:
            yield Finding(name, "ok", different[0])
        elif name == "driver":
            yield Finding(name, "warning", _by_host(values), "give all machines the same driver")
        else:
            yield Finding(name, "problem", _by_host(values), f"install the same {name} on all machines")


def devices(roll: Sequence[Facts]) -> Iterator[Finding]:
    for host, on_host in _hosts(roll).items():
        first = on_host[0]
        if first.gpus:
            kinds = sorted({f"{gpu.name} ({gpu.memory_mib // _GIB} GiB)" for gpu in first.gpus})
            found = f"{host}: {len(first.gpus)} x {', '.join(kinds)}"
            # A launcher may show each rank only its own GPU.
            if len(on_host) > len(first.gpus) > 1:
                yield Finding(
                    "GPUs",
                    "problem",
                    found,
                    f"start at most {counted(len(first.gpus), 'rank')} there, not {len(on_host)}",
                )
            elif any(gpu.free_mib < gpu.memory_mib / 2 for gpu in first.gpus):
                yield Finding("GPUs", "warning", f"{found}, in use", "`nvidia-smi` says by whom")
            else:
                yield Finding("GPUs", "ok", found)
            if "nccl" not in first.backends:
                yield Finding(
                    "NCCL", "problem", f"{host}: torch is built without it", "install torch's Linux CUDA build"
                )
        elif first.driver is not None:
            why = "torch is built without CUDA" if first.cuda is None else "torch sees none"
            todo = "install a CUDA build of torch" if first.cuda is None else "check CUDA_VISIBLE_DEVICES, `nvidia-smi`"
            yield Finding("GPUs", "problem", f"{host}: driver {first.driver}, but {why}", todo)
        else:
            yield Finding("GPUs", "ok", f"{host}: none, no driver; training runs on the CPU")


def levels(roll: Sequence[Facts], described: Sequence[str]) -> Finding:
    """Compare the levels of the ranks' devices, each `described` in a line."""
    values = {facts.host: each for facts, each in zip(roll, described, strict=True)}
    if len(set(values.values())) == 1:
        return Finding("levels", "ok", described[0])
    return Finding("levels", "warning", _by_host(values), "type a level that all of them have: `-O`")


def cores(roll: Sequence[Facts]) -> Iterator[Finding]:
    for host, on_host in _hosts(roll).items():
        usable = sorted({core for facts in on_host for core in facts.cores})
        threads = sum(facts.threads for facts in on_host)
        num_ranks, num_cores = len(on_host), on_host[0].machine_cores
        shares = f"for {counted(num_ranks, 'rank')}, {counted(threads, 'thread')} in all"
        found = f"{host}: {len(usable)} of {num_cores} {shares}"
        if any(len(facts.cores) == 1 for facts in on_host) and num_cores > num_ranks:
            todo = "a rank is bound to one core: `mpirun --bind-to none`, or `srun --cpus-per-task N`"
            yield Finding("cores", "warning", found, todo)
        elif threads > len(usable):
            yield Finding("cores", "warning", found, "ranks take turns on the cores: start fewer, or ask for more")
        else:
            yield Finding("cores", "ok", found)


def load(roll: Sequence[Facts]) -> Iterator[Finding]:
    """Yield what else the machines are busy with: beside it ranks wait for cores, and times mean little."""
    for host, on_host in _hosts(roll).items():
        mean, cores = on_host[0].load, on_host[0].machine_cores
        if mean is None:
            continue
        found = f"{host}: {mean:.1f} processes ran or wanted to in the last minute, on {counted(cores, 'core')}"
        # The ranks that look are processes, too, and a full machine alone is no fault of it.
        others = mean - len(on_host)
        if others > OVERLOAD * cores:
            todo = "training shares the cores with them, and is slower by as much: `top` names them; wait or stop them"
            yield Finding("load", "warning", found, todo)
        else:
            yield Finding("load", "ok", found)


def network(world: World, roll: Sequence[Facts]) -> Iterator[Finding]:
    for host, on_host in _hosts(roll).items():
        yield _interfaces(world, host, on_host[0])
        address = on_host[0].host_address
        if address is None or address.startswith("127."):
            yield _host_name(world, f"{host} means {address or 'nothing'}")


def _interfaces(world: World, host: str, facts: Facts) -> Finding:
    known = ", ".join(f"{name} {address}" for name, address in facts.interfaces.items()) or "none with an address"
    gloo = facts.gloo_interface
    used = f"gloo uses {gloo or f'that of {facts.host_address}'}, NCCL {facts.nccl_interface or 'chooses itself'}"
    found = f"{host}: {known}; {used}"
    if facts.interface_problem is not None:
        return Finding("interfaces", "problem", f"{found}; {facts.interface_problem}", HostIsLoopback.hint)
    if gloo is not None and world.nodes > 1 and gloo.startswith("lo"):
        todo = "unset GLOO_SOCKET_IFNAME, or name one that reaches the others"
        return Finding("interfaces", "problem", found, todo)
    if gloo is not None and gloo not in facts.interfaces:
        todo = "GLOO_SOCKET_IFNAME names one that is not there or has no address"
        return Finding("interfaces", "problem", found, todo)
    return Finding("interfaces", "ok", found)


def _host_name(world: World, means: str) -> Finding:
    """Return the finding of a host name that does not resolve to an address in the network."""
    if world.nodes > 1:
        return Finding("host name", "ok", f"{means}; the interface was found through the meeting point instead")
    todo = "fine on one machine; for several, give it the network's address in /etc/hosts"
    return Finding("host name", "ok", means, todo)


def clocks(offsets: Sequence[float], roll: Sequence[Facts]) -> Finding:
    """Clocks order the lines of different logs, and time limits are counted by them."""
    worst = max(range(len(offsets)), key=lambda rank: abs(offsets[rank]))
    found = f"at most {abs(offsets[worst]) * 1e3:.3g} ms apart"
    if abs(offsets[worst]) < 1.0:
        return Finding("clocks", "ok", found)
    where = f"{abs(offsets[worst]):.3g} s between {roll[0].host} and {roll[worst].host}"
    return Finding(
        "clocks", "warning", where, "logs of different machines do not line up: set the clocks (NTP, chrony)"
    )


def folder(shared: SharedFolder, roll: Sequence[Facts]) -> Iterator[Finding]:
    several = len({facts.host for facts in roll}) > 1
    if shared.problem is not None:
        yield Finding("run folder", "problem", f"{shared.folder}: {shared.problem}", "name another with --folder")
        return
    apart = sorted({*shared.blind, *shared.unseen})
    if apart:
        hosts = fold(sorted({roll[rank].host for rank in apart}))
        todo = "keep runs on a file system that all machines share: name it with --folder, and with --out"
        yield Finding("run folder", "problem", f"{shared.folder} is another folder on {hosts}", todo)
        return
    yield Finding("run folder", "ok", f"{shared.folder}: every rank sees it" if len(roll) > 1 else shared.folder)
    if not shared.has_locks:
        what = "a lock does not keep another machine out" if several else "there are no locks"
        yield Finding("locks", "warning", what, "two trainings in one folder would not notice each other")
    slow = shared.fsync_s > 0.5
    found = f"1 MiB safe on the disk after {shared.fsync_s * 1e3:.3g} ms"
    yield Finding("fsync", "warning" if slow else "ok", found, "checkpoints take long to become safe" if slow else "")


def space(roll: Sequence[Facts]) -> Iterator[Finding]:
    least = min(roll, key=lambda facts: facts.disk_free_mib)
    found = f"{least.disk_free_mib / _GIB:.1f} GiB free for runs ({least.host})"
    verdict: Verdict = (
        "problem" if least.disk_free_mib < _GIB else "warning" if least.disk_free_mib < 10 * _GIB else "ok"
    )
    yield Finding("disk", verdict, found, "" if verdict == "ok" else "make room, or keep runs elsewhere")
    sized = [facts for facts in roll if facts.shm_mib is not None]
    if sized:
        small = min(sized, key=lambda facts: facts.shm_free_mib or 0)
        found = f"{small.shm_free_mib} of {small.shm_mib} MiB free in /dev/shm ({small.host})"
        if (small.shm_free_mib or 0) < _GIB // 2:
            todo = "loader workers and NCCL use it: `docker run --shm-size 8g`, or `--workers 0`"
            yield Finding("shared memory", "warning", found, todo)
        else:
            yield Finding("shared memory", "ok", found)


def speed(reductions: Sequence[Reduction], world: World, device: str) -> Iterator[Finding]:
    """Bounds far from what such links reach: a local socket takes under a millisecond, 1 Gbit/s carries 0.11 GB/s."""
    first, last = reductions[0], reductions[-1]
    slow = first.seconds > (5e-3 if world.nodes == 1 else 20e-3)
    text = f"{first.num_bytes} B in {first.seconds * 1e6:.0f} us over {device}"
    todo = "ranks outnumber cores, or the network is slow to answer" if slow else ""
    yield Finding("all-reduce latency", "warning" if slow else "ok", text, todo, tuple(reductions))
    rows = [f"{_size(entry.num_bytes)} {entry.bytes_per_s / 1e9:.3g} GB/s" for entry in reductions[1:]]
    slow = last.bytes_per_s < 0.1e9
    todo = "slower than 1 Gbit/s: check which interface is used (above)" if slow else ""
    yield Finding("all-reduce bandwidth", "warning" if slow else "ok", ", ".join(rows), todo)


def packages(roll: Sequence[Facts]) -> Finding:
    missing = [f"{name} ({need})" for name, need in roll[0].missing_packages.items()]
    there = ", ".join(f"{name} {version}" for name, version in roll[0].packages.items()) or "none"
    return Finding("optional packages", "ok", f"{there}; not installed: {', '.join(missing) or 'none'}")


def plugins(roll: Sequence[Facts]) -> list[Finding]:
    """Plugins of other packages, and what is wrong with them; ranks that have others would not do the same."""
    first = roll[0]
    names = [f"{each.group.removesuffix('s')} {each.name} ({each.origin})" for each in first.plugins]
    found = "; ".join(names) or ("none" if are_enabled() else "left out (`--no-plugins`)")
    others = {facts.host for facts in roll if facts.plugins != first.plugins}
    wrong = [*first.plugin_problems]
    if others:
        wrong.append(f"{fold(sorted(others))} {'has' if len(others) == 1 else 'have'} others than {first.host}")
    if not wrong:
        return [Finding("plugins", "ok", found)]
    todo = "uninstall or update these packages, or leave all plugins out with `--no-plugins`"
    return [Finding("plugins", "problem", "; ".join([*wrong, f"installed: {found}"]), todo)]


def _hosts(roll: Sequence[Facts]) -> dict[str, list[Facts]]:
    by_host: dict[str, list[Facts]] = {}
    for facts in roll:
        by_host.setdefault(facts.host, []).append(facts)
    return by_host


def _by_host(values: dict[str, str]) -> str:
    return "; ".join(
        f"{value}: {fold([host for host, other in values.items() if other == value])}"
        for value in sorted(set(values.values()))
    )


def _size(num_bytes: int) -> str:
    return f"{num_bytes >> 20} MiB" if num_bytes >= 1 << 20 else f"{num_bytes >> 10} KiB"
