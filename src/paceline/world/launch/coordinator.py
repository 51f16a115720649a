"""Decisions of `--on-failure continue`: who is in a round, who is taken for dead, who is started again, when it ends.

The launcher of node 0 has the only `Coordinator`. It reads what machines and ranks have said in the store
(`survivors.py` has the keys), asks the pure functions at the end of this file what that means, and gives orders.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

from paceline.core.units import counted
from paceline.world.failure.board import EXIT_CRASH, EXIT_DIVERGED, EXIT_STOPPED, EXIT_USER_ERROR, FailureBoard
from paceline.world.launch.agents import Node
from paceline.world.launch.launcher import causes
from paceline.world.launch.machines import Machines
from paceline.world.rounds import PREFIX, Lost, Member, Now, Ready, Round, ready_of, tell_now
from paceline.world.store import PrefixStore, Store, attempt_store

# How often everything is looked at although nobody has said that something has happened: heartbeats, time-outs.
_LOOK_S = 0.25
LEAVE_S = 20.0
"""How long those that end by themselves may take, before they are killed."""
# Seconds that a rank may take to leave a round that has lost a member, beyond the time-out of a collective, which is
# broken off: it is only waited for where a rank cannot be interrupted. Also to be heard again after a launcher's sleep.
_MARGIN_S = 5.0
_FINAL = (EXIT_USER_ERROR, EXIT_DIVERGED)
_GOOD = (0, EXIT_STOPPED)
"""Exit codes of ranks that have done what they were asked for."""
_TIMEOUT_S = 1800.0
_APART = 1_000_000
"""Number of the first attempt that is no round."""


@dataclass(frozen=True)
class Survival:
    """Rules of a job whose survivors go on."""

    max_restarts: int = 0
    """Processes that are started for dead ones, in all; to start all ranks again after an error counts as one."""
    min_ranks: int = 1
    """With fewer the run is saved and ends."""
    max_nodes: int = 1
    """Machines that the job may have; those beyond the first ones may come later."""


@dataclass
class Seat:
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
        return self.code in _GOOD

    @property
    def timeout_s(self) -> float:
        return _TIMEOUT_S if self.ready is None else self.ready.timeout_s

    def is_ready(self, number: int) -> bool:
        """Return True if it has left the round of this number, and waits for the next."""
        return self.ready is not None and self.ready.after == number

    def waits_to_join(self, current: Round | None) -> bool:
        """Return True if it was in no round yet and is not in this one either."""
        is_in = current is not None and current.rank_of(self.member.number) is not None
        return not is_in and self.ready is not None and self.ready.after == -1


class Coordinator:
    """Decides over rounds. Polled by the launcher of node 0; nothing in here waits."""

    def __init__(self, store: Store, node: Node, rules: Survival) -> None:
        self._raw, self._store = store, PrefixStore(PREFIX, store)
        self._node, self._rules = node, rules
        self._machines = Machines(self._store, node, rules.max_nodes)
        self._seats: dict[int, Seat] = {}
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
        self._ending: int | None = None
        """Exit code that the job ends with, once that is decided."""
        self._may_start_again = True
        self._saving: dict[int, int] = {}  # heartbeat by rank, of those that were saving at the last look
        self._leaves_until: float | None = None
        self.is_stopping = False
        """The user has asked the ranks to leave: nobody is started again."""
        tell_now(self._store, self._now, before=None)

    def listen_anew(self) -> None:
        """Count silence anew: this launcher was stopped, so nobody could be heard, and it serves the store.

        Who had given up on the store finds it again within the margin.
        """
        for seat in self._seats.values():
            seat.heard = time.monotonic() + _MARGIN_S
        self._machines.listen_anew()

    # -- what has happened ---------------------------------------------------------------------------------------------

    def poll(self) -> int | None:
        """Look at what has happened and decide; return the exit code of the job once it is over."""
        num_events, now = self._store.add("events", 0), time.monotonic()
        if num_events == self._num_events and now - self._looked < _LOOK_S:
            return None
        self._num_events, self._looked = num_events, now
        self._meet_machines()
        if not self._first_size:
            return None
        self._meet_members()
        self._look_at_members()
        code = self._decide()
        if code is not None:
            self._machines.order_all(end=code)
        return code

    @property
    def is_steady(self) -> bool:
        """True while all who were started train in one round, and nobody is asked to leave it."""
        if self.round is None or self._now.is_over or self._now.is_wanted or self.is_stopping:
            return False
        return self._ending is None and sum(not seat.is_gone for seat in self._seats.values()) == len(
            self.round.members
        )

    def missing(self) -> list[int]:
        """Return the machines that the job waits for to begin."""
        return [] if self._first_size else self._machines.missing()

    def hosts(self) -> list[str]:
        return self._machines.hosts()

    def ended_by(self, number: int) -> bool:
        """Return True if all processes were ended by this signal."""
        return bool(self._seats) and all(seat.code == -number for seat in self._seats.values())

    def _meet_machines(self) -> None:
        """Start the ranks of machines that have come; the first ones begin together."""
        came = self._machines.meet()
        for incarnation in self._machines.fall_silent():
            self._lose_machine(incarnation)
        came += self._machines.settle_doubts()
        if not self._first_size and not self._machines.missing():
            came = sorted(self._machines.present(), key=lambda number: self._machines[number].rank)
            self._first_size = sum(self._machines[number].procs for number in came)
        for incarnation in came if self._first_size else []:
            self._start_machine(incarnation)

    def _start_machine(self, incarnation: int) -> None:
        machine = self._machines[incarnation]
        for slot in range(machine.procs):
            self._start(incarnation, machine.rank, slot)

    def _lose_machine(self, incarnation: int) -> None:
        _say(f"the machine {self._machines[incarnation].host} is gone: no word from its launcher")
        for seat in self._seats.values():
            if seat.incarnation == incarnation and not seat.is_gone:
                self._lose(seat, -signal.SIGKILL, "its machine is gone")

    def _start(self, incarnation: int, node: int, slot: int) -> None:
        rank = self._slots.setdefault((node, slot), len(self._slots))
        # One that is to join fails by itself, if it does, and on a failure board that is no round's.
        attempt = 0 if self.round is None else _APART + sum(self._num_started.values())
        size = max(self._first_size, rank + 1)
        nodes = max(self._rules.max_nodes, self._node.count)
        self._num_started[incarnation] = self._num_started.get(incarnation, 0) + 1
        self._machines.order(
            incarnation, start={"slot": slot, "rank": rank, "size": size, "nodes": nodes, "attempt": attempt}
        )

    def _meet_members(self) -> None:
        for number in range(len(self._seats), self._store.add("members", 0)):
            if not self._store.check([f"members/{number}"]):
                return
            values = json.loads(self._store.get(f"members/{number}"))
            incarnation = values.pop("incarnation")
            self._seats[number] = Seat(Member(number, **values), incarnation)
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

    def _listen(self, seat: Seat) -> None:
        """Take a member for dead whose heart has not beaten for its time-out: it is stopped, or its machine is."""
        beat, now = self._store.add(f"pulse/{seat.member.number}", 0), time.monotonic()
        if beat != seat.beat:
            seat.beat, seat.heard = beat, now
        if beat == 0 and seat.ready is not None:
            return  # its first one is on the way
        limit_s = self._node.timeout_s if seat.ready is None else seat.ready.timeout_s
        if now - seat.heard > limit_s:
            what = "it did not begin in" if seat.ready is None else "no heartbeat for"
            self._condemn(seat, f"{what} {limit_s:g} s (stopped?)")

    def _condemn(self, seat: Seat, why: str) -> None:
        if not seat.is_condemned:
            seat.is_condemned, seat.why = True, why
            self._machines.order(seat.incarnation, kill=seat.member.number)

    def _lose(self, seat: Seat, code: int, why: str) -> None:
        seat.code = code
        rank = None if self.round is None else self.round.rank_of(seat.member.number)
        if code in _GOOD or self.is_stopping or self._ending is not None:
            return
        if rank is None and self.round is not None:
            if code not in _FINAL:  # else it has said why it cannot join
                self._replace(seat)
            return
        if self._board().read() is not None or code in _FINAL:
            # A rank has said why it fails: the others learn of it by themselves, and would fail in the same way.
            self._ending = next((each for each in _FINAL if each == code), EXIT_CRASH)
            return
        if rank is None:
            return  # before the first round: all others wait for it in vain, and say so
        lost = Lost(rank, seat.member.host, why + self._last_seen(rank))
        self._lost.append(lost)
        _say(str(lost))
        self._break()
        self._replace(seat)

    def _replace(self, seat: Seat) -> None:
        if self._machines.is_gone(seat.incarnation) or self._restarts >= self._rules.max_restarts:
            return
        self._restarts += 1
        self._start(seat.incarnation, seat.member.node, seat.member.slot)

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
        if self.is_stopping or self._ending is not None:
            return self._see_out(self.round)
        members = [self._seats[member.number] for member in self.round.members]
        left = [seat for seat in members if not seat.is_gone]
        if not left:
            return self._end_or_start_anew(members)
        joiners = self._joiners(self.round)
        if any(seat.is_ready(self.round.number) for seat in left):
            self._break()
        self._do(next_move(left, joiners, self.round.number, is_broken=self._broke is not None), left, joiners)
        return None

    def _do(self, move: Move, left: Sequence[Seat], joiners: Sequence[Seat]) -> None:
        if move is Move.INVITE and not self._now.is_wanted:
            self._tell_now(replace(self._now, is_wanted=True))
        elif move is Move.HURRY:
            self._hurry(left)
        elif move is Move.FORM:
            self._form([*left, *joiners])

    def _joiners(self, current: Round) -> list[Seat]:
        return [seat for seat in self._seats.values() if not seat.is_gone and seat.waits_to_join(current)]

    def _end_without_round(self) -> int | None:
        codes = [seat.code for seat in self._seats.values() if seat.code is not None]
        return worst(codes) if codes and len(codes) == len(self._seats) else None

    def _see_out(self, current: Round) -> int | None:
        """Wait for all to end, which know that they are to; those that do not are killed."""
        left = [seat for seat in self._seats.values() if not seat.is_gone]
        if not left:
            return self._end_or_start_all_again(current)
        if self._ending is not None and self._leaves_until is None:
            self._leaves_until = time.monotonic() + LEAVE_S
        is_overdue = self._leaves_until is not None and time.monotonic() > self._leaves_until
        for seat in left:
            if is_overdue or waits_in_vain(seat, current, is_over=self._ending is not None):
                self._condemn(seat, "")
        members = [seat for seat in left if not seat.is_condemned]
        if self._ending is None and members and all(seat.is_ready(current.number) for seat in members):
            self._form(members)  # asked to leave while between rounds: one more round, in which they save
        return None

    def _end_or_start_all_again(self, current: Round) -> int | None:
        """Everybody has ended: return the exit code, unless it was an error after which all are started again."""
        if self._ending is None:
            last = [self._seats[member.number] for member in current.members]
            return worst([seat.code or 0 for seat in last if not seat.is_condemned])
        left = self._rules.max_restarts - self._restarts
        if self._ending != EXIT_CRASH or not self._may_start_again or self.is_stopping or left <= 0:
            return self._ending
        self._restarts += 1
        self._ending = self._leaves_until = None
        _say(f"a rank failed: starting all ranks again ({counted(left - 1, 'more restart')} allowed)")
        for incarnation in self._machines.present():
            self._start_machine(incarnation)
        return None

    def _end_or_start_anew(self, members: Sequence[Seat]) -> int | None:
        """All of the round are gone: the run has ended, or those that were started for them begin from a checkpoint."""
        assert self.round is not None
        others = [seat for seat in self._seats.values() if not seat.is_gone]
        if any(seat.has_finished for seat in members):
            self._ending = worst([seat.code or 0 for seat in members if seat.has_finished])
            return self._see_out(self.round)
        if not others and self._is_settled():
            return EXIT_CRASH
        ready = [seat for seat in others if seat.waits_to_join(self.round)]
        if ready and len(ready) == len(others) and self._is_settled():
            self._form(ready)
        return None

    def _is_settled(self) -> bool:
        """Return True if every process that was ordered has been seen, but those of machines that are gone."""
        for incarnation, number in self._num_started.items():
            seen = sum(seat.incarnation == incarnation for seat in self._seats.values())
            if seen < number and not self._machines.is_gone(incarnation):
                return False
        return True

    def _hurry(self, left: Sequence[Seat]) -> None:
        """Take for dead who has not left a broken round in the time that a collective may take."""
        assert self._broke is not None
        assert self.round is not None
        for seat in left:
            is_late = time.monotonic() - self._broke > seat.timeout_s + _MARGIN_S
            if is_late and not seat.is_ready(self.round.number):
                self._condemn(seat, "it did not leave its step (stuck?)")

    def _form(self, seats: Sequence[Seat]) -> None:
        """Announce the next round, of these, unless it lacks ranks: then others come first, or the run ends."""
        assert self.round is not None
        is_coming = self._is_somebody_coming() and not self.is_stopping
        formation = can_form(seats, self._first_size, self._rules.min_ranks, is_coming=is_coming)
        if formation is Formation.IMPOSSIBLE:
            self._end_for_lack_of_ranks(seats)
        if formation in (Formation.LATER, Formation.IMPOSSIBLE):
            return
        seats = sorted(seats, key=_order_of)
        before = {member.number for member in self.round.members}
        joined = tuple(rank for rank, seat in enumerate(seats) if seat.member.number not in before)
        stops = formation is Formation.TO_STOP
        self._announce([seat.member for seat in seats], holders_of_newest(seats), joined, stops=stops)

    def _is_somebody_coming(self) -> bool:
        """Return True if a process was ordered that has not said yet that it is ready."""
        has_silent = any(not seat.is_gone and seat.ready is None for seat in self._seats.values())
        return has_silent or not self._is_settled()

    def _end_for_lack_of_ranks(self, left: Sequence[Seat]) -> None:
        _say(
            f"error: the run needs {counted(self._first_size, 'rank')}, of which {len(left)} can go on, and none is "
            "started again (`--max-restarts`)"
        )
        self._ending, self._may_start_again = EXIT_CRASH, False
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
        tell_now(self._store, now, before=self._now)
        self._now = now


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


# -- pure decisions ----------------------------------------------------------------------------------------------------


class Move(Enum):
    """What to do about a round of which somebody is left."""

    WAIT = "wait"
    INVITE = "ask its members to leave, because somebody waits to join"
    HURRY = "wait for members that have not left it, as long as they may take"
    FORM = "form the next one"


def next_move(left: Sequence[Seat], joiners: Sequence[Seat], number: int, *, is_broken: bool) -> Move:
    """Return what to do about round `number`, of which these are left while those wait to join."""
    if not is_broken:
        return Move.INVITE if joiners else Move.WAIT
    return Move.FORM if all(seat.is_ready(number) for seat in left) else Move.HURRY


class Formation(Enum):
    """Answer to whether these ranks can be a round."""

    NOW = "they can"
    TO_STOP = "they are fewer than `--min-ranks`: they save and end"
    LATER = "they lack ranks, and some are on their way"
    IMPOSSIBLE = "the run needs another number of ranks, and nobody else comes"


def can_form(seats: Sequence[Seat], first_size: int, min_ranks: int, *, is_coming: bool) -> Formation:
    """Return whether these can be a round of a job that began with `first_size` ranks."""
    needs_all = any(seat.ready is not None and seat.ready.needs_all for seat in seats)
    is_too_small = len(seats) < min_ranks
    if is_coming and (is_too_small or (needs_all and len(seats) < first_size)):
        return Formation.LATER
    if needs_all and len(seats) != first_size:
        return Formation.IMPOSSIBLE
    return Formation.TO_STOP if is_too_small else Formation.NOW


def waits_in_vain(seat: Seat, current: Round, *, is_over: bool) -> bool:
    """Return True for a process that waits for a round which will not come, in a job that ends.

    Without `is_over` the user has asked it to end: members that have left a round get one more, in which they save.
    """
    return seat.waits_to_join(current) or (is_over and seat.is_ready(current.number))


def holders_of_newest(seats: Sequence[Seat]) -> tuple[int, ...]:
    """Return the ranks that have the newest copy of the state in memory; none if nobody has one."""
    held = [-1 if seat.ready is None or seat.ready.holds is None else seat.ready.holds for seat in seats]
    newest = max(held)
    return tuple(rank for rank, step in enumerate(held) if step == newest >= 0)


def worst(codes: Sequence[int]) -> int:
    """Return the exit code for the user, of those of all ranks."""
    if all(code in _GOOD for code in codes):
        return max(codes, default=0)
    return next((code for code in _FINAL if code in codes), EXIT_CRASH)


def _order_of(seat: Seat) -> tuple[int, int]:
    return seat.member.node, seat.member.slot


def _why(code: int) -> str:
    if code >= 0:
        return f"it ended without a word, with exit code {code}"
    return f"ended by {signal.Signals(-code).name}{causes(-code)}"
