"""`--on-failure continue`: the launcher whose ranks go on when one of them dies, and take in its replacement.

On every machine a `NodeAgent` starts processes, says when one has ended, and does what it is ordered. The launcher of
node 0 also has the `Coordinator`, which alone decides: who is in a round, who is taken for dead, who is started again.
All they say is in one store, which the launcher of node 0 serves (`world/rounds.py` has what the ranks say).

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
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from types import FrameType
from typing import Any, Literal, Protocol

import torch
from torch.distributed import DistError

from paceline.core.errors import PacelineError
from paceline.core.units import counted
from paceline.world.discover.environment import OWN_RUN_ID
from paceline.world.failure.board import EXIT_CRASH, EXIT_DIVERGED, EXIT_INTERRUPT, EXIT_USER_ERROR, FailureBoard
from paceline.world.launch.agents import AgentRendezvous, Node, NodesMissing
from paceline.world.launch.heartbeat import Heartbeat, HeartbeatMonitor, beats
from paceline.world.launch.launcher import ALONE, LauncherGone, causes, count_procs, ranks_environment
from paceline.world.parent_process import bound
from paceline.world.resources import DeviceChoice
from paceline.world.rounds import MEMBER, PREFIX, Lost, Member, Now, Ready, Round, ready_of
from paceline.world.signals import hand_back
from paceline.world.store import PrefixStore, Store, attempt_store, poll

_EVERY_S = 0.02
# How often everything is looked at although nobody has said that something has happened: heartbeats, time-outs.
_LOOK_S = 0.25
# How long those that end by themselves may take, before they are killed.
_LEAVE_S = 20.0
# Seconds beyond --timeout-s that a rank may take to leave a round that has lost a member.
_MARGIN_S = 5.0
_FINAL = (EXIT_USER_ERROR, EXIT_DIVERGED)
_TIMEOUT_S = 1800.0
_APART = 1_000_000
"""Number of the first attempt that is no round."""
# How long ranks that are saving are left alone at a time, after their grace.
_SAVING_S = 5.0


class NodeRefused(PacelineError):
    """A machine that cannot join the job."""

    node: Node
    why: str
    sentence = "node {node.rank} cannot join the job at {node.meeting}: {why}"
    hint = "give each machine a --node-rank of its own, below the larger number of --nnodes"


@dataclass(frozen=True)
class Survival:
    """Rules of a job whose survivors go on."""

    max_restarts: int = 0
    """Processes that are started for dead ones, in all."""
    min_ranks: int = 1
    """With fewer the run is saved and ends."""
    max_nodes: int = 1
    """Machines that the job may have; those beyond the first ones may come later."""


@dataclass
class _Seat:
    """A process as the coordinator knows it."""

    member: Member
    incarnation: int
    """Number of its machine's arrival."""
    code: int | None = None
    ready: Ready | None = None
    beat: int = -1
    heard: float = field(default_factory=time.monotonic)
    is_condemned: bool = False
    """Taken for dead; its launcher was told to kill it."""
    why: str = ""

    @property
    def is_gone(self) -> bool:
        return self.code is not None

    @property
    def has_finished(self) -> bool:
        return self.code == 0


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
        self, store: Store, node: Node, procs: int, command: Sequence[str], environment: Mapping[str, str]
    ) -> None:
        self._store, self._node, self._procs = store, node, procs
        self._command, self._environment = list(command), dict(environment)
        self._host = socket.gethostname()
        self.incarnation = store.add("nodes", 1) - 1
        arrival = {"rank": node.rank, "host": self._host, "procs": procs}
        store.set(f"nodes/{self.incarnation}", json.dumps(arrival))
        store.add("events", 1)
        self._running: dict[int, Process] = {}
        self._num_orders = 0
        self.ended_with: int | None = None
        """Exit code of the job, once the coordinator has said it."""
        self.refusal = ""

    def poll(self) -> None:
        """Say which processes have ended, and obey orders."""
        for number, process in list(self._running.items()):
            code = process.poll()
            if code is not None:
                del self._running[number]
                self._store.set(f"exits/{number}", str(code))
                self._store.add("events", 1)
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
        member = {"incarnation": self.incarnation, "node": self._node.rank, "slot": slot, "host": self._host}
        self._store.set(f"members/{number}", json.dumps(member))
        self._store.add("events", 1)

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


class Coordinator:
    """Decides over rounds. Polled by the launcher of node 0; nothing in here waits."""

    def __init__(self, store: Store, node: Node, rules: Survival) -> None:
        self._raw, self._store = store, PrefixStore(PREFIX, store)
        self._node, self._rules = node, rules
        self._nodes: dict[int, dict[str, Any]] = {}
        """Machines by the number of their arrival."""
        self._gone: set[int] = set()
        self._beats = HeartbeatMonitor()
        self._seats: dict[int, _Seat] = {}
        self._orders: dict[int, int] = {}
        self._slots: dict[tuple[int, int], int] = {}
        """Rank that each (node, slot) had first, which its replacements are started with."""
        self._num_started: dict[int, int] = {}
        """Processes that each machine was told to start."""
        self._first_size = 0
        self._restarts = 0
        self._num_events, self._looked = -1, 0.0
        self.round: Round | None = None
        self._now = Now(-1)
        self._lost: list[Lost] = []
        self._broke: float | None = None
        self._broke_at = 0.0
        self._is_ending: int | None = None
        self._saving: dict[int, int] = {}  # heartbeat by rank, of those that were saving at the last look
        self._leaves_until: float | None = None
        self.is_stopping = False
        """The user has asked the ranks to leave: nobody is started again."""
        self._tell_now(self._now)

    # -- what has happened ---------------------------------------------------------------------------------------------

    def poll(self) -> int | None:
        """Look at what has happened and decide; return the exit code of the job once it is over."""
        num_events, now = self._store.add("events", 0), time.monotonic()
        if num_events == self._num_events and now - self._looked < _LOOK_S:
            return None
        self._num_events, self._looked = num_events, now
        self._meet_nodes()
        if not self._first_size:
            return None
        self._meet_members()
        self._look_at_members()
        code = self._decide()
        if code is not None:
            for incarnation in self._nodes:
                self._order(incarnation, end=code)
        return code

    def missing(self) -> list[int]:
        """Return the machines that the job waits for to begin."""
        here = {arrival["rank"] for arrival in self._nodes.values()}
        return [] if self._first_size else [rank for rank in range(self._node.count) if rank not in here]

    def hosts(self) -> list[str]:
        return [str(arrival["host"]) for arrival in self._nodes.values()]

    def _meet_nodes(self) -> None:
        arrived = self._store.add("nodes", 0)
        for incarnation in range(len(self._nodes), arrived):
            if not self._store.check([f"nodes/{incarnation}"]):
                return
            arrival = json.loads(self._store.get(f"nodes/{incarnation}"))
            self._nodes[incarnation] = arrival
            why = self._why_refused(incarnation, arrival)
            if why:
                self._gone.add(incarnation)
                self._order(incarnation, refuse=why)
            elif self._first_size:
                self._start_node(incarnation, arrival)
        self._notice_silent_nodes()
        if not self._first_size and not self.missing():
            self._begin()

    def _why_refused(self, incarnation: int, arrival: Mapping[str, Any]) -> str:
        rank = arrival["rank"]
        if rank >= self._rules.max_nodes:
            return f"it has room for {counted(self._rules.max_nodes, 'machine')}"
        for other, before in self._nodes.items():
            if other != incarnation and other not in self._gone and before["rank"] == rank:
                return f"node {rank} on {before['host']} is in it"
        return ""

    def _begin(self) -> None:
        """Start the ranks of all machines that are here; they are the first round."""
        arrivals = sorted(self._present(), key=lambda item: item[1]["rank"])
        self._first_size = sum(arrival["procs"] for _, arrival in arrivals)
        for incarnation, arrival in arrivals:
            self._start_node(incarnation, arrival)

    def _present(self) -> list[tuple[int, dict[str, Any]]]:
        return [(number, arrival) for number, arrival in self._nodes.items() if number not in self._gone]

    def _start_node(self, incarnation: int, arrival: Mapping[str, Any]) -> None:
        for slot in range(arrival["procs"]):
            self._start(incarnation, arrival["rank"], slot)

    def _start(self, incarnation: int, node: int, slot: int) -> None:
        rank = self._slots.setdefault((node, slot), len(self._slots))
        # One that is to join fails by itself, if it does, and on a failure board that is no round's.
        attempt = 0 if self.round is None else _APART + sum(self._num_started.values())
        size = max(self._first_size, rank + 1)
        nodes = max(self._rules.max_nodes, self._node.count)
        self._num_started[incarnation] = self._num_started.get(incarnation, 0) + 1
        self._order(incarnation, start={"slot": slot, "rank": rank, "size": size, "nodes": nodes, "attempt": attempt})

    def _order(self, incarnation: int, **order: Any) -> None:
        number = self._orders.get(incarnation, 0)
        self._orders[incarnation] = number + 1
        self._store.set(f"orders/{incarnation}/{number}", json.dumps(order))

    def _notice_silent_nodes(self) -> None:
        if self._node.count == 1 and self._rules.max_nodes == 1:
            return
        others = [number for number, arrival in self._present() if arrival["rank"] != self._node.rank]
        for incarnation in self._beats.silent(beats(self._store, others)):
            self._gone.add(incarnation)
            sys.stderr.write(f"the machine {self._nodes[incarnation]['host']} is gone: no word from its launcher\n")
            for seat in self._seats.values():
                if seat.incarnation == incarnation and not seat.is_gone:
                    self._lose(seat, -signal.SIGKILL, "its machine is gone")

    def _meet_members(self) -> None:
        for number in range(len(self._seats), self._store.add("members", 0)):
            if not self._store.check([f"members/{number}"]):
                return
            values = json.loads(self._store.get(f"members/{number}"))
            incarnation = values.pop("incarnation")
            self._seats[number] = _Seat(Member(number, **values), incarnation)
        if self.round is None and len(self._seats) >= self._first_size:
            first = sorted(self._seats.values(), key=_order_of)
            self._announce([seat.member for seat in first], holders=(), joined=())

    def _look_at_members(self) -> None:
        for number, seat in self._seats.items():
            if seat.is_gone:
                continue
            if self._store.check([f"exits/{number}"]):
                code = int(self._store.get(f"exits/{number}"))
                self._lose(seat, code, seat.why or _why(code))
                continue
            if self._store.check([f"ready/{number}"]):
                seat.ready = ready_of(self._store.get(f"ready/{number}"))
            self._listen(seat)

    def _listen(self, seat: _Seat) -> None:
        """Take a member for dead whose heart has not beaten for its time-out: it is stopped, or its machine is."""
        beat, now = self._store.add(f"pulse/{seat.member.number}", 0), time.monotonic()
        if beat != seat.beat:
            seat.beat, seat.heard = beat, now
        elif beat and now - seat.heard > self._timeout_s(seat):
            self._condemn(seat, f"no heartbeat for {self._timeout_s(seat):g} s (stopped?)")

    def _timeout_s(self, seat: _Seat) -> float:
        return _TIMEOUT_S if seat.ready is None else seat.ready.timeout_s

    def _condemn(self, seat: _Seat, why: str) -> None:
        if not seat.is_condemned:
            seat.is_condemned, seat.why = True, why
            self._order(seat.incarnation, kill=seat.member.number)

    def _lose(self, seat: _Seat, code: int, why: str) -> None:
        seat.code = code
        rank = None if self.round is None else self.round.rank_of(seat.member.number)
        if code == 0 or self.is_stopping or self._is_ending is not None:
            return
        if rank is None and self.round is not None:
            if code in _FINAL:
                return  # it has said why it cannot join
            self._replace(seat)
            return
        if self._has_report() or code in _FINAL:
            # A rank has said why it fails: the others learn of it by themselves, and would fail in the same way.
            self._is_ending = next((each for each in _FINAL if each == code), EXIT_CRASH)
            return
        if rank is None:
            return  # before the first round: all others wait for it in vain, and say so
        lost = Lost(rank, seat.member.host, why + self._last_seen(rank))
        self._lost.append(lost)
        sys.stderr.write(f"{lost}\n")
        sys.stderr.flush()
        self._break()
        self._replace(seat)

    def _replace(self, seat: _Seat) -> None:
        if seat.incarnation in self._gone or self._restarts >= self._rules.max_restarts:
            return
        self._restarts += 1
        self._start(seat.incarnation, seat.member.node, seat.member.slot)

    def _has_report(self) -> bool:
        return self._board().read() is not None

    def _board(self) -> FailureBoard:
        number = 0 if self.round is None else self.round.number
        return FailureBoard(attempt_store(self._raw, number))

    def _last_seen(self, rank: int) -> str:
        seen = self._board().last_seen(rank)
        return "" if seen is None else f"; last seen {seen.where}"

    def _break(self) -> None:
        if self._broke is None:
            self._broke, self._broke_at = time.monotonic(), time.time()
            self._tell_now(replace(self._now, is_over=True))

    def is_saving(self) -> bool:
        """Return True if a rank is writing a checkpoint."""
        board, ranks = self._board(), range(0 if self.round is None else len(self.round.members))
        places = {rank: board.last_seen(rank) for rank in ranks}
        saving = {rank: seen.beat for rank, seen in places.items() if seen is not None and seen.is_saving}
        before, self._saving = self._saving, saving
        return any(beat != before.get(rank) for rank, beat in saving.items())  # it lives: its number grows

    # -- what to do ----------------------------------------------------------------------------------------------------

    def _decide(self) -> int | None:
        if self.round is None:
            return self._end_without_round()
        members = [self._seats[member.number] for member in self.round.members]
        left = [seat for seat in members if not seat.is_gone]
        if self.is_stopping or self._is_ending is not None:
            return self._see_out()
        if not left:
            return self._end_or_start_anew(members)
        if any(self._is_ready(seat) for seat in left):
            self._break()
        joiners = [seat for seat in self._seats.values() if not seat.is_gone and self._waits_to_join(seat)]
        if self._broke is None:
            if joiners and not self._now.is_wanted:
                self._tell_now(replace(self._now, is_wanted=True))
            return None
        late = [seat for seat in left if not self._is_ready(seat)]
        if late:
            self._hurry(late)
            return None
        self._form([*left, *joiners])
        return None

    def _end_without_round(self) -> int | None:
        codes = [seat.code for seat in self._seats.values() if seat.code is not None]
        if codes and len(codes) == len(self._seats):
            return _worst(codes)
        return None

    def _see_out(self) -> int | None:
        """Wait for all to end, which know that they are to; those that do not are killed."""
        left = [seat for seat in self._seats.values() if not seat.is_gone]
        if not left:
            codes = [seat.code for seat in self._seats.values() if seat.code is not None]
            return self._is_ending if self._is_ending is not None else _worst(codes)
        for seat in left:  # those that wait for a round, which will not come
            if self._is_ending is not None and self._waits_to_join(seat):
                self._condemn(seat, "")
        if self._is_ending is not None:
            self._leaves_until = self._leaves_until or time.monotonic() + _LEAVE_S
            if time.monotonic() > self._leaves_until:
                for seat in left:
                    self._condemn(seat, "")
        elif all(self._is_ready(seat) or self._waits_to_join(seat) for seat in left) and self.round is not None:
            # Asked to leave while between rounds: one more round, in which they save.
            holders = [seat for seat in left if self._is_ready(seat)]
            if holders:
                self._form(holders)
        return None

    def _end_or_start_anew(self, members: Sequence[_Seat]) -> int | None:
        """All of the round are gone: the run has ended, or those that were started for them begin from a checkpoint."""
        others = [seat for seat in self._seats.values() if not seat.is_gone]
        if any(seat.has_finished for seat in members):
            self._is_ending = 0
            return self._see_out()
        if not others and self._is_settled():
            return EXIT_CRASH
        ready = [seat for seat in others if self._waits_to_join(seat)]
        if ready and len(ready) == len(others) and self._is_settled():
            self._form(ready)
        return None

    def _is_settled(self) -> bool:
        """Return True if every process that was ordered has been seen, but those of machines that are gone."""
        for incarnation, number in self._num_started.items():
            seen = sum(seat.incarnation == incarnation for seat in self._seats.values())
            if seen < number and incarnation not in self._gone:
                return False
        return True

    def _is_ready(self, seat: _Seat) -> bool:
        assert self.round is not None
        return seat.ready is not None and seat.ready.after == self.round.number

    def _waits_to_join(self, seat: _Seat) -> bool:
        is_in = self.round is not None and self.round.rank_of(seat.member.number) is not None
        return not is_in and seat.ready is not None and seat.ready.after == -1

    def _hurry(self, late: Sequence[_Seat]) -> None:
        """Take for dead who has not left a broken round in the time that a collective may take."""
        assert self._broke is not None
        for seat in late:
            if time.monotonic() - self._broke > self._timeout_s(seat) + _MARGIN_S:
                self._condemn(seat, "it did not leave its step (stuck?)")

    def _form(self, seats: Sequence[_Seat]) -> None:
        """Announce the next round, of these, unless it lacks ranks: then others come first, or the run ends."""
        assert self.round is not None
        needs_all = any(seat.ready is not None and seat.ready.needs_all for seat in seats)
        lacks_some = needs_all and len(seats) < self._first_size
        is_too_small = len(seats) < self._rules.min_ranks
        if (is_too_small or lacks_some) and self._is_somebody_coming() and not self.is_stopping:
            return
        if needs_all and len(seats) != self._first_size:
            self._end_for_lack_of_ranks(seats)
            return
        seats = sorted(seats, key=_order_of)
        before = {member.number for member in self.round.members}
        joined = tuple(rank for rank, seat in enumerate(seats) if seat.member.number not in before)
        self._announce([seat.member for seat in seats], _holders_of_newest(seats), joined, stops=is_too_small)

    def _is_somebody_coming(self) -> bool:
        """Return True if a process was ordered that has not said yet that it is ready."""
        has_silent = any(not seat.is_gone and seat.ready is None for seat in self._seats.values())
        return has_silent or not self._is_settled()

    def _end_for_lack_of_ranks(self, left: Sequence[_Seat]) -> None:
        sys.stderr.write(
            f"error: the run needs {counted(self._first_size, 'rank')}, of which {len(left)} can go on, and none is "
            "started again (`--max-restarts`)\n"
        )
        self._is_ending = EXIT_CRASH
        for seat in left:
            self._condemn(seat, "")

    def _announce(
        self, members: Sequence[Member], holders: tuple[int, ...], joined: tuple[int, ...], *, stops: bool = False
    ) -> None:
        number = 0 if self.round is None else self.round.number + 1
        since = self._broke_at or time.time()
        self.round = Round(number, tuple(members), self._first_size, holders, tuple(self._lost), joined, since, stops)
        self._lost, self._broke, self._broke_at = [], None, 0.0
        self._store.set(f"round/{number}", self.round.to_json())
        self._tell_now(Now(number))

    def _tell_now(self, now: Now) -> None:
        self._now = now
        self._store.set("now", json.dumps(asdict(now)))


def _order_of(seat: _Seat) -> tuple[int, int]:
    return seat.member.node, seat.member.slot


def _holders_of_newest(seats: Sequence[_Seat]) -> tuple[int, ...]:
    """Return the ranks that have the newest copy of the state in memory; none if nobody has one."""
    held = [-1 if seat.ready is None or seat.ready.holds is None else seat.ready.holds for seat in seats]
    newest = max(held)
    return tuple(rank for rank, step in enumerate(held) if step == newest >= 0)


def _why(code: int) -> str:
    if code >= 0:
        return f"it ended without a word, with exit code {code}"
    return f"ended by {signal.Signals(-code).name}{causes(-code)}"


def _worst(codes: Sequence[int]) -> int:
    """Return the exit code for the user, of those of all ranks."""
    if all(code == 0 for code in codes):
        return 0
    return next((code for code in _FINAL if code in codes), EXIT_CRASH)


class _Signals:
    """Stop signals of the launcher, which reach its ranks and leave them time to save."""

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self.agent: NodeAgent | None = None
        self.is_interrupted = False
        self.deadline: float | None = None
        """When ranks that were told to leave are killed, unless one of them is saving."""
        self.is_overdue = False
        self._received: list[signal.Signals] = []

    @property
    def are_told_to_leave(self) -> bool:
        return self.deadline is not None

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
    node: Node = ALONE,
) -> int:
    """Run `command` as so many ranks on this machine, as `launch` does; those that are left when one dies go on."""
    num_procs = count_procs(procs, device, torch.cuda.device_count())
    meeting = AgentRendezvous(node, num_procs, rules.max_restarts)
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
        agent = NodeAgent(store, node, num_procs, command, environment)
        signals.agent = agent
        heartbeat = Heartbeat(store, agent.incarnation)
        try:
            code = _watch_over(agent, coordinator, signals, node)
        except DistError:
            raise LauncherGone(node) from None
        finally:
            agent.kill_all()
            heartbeat.stop()
            if coordinator is not None and (node.count > 1 or rules.max_nodes > 1):
                time.sleep(1.0)  # the other launchers read how the job has ended
            meeting.close()
    return EXIT_INTERRUPT if signals.is_interrupted else code


def _watch_over(agent: NodeAgent, coordinator: Coordinator | None, signals: _Signals, node: Node) -> int:
    """Poll until the job is over; return its exit code."""
    began = time.monotonic()
    while True:
        agent.poll()
        if agent.refusal:
            raise NodeRefused(node, agent.refusal)
        code = agent.ended_with
        if coordinator is not None:
            coordinator.is_stopping = coordinator.is_stopping or signals.are_told_to_leave
            code = coordinator.poll()
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
            signals.deadline = time.monotonic() + _LEAVE_S
        time.sleep(_EVERY_S)


def _see_out(agent: NodeAgent, code: int) -> int:
    """Leave the processes of this machine the time to end by themselves, after the job has."""

    def is_empty() -> bool:
        with suppress(DistError):
            agent.poll()
        return not agent.num_running

    poll(is_empty, _LEAVE_S)
    return code
