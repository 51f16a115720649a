"""Faults between machines: each is a network namespace with a name and an address of its own.

Links that break, for good, for a moment, or in one direction; processes that are stopped or killed; strangers at the
store; a wrong or taken meeting point; ranks that never come. Whatever happens, every process ends within one and a half
time-outs, with a message that names who is lost, or the run goes on and gives the same result.
"""

from __future__ import annotations

import ctypes
import os
import random
import re
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.launchers.hosts import Host, machines, why_not

from tools.chaos.campaign import Outcome, Trial
from tools.chaos.kills import Round, start, undisturbed
from tools.chaos.processes import Nursery, Running, descendants, send
from tools.chaos.runs import RunFacts, differences, is_locked, leftovers, read_run
from tools.chaos.tasks import MARKS, VARIANTS, Variant

TIMEOUT_S, START_TIMEOUT_S = 4.0, 5.0
MARGIN_S = 12.0
"""On top of one and a half time-outs: a machine that runs eight other things."""
PLAIN = VARIANTS["plain"]
STEP_S = "0.02"
_NEW_NET, _NEW_UTS, _NEW_NS = 0x40000000, 0x04000000, 0x00020000
_MS_BIND, _MS_REC, _MS_PRIVATE = 4096, 16384, 1 << 18


def enter(host: Host) -> Callable[[], None]:
    """Return a function that moves this process to a machine: its network, its name, its hosts file."""

    def move() -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        descriptor = os.open(f"/run/netns/{host.namespace}", os.O_RDONLY)
        _check(libc.setns(descriptor, _NEW_NET))
        os.close(descriptor)
        _check(libc.unshare(_NEW_UTS | _NEW_NS))
        _check(libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None))
        _check(libc.mount(str(host.hosts_file).encode(), b"/etc/hosts", None, _MS_BIND, None))
        socket.sethostname(host.name)

    return move


def _check(result: int) -> None:
    if result != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))


@dataclass
class Job:
    """A job over two machines, while something happens to it."""

    hosts: Sequence[Host]
    port: int
    ranks: int
    by_launch: bool
    """Started by `paceline launch` on each machine, else by hand."""
    nursery: Nursery
    folder: Path
    processes: list[Running] = field(default_factory=list)
    stopped: list[int] = field(default_factory=list)
    """Processes that are not to run until the end."""

    def host_of(self, rank: int) -> Host:
        return self.hosts[rank * len(self.hosts) // self.ranks]

    def ranks_on(self, host: Host) -> list[int]:
        return [rank for rank in range(self.ranks) if self.host_of(rank) == host]

    def pid_of(self, rank: int) -> int | None:
        """Return the process of a rank, None if it is not there."""
        if not self.by_launch:
            return self.processes[rank].pid if rank < len(self.processes) else None
        launcher = self.processes[self.hosts.index(self.host_of(rank))].pid
        below = [pid for pid in descendants(launcher) if _parent(pid) == launcher]
        ranks = sorted(below)[1:]  # the first child is the spare that forks for the launcher
        place = self.ranks_on(self.host_of(rank)).index(rank)
        return ranks[place] if place < len(ranks) else None


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, ValueError):
        return 0


@dataclass(frozen=True)
class Fault:
    """What happens, and what must follow."""

    name: str
    do: Callable[[Job, random.Random], Sequence[str]]
    """Does it, and returns words of which one must be in a message if the job ends: names of ranks or machines."""
    may_go_on: bool = False
    """The job may also go on: then its result is that of an undisturbed one."""
    must_go_on: bool = False
    at_start: bool = False
    """Happens before the ranks are started."""
    codes: tuple[int, ...] = (1, 2)
    """Exit codes of processes of a job that ends."""
    words: tuple[str, ...] = ()
    """Of which one must be in a message, whoever is hit."""


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=False, capture_output=True)


def _names(job: Job, host: Host) -> list[str]:
    return [host.name, *(f"rank {rank}" for rank in job.ranks_on(host)), "the launcher"]


# -- faults ------------------------------------------------------------------------------------------------------------


def link_down(job: Job, rng: random.Random) -> Sequence[str]:
    host = rng.choice(job.hosts)
    _ip("-n", host.namespace, "link", "set", "eth0", "down")
    return [name for each in job.hosts for name in _names(job, each)]  # each side sees the other go


def one_way(job: Job, rng: random.Random) -> Sequence[str]:
    """A machine hears the other but is not heard."""
    first, second = rng.sample(list(job.hosts), 2)
    _ip("-n", first.namespace, "route", "add", "blackhole", f"{second.address}/32")
    return [name for each in job.hosts for name in _names(job, each)]


def flap(job: Job, rng: random.Random) -> Sequence[str]:
    host = rng.choice(job.hosts)
    _ip("link", "set", host.cable, "down")
    time.sleep(0.6 * rng.random())
    _ip("link", "set", host.cable, "up")
    return []


def flutter(job: Job, rng: random.Random) -> Sequence[str]:
    """Packets are lost, again and again for a moment."""
    host = rng.choice(job.hosts)
    for _ in range(rng.randint(3, 8)):
        _ip("link", "set", host.cable, "down")
        time.sleep(0.03 * rng.random())
        _ip("link", "set", host.cable, "up")
        time.sleep(0.1 * rng.random())
    return []


def stop_rank(job: Job, rng: random.Random) -> Sequence[str]:
    rank = rng.randrange(job.ranks)
    pid = job.pid_of(rank)
    if pid is None:
        return []
    send(pid, signal.SIGSTOP)
    job.stopped.append(pid)
    return [f"rank {rank}", "the launcher"]


def pause_rank(job: Job, rng: random.Random) -> Sequence[str]:
    pid = job.pid_of(rng.randrange(job.ranks))
    if pid is not None:
        send(pid, signal.SIGSTOP)
        time.sleep(0.8 * rng.random())
        send(pid, signal.SIGCONT)
    return []


def pause_first(job: Job, rng: random.Random) -> Sequence[str]:
    """Rank 0 serves the store, or its launcher does."""
    send(job.processes[0].pid, signal.SIGSTOP)
    time.sleep(0.8 * rng.random())
    send(job.processes[0].pid, signal.SIGCONT)
    return []


def stop_first(job: Job, rng: random.Random) -> Sequence[str]:
    send(job.processes[0].pid, signal.SIGSTOP)
    job.stopped.append(job.processes[0].pid)
    return ["rank 0", "launcher", job.hosts[0].name]


def kill_rank(job: Job, rng: random.Random) -> Sequence[str]:
    rank = rng.randrange(job.ranks)
    pid = job.pid_of(rank)
    if pid is not None:
        send(pid, signal.SIGKILL)
    return [f"rank {rank}", "the launcher"]


def kill_host(job: Job, rng: random.Random) -> Sequence[str]:
    """All processes of a machine are gone at once."""
    host = rng.choice(job.hosts)
    pids = [pid for pid in map(job.pid_of, job.ranks_on(host)) if pid is not None]
    if job.by_launch:
        pids.insert(0, job.processes[job.hosts.index(host)].pid)
    for pid in pids:
        send(pid, signal.SIGKILL)
    return _names(job, host)


def power_off(job: Job, rng: random.Random) -> Sequence[str]:
    """The cable goes first, so that nobody hears the machine's processes end."""
    host = rng.choice(job.hosts)
    _ip("-n", host.namespace, "link", "set", "eth0", "down")
    pids = [pid for pid in map(job.pid_of, job.ranks_on(host)) if pid is not None]
    for pid in pids + ([job.processes[job.hosts.index(host)].pid] if job.by_launch else []):
        send(pid, signal.SIGKILL)
    return _names(job, host)


def _stranger(job: Job, attack: Callable[[tuple[str, int]], None]) -> None:
    """Run an attack from the second machine, against the port where the ranks meet."""
    address = (job.hosts[0].address, job.port)

    def act() -> int:
        try:
            attack(address)
        except OSError:
            return 0
        return 0

    stranger = job.nursery.call(act, job.folder, f"stranger{time.monotonic_ns()}", before=enter(job.hosts[1]))
    job.nursery.wait([stranger], 15.0)
    send(stranger.pid, signal.SIGKILL)


def garbage(job: Job, rng: random.Random) -> Sequence[str]:
    kinds = [rng.randbytes(2000), b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 64, bytes(64), (2**62).to_bytes(8, "little") * 9]

    def attack(address: tuple[str, int]) -> None:
        for _ in range(30):
            with socket.create_connection(address, timeout=2.0) as connection:
                connection.sendall(rng.choice(kinds))

    _stranger(job, attack)
    return []


def hold_connections(job: Job, rng: random.Random) -> Sequence[str]:
    def attack(address: tuple[str, int]) -> None:
        held = [socket.create_connection(address, timeout=2.0) for _ in range(150)]
        for connection in held:
            connection.send(b"\x00")
        time.sleep(0.5)

    _stranger(job, attack)
    return []


def overwrite_keys(job: Job, rng: random.Random) -> Sequence[str]:
    """A client of torch's own store that knows our names writes, adds and deletes."""

    def attack(address: tuple[str, int]) -> None:
        from datetime import timedelta

        import torch.distributed as dist

        try:
            store: Any = dist.TCPStore(  # type: ignore[attr-defined]
                *address, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=2)
            )
            for prefix in (f"paceline/attempt0/size{job.ranks}", "/paceline", ""):
                for name in ("failure", "rank/0", "rank/1", "start1/roll/1", "run folder", "start1/group/0"):
                    for value in (b"\x80\x04cposix\nsystem\n(S'touch pwned'\ntR.", b"{}", b"\xff" * 50):
                        store.set(f"{prefix}/{name}", value)
                    store.add(f"{prefix}/{name}x", 1)
                    store.delete_key(f"{prefix}/{name}")
        except Exception:
            return

    _stranger(job, attack)
    return []


def port_taken(job: Job, rng: random.Random) -> Sequence[str]:
    """Another program listens where the ranks are to meet, and says nothing."""

    def listen() -> int:
        with socket.socket() as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(("0.0.0.0", job.port))
            listener.listen(50)
            (job.folder / "listening").touch()
            time.sleep(60.0)
        return 0

    job.nursery.call(listen, job.folder, "listener", before=enter(job.hosts[0]))
    begun = time.monotonic()
    while not (job.folder / "listening").exists() and time.monotonic() - begun < 10:
        time.sleep(0.01)
    return [str(job.port)]


def nothing(job: Job, rng: random.Random) -> Sequence[str]:
    return []


FAULTS = (
    Fault("link down", link_down),
    Fault("one way", one_way),
    Fault("flap", flap, may_go_on=True),
    Fault("flutter", flutter, may_go_on=True),
    Fault("rank stopped", stop_rank),
    Fault("rank paused", pause_rank, must_go_on=True),
    Fault("first process paused", pause_first, must_go_on=True),
    Fault("first process stopped", stop_first),
    Fault("rank killed", kill_rank),
    Fault("machine killed", kill_host),
    Fault("power off", power_off),
    Fault("garbage at the store", garbage, must_go_on=True),
    Fault("connections held", hold_connections, must_go_on=True),
    Fault("keys overwritten", overwrite_keys, must_go_on=True),
    Fault("port taken", port_taken, at_start=True, codes=(2,)),
    Fault("name unknown", nothing, at_start=True, codes=(2,), words=("nowhere",)),
    Fault("address unreachable", nothing, at_start=True, codes=(2,), words=("10.213.7.99",)),
    Fault("other machine", nothing, at_start=True, codes=(2,), words=("plh2", "10.213.7.2")),
    Fault("rank missing", nothing, at_start=True, codes=(2,), words=("rank",)),
    Fault("world sizes differ", nothing, at_start=True, codes=(2,), words=("WORLD_SIZE", "world size", "ranks")),
)
_MEETING = {"name unknown": "nowhere.invalid", "address unreachable": "10.213.7.99", "other machine": "plh2"}


@dataclass(frozen=True)
class NetworkFacts:
    """How a job took its fault."""

    fault: Fault
    fired: bool
    codes: tuple[int | None, ...]
    """None for a process that was still there when the time was over."""
    killed: frozenset[int]
    """Numbers of processes that the fault itself ended or stopped for good."""
    err: str
    named: tuple[str, ...]
    seconds: float
    left: tuple[str, ...]


def limit_s(fault: Fault) -> float:
    """Return the seconds within which a job must have ended."""
    return (START_TIMEOUT_S if fault.at_start else TIMEOUT_S) * 1.5 + MARGIN_S


def judge_network(facts: NetworkFacts) -> tuple[list[str], bool]:
    """Return what did not hold, and True if the run went on and must be as an undisturbed one."""
    fault, troubles = facts.fault, [f"left running: {line}" for line in facts.left]
    codes = [code for number, code in enumerate(facts.codes) if number not in facts.killed]
    if None in codes:
        return [*troubles, f"still running {facts.seconds:.0f} s after it: {facts.codes}"], False
    if "Traceback" in facts.err:
        troubles.append("a traceback")
    if all(code == 0 for code in codes) and codes:
        if facts.fired and not (fault.may_go_on or fault.must_go_on or facts.killed) and fault.at_start:
            troubles.append("exit code 0")
        return troubles, not facts.killed
    if not facts.fired and not fault.at_start:
        return [*troubles, f"nothing was done, but exit codes {facts.codes}"], False
    if fault.must_go_on:
        troubles.append(f"exit codes {facts.codes}, but it had to go on: {facts.err[-300:]}")
    if not set(codes) <= {*fault.codes, 0}:
        troubles.append(f"exit codes {facts.codes}")
    wanted = [*facts.named, *fault.words]
    if wanted and not any(re.search(rf"\b{re.escape(name)}\b", facts.err) for name in wanted):
        troubles.append(f"no message names one of {wanted}: {facts.err[-300:]!r}")
    return troubles, False


class Network:
    """See the module."""

    name = "network"
    counts = (4, 300)
    mostly_waits = True

    def why_not(self) -> str | None:
        return why_not()

    def prepare(self, folder: Path, nursery: Nursery) -> None:
        self._shared = folder

    def _expected(self, trial: Trial, ranks: int) -> RunFacts:
        return read_run(undisturbed(trial.nursery, PLAIN, ranks, self._shared))

    def run(self, trial: Trial) -> Outcome:
        rng = trial.random
        fault = FAULTS[trial.index % len(FAULTS)]
        ranks = rng.choice((2, 2, 3, 4))
        by_launch = rng.random() < 0.4 and ranks != 3 and fault.name not in ("rank missing", "world sizes differ")
        at = rng.randint(1, 14)
        with machines(2) as hosts:
            job = Job(hosts, rng.randint(20000, 30000), ranks, by_launch, trial.nursery, trial.folder)
            facts = self._play(trial, job, fault, at, rng)
            troubles, went_on = judge_network(facts)
            trial.nursery.clear()
        out = trial.folder / "run"
        if went_on:
            troubles += [*differences(read_run(out), self._expected(trial, ranks), 0.0), *leftovers(out)]
        elif out.exists() and is_locked(out):
            troubles.append("the folder's lock is held")
        elif not troubles and (out / "run.json").exists() and rng.random() < 0.3:
            troubles += self._resume(trial, ranks, out)
        how = "launch" if by_launch else "by hand"
        prefix = f"{fault.name} at step {at}, {ranks} ranks {how}"
        return trial.judged([f"{prefix}: {trouble}" for trouble in troubles], 1, facts.seconds)

    def _resume(self, trial: Trial, ranks: int, out: Path) -> list[str]:
        """What a fault has left is a run that can be resumed."""
        processes = start(trial.nursery, PLAIN, Round(ranks, False, ()), trial.folder, "resume", out, self._shared)
        trial.nursery.wait(processes, 60.0)
        codes = [process.code for process in processes]
        if any(codes):
            return [f"resumed after it: exit codes {codes}: {processes[0].err[-300:]}"]
        return differences(read_run(out), self._expected(trial, ranks), 0.0)

    def _play(self, trial: Trial, job: Job, fault: Fault, at: int, rng: random.Random) -> NetworkFacts:
        nursery = trial.nursery
        named: Sequence[str] = fault.do(job, rng) if fault.at_start else []
        self._start(job, fault)
        marks = trial.folder / "marks"
        fired = fault.at_start
        if not fired:
            waited = time.monotonic()
            while time.monotonic() - waited < 40 and any(process.code is None for process in job.processes):
                nursery.reap()
                if marks.exists() and marks.read_text().count("0 step") >= at:
                    fired = True
                    named = fault.do(job, rng)
                    break
                time.sleep(0.004)
        begun = time.monotonic()
        awaited = [process for process in job.processes if process.pid not in job.stopped]
        killed = {number for number, process in enumerate(job.processes) if process.pid in job.stopped}
        nursery.wait(awaited, limit_s(fault))
        seconds = time.monotonic() - begun
        for pid in job.stopped:
            send(pid, signal.SIGCONT)
        # Who was stopped ends, too, when it runs again: the others are gone.
        nursery.wait(job.processes, limit_s(fault))
        late = [f"{process.name}, which was stopped" for process in job.processes if process.code is None]
        _end_listener(nursery, trial.folder)
        left = nursery.left(6.0) if not late else []
        codes = tuple(process.code for process in job.processes)
        killed |= {number for number, code in enumerate(codes) if code == -signal.SIGKILL}
        err = "".join(process.err for process in job.processes)
        return NetworkFacts(fault, fired, codes, frozenset(killed), err, tuple(named), seconds, (*late, *left))

    def _start(self, job: Job, fault: Fault) -> None:
        words = _words(PLAIN, job.folder / "run")
        env = {MARKS: str(job.folder / "marks"), "CHAOS_STEP_S": STEP_S}
        meeting = _MEETING.get(fault.name, job.hosts[0].name)
        if job.by_launch:
            for number, host in enumerate(job.hosts):
                options = ["--nnodes", "2", "--node-rank", str(number), "--master-addr", meeting, "--device", "cpu"]
                options += ["--master-port", str(job.port), "--nproc-per-node", str(job.ranks // 2)]
                options += ["--start-timeout-s", str(START_TIMEOUT_S), "--on-failure", "stop"]
                command = ["launch", *options, "--", *words]
                job.processes.append(job.nursery.start(command, job.folder, f"node{number}", env, enter(host)))
            return
        num_started = job.ranks - 1 if fault.name == "rank missing" else job.ranks
        for rank in range(num_started):
            size = job.ranks + 1 if fault.name == "world sizes differ" and rank == job.ranks - 1 else job.ranks
            place = {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": meeting, "MASTER_PORT": str(job.port)}
            here = job.ranks_on(job.host_of(rank))
            place |= {"LOCAL_RANK": str(here.index(rank)), "LOCAL_WORLD_SIZE": str(len(here))}
            before = enter(job.host_of(rank))
            job.processes.append(job.nursery.start(words, job.folder, f"rank{rank}", {**env, **place}, before))


def _end_listener(nursery: Nursery, folder: Path) -> None:
    """End the program that took the port, which is no part of the job."""
    if (folder / "listening").exists():
        for pid in descendants(os.getpid()):
            if _parent(pid) == os.getpid():
                send(pid, signal.SIGKILL)


def _words(variant: Variant, out: Path) -> list[str]:
    words = variant.command(out)
    for name, value in (("--timeout-s", TIMEOUT_S), ("--start-timeout-s", START_TIMEOUT_S)):
        words[words.index(name) + 1] = str(value)
    return words
