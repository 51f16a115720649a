"""`--on-failure continue`: the launcher whose ranks go on when one of them dies, and take in its replacement.

On every machine a `NodeAgent` starts processes, says when one has ended, and does what it is ordered. The launcher of
node 0 also has the `Coordinator` (coordinator.py), which alone decides: who is in a round, who is taken for dead, who
is started again. All they say is in one store, which the launcher of node 0 serves (`world/rounds.py` has what the
ranks say).

    nodes/<n>           a machine has come: node rank, host, number of processes
    orders/<n>/<k>      the k-th order for it: start a slot, kill a member, end
    members/<m>         a process was started: machine, slot, host
    exits/<m>           it has ended: exit code
    pulse/<m>, ready/<m> it runs; it waits for a round
    now, round/<r>      the current round
    events              counts all of these, so that the coordinator need not look at each
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, Literal, Protocol

import torch
from torch.distributed import DistError

from paceline.core.errors import Conflict
from paceline.world.discover.environment import OWN_RUN_ID
from paceline.world.failure.board import EXIT_INTERRUPT, EXIT_STOPPED
from paceline.world.launch.agents import AgentRendezvous, Node, NodesMissing
from paceline.world.launch.coordinator import Coordinator
from paceline.world.launch.decisions import LEAVE_S, Survival
from paceline.world.launch.heartbeat import Heartbeat
from paceline.world.launch.launcher import ALONE, LauncherGone, count_procs, ranks_environment
from paceline.world.parent_process import bound
from paceline.world.resources import DeviceChoice
from paceline.world.rounds import MEMBER, PREFIX
from paceline.world.signals import hand_back
from paceline.world.store import PrefixStore, Store, poll

# How often a launcher looks whether something has happened: while ranks start, leave a round or join one, and else.
_EVERY_S, _STEADY_S = 0.02, 0.1
# How often a launcher looks for orders in a store that another one serves.
_ORDERS_S = 0.1
# How long ranks that are saving are left alone at a time, after their grace.
_SAVING_S = 5.0
# A launcher that has not looked for so long was stopped (Ctrl-Z), and could not hear anybody.
_ASLEEP_S = 1.0


class Process(Protocol):
    """As much of `subprocess.Popen` as is needed here."""

    def poll(self) -> int | None: ...

    def wait(self) -> int: ...

    def send_signal(self, number: int, /) -> None: ...


def start_process(command: Sequence[str], environment: Mapping[str, str]) -> Process:
    """Start a rank, which writes to the terminal as it is."""
    return subprocess.Popen(list(command), env=dict(environment))


class NodeAgent:
    """The processes of one machine."""

    def __init__(
        self,
        store: Store,
        node: Node,
        procs: int,
        command: Sequence[str],
        environment: Mapping[str, str],
        orders_every_s: float = 0.0,
    ) -> None:
        """`orders_every_s` is the least time between two looks for orders."""
        self._store, self._node, self._procs = store, node, procs
        self._orders_every_s, self._looked_s = orders_every_s, 0.0
        self._command, self._environment = list(command), dict(environment)
        self._host = socket.gethostname()
        self.incarnation = store.add("nodes", 1) - 1
        arrival = {"rank": node.rank, "host": self._host, "procs": procs}
        store.set(f"nodes/{self.incarnation}", json.dumps(arrival))
        store.add("events", 1)
        self._running: dict[int, Process] = {}
        self._has_ended = threading.Event()
        self._num_orders = 0
        self.ended_with: int | None = None
        """Exit code of the job, once the coordinator has said it."""
        self.refusal = ""

    def poll(self) -> None:
        """Say which processes have ended, and obey orders."""
        for number, code in self.reap().items():
            self._store.set(f"exits/{number}", str(code))
            self._store.add("events", 1)
        if time.monotonic() - self._looked_s < self._orders_every_s:
            return
        self._looked_s = time.monotonic()
        while self._store.check([f"orders/{self.incarnation}/{self._num_orders}"]):
            order = json.loads(self._store.get(f"orders/{self.incarnation}/{self._num_orders}"))
            self._num_orders += 1
            self._obey(**order)

    def _obey(
        self,
        start: Mapping[str, Any] | None = None,
        kill: int | None = None,
        end: int | None = None,
        refuse: str = "",
    ) -> None:
        if start is not None:
            self._start(**start)
        if kill is not None and kill in self._running:
            self._running[kill].send_signal(signal.SIGKILL)
        if end is not None:
            self.ended_with = end
        self.refusal = self.refusal or refuse

    def _start(self, slot: int, rank: int, size: int, nodes: int, attempt: int) -> None:
        number = self._store.add("members", 1) - 1
        environment = {
            **os.environ,
            **self._environment,
            "RANK": str(rank),
            "WORLD_SIZE": str(size),
            "LOCAL_RANK": str(slot),
            "LOCAL_WORLD_SIZE": str(self._procs),
            "GROUP_RANK": str(self._node.rank),
            "GROUP_WORLD_SIZE": str(nodes),
            "TORCHELASTIC_RESTART_COUNT": str(attempt),
            MEMBER: str(number),
        }
        self._running[number] = start_process(bound(self._command, signal.SIGTERM), environment)
        threading.Thread(target=self._see_end, args=(self._running[number],), name="paceline-rank", daemon=True).start()
        member = {"incarnation": self.incarnation, "node": self._node.rank, "slot": slot, "host": self._host}
        self._store.set(f"members/{number}", json.dumps(member))
        self._store.add("events", 1)

    def _see_end(self, process: Process) -> None:
        process.wait()
        self._has_ended.set()

    def pause(self, seconds: float) -> None:
        """Wait so long, or until a process ends."""
        if self._has_ended.wait(seconds):
            self._has_ended.clear()

    def reap(self) -> dict[int, int]:
        """Return the exit codes of processes that have ended since the last look."""
        codes = {number: process.poll() for number, process in self._running.items()}
        ended = {number: code for number, code in codes.items() if code is not None}
        for number in ended:
            del self._running[number]
        return ended

    def send(self, number: signal.Signals) -> None:
        for process in self._running.values():
            with suppress(ProcessLookupError):
                process.send_signal(number)

    @property
    def num_running(self) -> int:
        return len(self._running)

    def kill_all(self) -> None:
        """End what is left, and wait for it."""
        self.send(signal.SIGKILL)
        for process in self._running.values():
            process.wait()


class _Signals:
    """Stop signals of the launcher, which reach its ranks and leave them time to save."""

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self.agent: NodeAgent | None = None
        self.is_interrupted = False
        self.deadline: float | None = None
        """When ranks that were told to leave are killed, unless one of them is saving."""
        self._received: list[signal.Signals] = []

    @property
    def are_told_to_leave(self) -> bool:
        return self.deadline is not None

    def before_start(self, coordinator: Coordinator) -> signal.Signals | None:
        """Return the stop signal that ended all ranks before they could handle it; None if that is not why they ended.

        Ranks that have begun save and leave.
        """
        return next((number for number in self._received if coordinator.ended_by(number)), None)

    @contextmanager
    def forwarded(self) -> Iterator[None]:
        numbers = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
        before = {number: signal.getsignal(number) for number in numbers}
        for number in numbers:
            signal.signal(number, self._handle)
        try:
            yield
        finally:
            hand_back(before, was_asked=bool(self._received))

    def _handle(self, number: int, frame: FrameType | None) -> None:
        received = signal.Signals(number)
        self._received.append(received)
        if received != signal.SIGUSR1:
            self.is_interrupted |= received == signal.SIGINT
            self.deadline = self.deadline or time.monotonic() + self._grace_s
        if self.agent is not None:
            self.agent.send(received)


def launch_surviving(
    procs: int | Literal["auto"],
    command: Sequence[str],
    *,
    rules: Survival,
    device: DeviceChoice = "auto",
    grace_s: float = 60.0,
    stopped_code: int = 0,
    node: Node = ALONE,
) -> int:
    """Run `command` as so many ranks on this machine, as `launch` does; those that are left when one dies go on.

    `stopped_code` is returned by the launchers of all machines when the run was asked to stop before its end.
    """
    num_procs = count_procs(procs, device, torch.cuda.device_count())
    meeting = AgentRendezvous(node, num_procs, rules.max_restarts, on_failure="continue")
    host, _, port = meeting.meeting.rpartition(":")
    environment = {
        "MASTER_ADDR": host,
        "MASTER_PORT": port,
        "TORCHELASTIC_RUN_ID": OWN_RUN_ID,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    signals = _Signals(grace_s)
    with ranks_environment(num_procs, meeting.secret), signals.forwarded():
        store = PrefixStore(PREFIX, meeting.store)
        coordinator = Coordinator(meeting.store, node, rules) if node.rank == 0 else None
        agent = NodeAgent(store, node, num_procs, command, environment, _ORDERS_S if coordinator is None else 0.0)
        signals.agent = agent
        heartbeat = Heartbeat(store, agent.incarnation)
        try:
            code = _watch_over(agent, coordinator, signals, node)
        except DistError:
            _leave_without_store(agent, grace_s)
            raise LauncherGone(node) from None
        finally:
            agent.kill_all()
            heartbeat.stop()
            if coordinator is not None and (node.count > 1 or rules.max_nodes > 1):
                time.sleep(1.0)  # the other launchers read how the job has ended
            meeting.close()
    if signals.is_interrupted:
        return EXIT_INTERRUPT
    ended_by = None if coordinator is None else signals.before_start(coordinator)
    if ended_by is not None:
        sys.stderr.write(f"{ended_by.name}: asked to stop before the ranks had begun, so nothing was done\n")
        return 128 + ended_by
    return stopped_code if code == EXIT_STOPPED else code


def _watch_over(agent: NodeAgent, coordinator: Coordinator | None, signals: _Signals, node: Node) -> int:
    """Poll until the job is over; return its exit code."""
    began = looked = time.monotonic()
    while True:
        agent.poll()
        if agent.refusal:
            raise Conflict(
                f"node {node.rank} cannot join the job at {node.meeting}: {agent.refusal}",
                hint="give each machine a --node-rank of its own, below the larger number of --nnodes",
            )
        code = agent.ended_with
        was_asleep, looked = time.monotonic() - looked > _ASLEEP_S, time.monotonic()
        if coordinator is not None:
            code = coordinator.poll(is_asked_to_stop=signals.are_told_to_leave, was_asleep=was_asleep)
            missing = coordinator.missing()
            if missing and (time.monotonic() - began > node.timeout_s or signals.are_told_to_leave):
                raise NodesMissing(node, missing, coordinator.hosts())
        if code is not None:
            return _see_out(agent, code)
        if signals.deadline is not None and time.monotonic() > signals.deadline:
            if coordinator is not None and coordinator.is_saving():
                signals.deadline = time.monotonic() + _SAVING_S
                continue
            sys.stderr.write("error: the ranks did not leave in time and were ended\n")
            agent.kill_all()
            signals.deadline = time.monotonic() + LEAVE_S
        agent.pause(_STEADY_S if coordinator is None or coordinator.is_steady else _EVERY_S)


def _see_out(agent: NodeAgent, code: int) -> int:
    """Leave the processes of this machine the time to end by themselves, after the job has."""

    def is_empty() -> bool:
        with suppress(DistError):
            agent.poll()
        return not agent.num_running

    poll(is_empty, LEAVE_S)
    return code


def _leave_without_store(agent: NodeAgent, grace_s: float) -> None:
    """Leave the processes of this machine the time to save and to end, when the launcher of node 0 is gone."""
    agent.send(signal.SIGTERM)

    def is_empty() -> bool:
        agent.reap()
        return not agent.num_running

    poll(is_empty, grace_s)
