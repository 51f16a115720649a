"""Driver of `--on-failure continue` on node 0: it observes machines and ranks and executes decisions (`decisions.py`).

Machines and ranks report in the store; `survivors.py` lists the keys.
"""

from __future__ import annotations

import json
import sys
import time

from paceline.world.failure.board import FailureBoard
from paceline.world.launch.agents import Node
from paceline.world.launch.decisions import Job, Observation, Phase, Survival, decide
from paceline.world.launch.machines import Machines
from paceline.world.rounds import PREFIX, Member, Round, ready_of, tell_now
from paceline.world.store import PrefixStore, Store, attempt_store

# Seconds between two observations without an event: heartbeats, timeouts.
_LOOK_S = 0.25


class Coordinator:
    """The job as the launcher of node 0 polls it. No method waits."""

    def __init__(self, store: Store, node: Node, rules: Survival) -> None:
        self._raw, self._store = store, PrefixStore(PREFIX, store)
        self._machines = Machines(self._store, node, rules.max_nodes)
        self._job = Job(rules, node.count, node.timeout_s)
        self._num_events, self._looked_s = -1, 0.0
        self._saving: dict[int, int] = {}  # heartbeat by rank, of those that were saving at the last look
        tell_now(self._store, self._job.now, before=None)

    def poll(self, *, is_asked_to_stop: bool = False, was_asleep: bool = False) -> int | None:
        """Observe and decide; return the exit code of the job once it is over.

        `was_asleep` says that this launcher was stopped (Ctrl-Z): it serves the store, so no heartbeat could arrive.
        """
        if was_asleep:
            self._machines.listen_anew()
        num_events, now_s = self._store.add("events", 0), time.monotonic()
        if num_events == self._num_events and now_s - self._looked_s < _LOOK_S and not was_asleep:
            return None
        self._num_events, self._looked_s = num_events, now_s
        before = self._job
        seen = self._observe(now_s, is_asked_to_stop=is_asked_to_stop, was_asleep=was_asleep)
        self._job, orders, lines = decide(before, seen)
        for line in lines:
            sys.stderr.write(f"{line}\n")
        for order in orders:
            self._machines.order(order.machine, start=order.start, kill=order.kill)
        self._publish(before)
        return self._job.code if self._job.phase is Phase.ENDED else None

    @property
    def round(self) -> Round | None:
        return self._job.round

    @property
    def is_steady(self) -> bool:
        return self._job.is_steady

    def missing(self) -> list[int]:
        """Return the node ranks of machines that the job waits for to begin."""
        return [] if self._job.first_size else self._machines.missing()

    def hosts(self) -> list[str]:
        return self._machines.hosts()

    def ended_by(self, number: int) -> bool:
        """Return True if all processes were ended by this signal."""
        seats = self._job.seats.values()
        return bool(seats) and all(seat.code == -number for seat in seats)

    def is_saving(self) -> bool:
        """Return True if a rank is writing a checkpoint."""
        board, ranks = self._board(), range(0 if self.round is None else len(self.round.members))
        places = {rank: board.last_seen(rank) for rank in ranks}
        saving = {rank: seen.beat for rank, seen in places.items() if seen is not None and seen.is_saving}
        before, self._saving = self._saving, saving
        return any(beat != before.get(rank) for rank, beat in saving.items())  # it lives: its number grows

    def _board(self) -> FailureBoard:
        number = 0 if self.round is None else self.round.number
        return FailureBoard(attempt_store(self._raw, number))

    def _observe(self, now_s: float, *, is_asked_to_stop: bool, was_asleep: bool) -> Observation:
        arrived = self._machines.meet()
        silent = {number: self._machines[number].host for number in self._machines.fall_silent()}
        arrived += self._machines.settle_doubts()
        members = self._new_members()
        running = [seat.member.number for seat in self._job.running] + [member.number for member, _ in members]
        exits = {m: int(self._store.get(f"exits/{m}")) for m in running if self._store.check([f"exits/{m}"])}
        alive = [number for number in running if number not in exits]
        dead = [
            seat.member.number for seat in self._job.running if seat.machine in silent or seat.member.number in exits
        ]
        ranks = [] if self.round is None else [rank for m in dead if (rank := self.round.rank_of(m)) is not None]
        board = self._board()
        places = {rank: board.last_seen(rank) for rank in ranks}
        return Observation(
            now_s,
            time.time(),
            machines=self._machines.present(),
            arrived=arrived,
            silent=silent,
            is_complete=not self._machines.missing(),
            members=members,
            exits=exits,
            ready={m: ready_of(self._store.get(f"ready/{m}")) for m in alive if self._store.check([f"ready/{m}"])},
            beats={m: self._store.add(f"pulse/{m}", 0) for m in alive},
            is_failure_reported=bool(exits or dead) and board.read() is not None,
            last_seen={rank: seen.where for rank, seen in places.items() if seen is not None},
            is_asked_to_stop=is_asked_to_stop,
            was_asleep=was_asleep,
        )

    def _new_members(self) -> list[tuple[Member, int]]:
        """Return the processes that have started since, with their machines."""
        members = []
        for number in range(len(self._job.seats), self._store.add("members", 0)):
            if not self._store.check([f"members/{number}"]):
                break
            values = json.loads(self._store.get(f"members/{number}"))
            machine = values.pop("incarnation")
            members.append((Member(number, **values), machine))
        return members

    def _publish(self, before: Job) -> None:
        """Announce a new round and state to the ranks, and the end of the job to the launchers."""
        job = self._job
        if job.round is not None and job.round is not before.round:
            self._store.set(f"round/{job.round.number}", job.round.to_json())
        if job.now != before.now:
            tell_now(self._store, job.now, before=before.now)
        if job.phase is Phase.ENDED:
            self._machines.order_all(end=job.code)
