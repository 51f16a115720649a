"""Pure decisions of `--on-failure continue`: who is in a round, who is dead, who is restarted, when the job ends.

`decide(job, seen)` takes the state of the job and what machines and ranks have reported since, and returns the new
state with the orders for the machines. Nothing in this file reads a clock, a store or a process; `coordinator.py`
observes and executes.

    GATHERING --all have started--> TRAINING --a member is lost or leaves--> BROKEN --all have left--> TRAINING
    TRAINING, BROKEN --the user asks to stop--> STOPPING --all have exited--> ENDED
    TRAINING, BROKEN, STOPPING --an error, or too few ranks--> ENDING --all have exited--> ENDED, or BROKEN (restart)
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

from paceline.core.units import counted
from paceline.world.failure.board import EXIT_CRASH, EXIT_DIVERGED, EXIT_STOPPED, EXIT_USER_ERROR
from paceline.world.launch.launcher import causes
from paceline.world.launch.machines import Machine
from paceline.world.rounds import Lost, Member, Now, Ready, Round

LEAVE_S = 20.0
"""Seconds that processes have to exit by themselves before they are killed."""
MARGIN_S = 5.0
"""Seconds beyond a rank's timeout until it counts as stuck, or as silent after the launcher itself was stopped."""
_FINAL = (EXIT_USER_ERROR, EXIT_DIVERGED)
_GOOD = (0, EXIT_STOPPED)
"""Exit codes of ranks that have finished or have stopped as requested."""
_TIMEOUT_S = 1800.0
_APART = 1_000_000
"""Number of the first attempt that is not a round."""


@dataclass(frozen=True)
class Survival:
    """Rules of a job whose survivors go on."""

    max_restarts: int = 0
    """Maximum number of replacements; a restart of all ranks after an error counts as one."""
    min_ranks: int = 1
    """With fewer ranks the run is saved and ends."""
    max_nodes: int = 1
    """Maximum number of machines; those beyond `Node.count` may join later."""


class Phase(Enum):
    """State of the job."""

    GATHERING = "waiting for the first machines and processes"
    TRAINING = "all members are in the round"
    BROKEN = "the round is over; its members leave it"
    STOPPING = "the user has asked the ranks to stop; they save and exit"
    ENDING = "the exit code is known; remaining processes have a deadline"
    ENDED = "the job is over"


@dataclass(frozen=True)
class Seat:
    """A process of the job."""

    member: Member
    machine: int
    """Arrival number of its machine."""
    heard_s: float = 0.0
    """Time of its last heartbeat, or of its start."""
    beat: int = -1
    code: int | None = None
    ready: Ready | None = None
    is_condemned: bool = False
    """True once its launcher was told to kill it."""
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
        """Return True if it has left the round of this number and waits for the next."""
        return self.ready is not None and self.ready.after == number


@dataclass(frozen=True)
class Order:
    """Instruction to the launcher of a machine: start a process, or kill one."""

    machine: int
    start: Mapping[str, int] | None = None
    kill: int | None = None


@dataclass(frozen=True)
class Observation:
    """What has happened since the last decision."""

    time_s: float
    """Monotonic clock."""
    epoch_s: float = 0.0
    """Seconds since the epoch, for `Round.since`."""
    machines: Mapping[int, Machine] = field(default_factory=dict)
    """Machines in the job, by arrival number."""
    arrived: Sequence[int] = ()
    """Machines that have joined since."""
    silent: Mapping[int, str] = field(default_factory=dict)
    """Hosts of machines whose launcher has fallen silent since."""
    is_complete: bool = True
    """True if all machines that the job begins with have arrived."""
    members: Sequence[tuple[Member, int]] = ()
    """Processes started since, with their machine."""
    exits: Mapping[int, int] = field(default_factory=dict)
    """Exit codes by member."""
    ready: Mapping[int, Ready] = field(default_factory=dict)
    beats: Mapping[int, int] = field(default_factory=dict)
    """Heartbeats so far, by member."""
    is_failure_reported: bool = False
    """True if a rank of this round has reported why it failed."""
    last_seen: Mapping[int, str] = field(default_factory=dict)
    """Last known place of ranks that have exited."""
    is_asked_to_stop: bool = False
    """True once the user has asked the ranks to stop."""
    was_asleep: bool = False
    """True if this launcher, which serves the store, was stopped, so that no heartbeat could arrive."""


@dataclass(frozen=True)
class Job:
    """State of a job whose survivors go on."""

    rules: Survival
    num_nodes: int = 1
    """Machines that the job begins with."""
    start_timeout_s: float = 300.0
    phase: Phase = Phase.GATHERING
    first_size: int = 0
    """Ranks that the job begins with; 0 until its machines have arrived."""
    seats: Mapping[int, Seat] = field(default_factory=dict)
    """Processes by number."""
    round: Round | None = None
    now: Now = field(default_factory=lambda: Now(-1))
    lost: tuple[Lost, ...] = ()
    """Members that the current round has lost."""
    broke: tuple[float, float] | None = None
    """Time when the round broke, by the monotonic clock and since the epoch."""
    ranks: Mapping[tuple[int, int], int] = field(default_factory=dict)
    """First rank of each (node, slot), passed to its replacements."""
    num_started: Mapping[int, int] = field(default_factory=dict)
    """Processes ordered per machine."""
    num_restarts: int = 0
    may_restart_all: bool = True
    code: int | None = None
    """Exit code of the job, once decided."""
    deadline_s: float = 0.0
    """Time when processes are killed that are left in `ENDING`."""
    orders: tuple[Order, ...] = ()
    """Orders of the decision in progress."""
    lines: tuple[str, ...] = ()
    """Messages of the decision in progress."""

    @property
    def current(self) -> Round:
        assert self.round is not None
        return self.round

    @property
    def members(self) -> list[Seat]:
        """Seats of the current round, by rank."""
        return [self.seats[member.number] for member in self.current.members]

    @property
    def running(self) -> list[Seat]:
        return [seat for seat in self.seats.values() if not seat.is_gone]

    @property
    def is_steady(self) -> bool:
        """True while all running processes train in one round and none is asked to leave it."""
        if self.phase is not Phase.TRAINING or self.now.is_wanted:
            return False
        return len(self.running) == len(self.current.members)

    def waits_to_join(self, seat: Seat) -> bool:
        """Return True if a process has never been in a round."""
        is_member = self.round is not None and self.round.rank_of(seat.member.number) is not None
        return not is_member and seat.is_ready(-1)

    def with_seat(self, seat: Seat) -> Job:
        return replace(self, seats={**self.seats, seat.member.number: seat})

    def saying(self, line: str) -> Job:
        return replace(self, lines=(*self.lines, line))


def decide(job: Job, seen: Observation) -> tuple[Job, tuple[Order, ...], tuple[str, ...]]:
    """Return the job after an observation, the orders for its machines, and messages for the user."""
    job = _start_machines(_lose_machines(job, seen), seen)
    if job.first_size:
        job = _look_at_seats(_seat_members(job, seen), seen)
        if seen.is_asked_to_stop and job.phase in (Phase.TRAINING, Phase.BROKEN):
            job = replace(job, phase=Phase.STOPPING)
        job = _STEPS[job.phase](job, seen)
    return replace(job, orders=(), lines=()), job.orders, job.lines


# -- machines and processes --------------------------------------------------------------------------------------------


def _lose_machines(job: Job, seen: Observation) -> Job:
    for number, host in seen.silent.items():
        job = job.saying(f"the machine {host} is gone: no word from its launcher")
        for seat in job.running:
            if seat.machine == number:
                job = _lose(job, seen, seat, -signal.SIGKILL, "its machine is gone")
    return job


def _start_machines(job: Job, seen: Observation) -> Job:
    """Start the ranks of machines that have arrived; the first machines begin together."""
    arrived = seen.arrived
    if not job.first_size:
        if not seen.is_complete:
            return job
        arrived = sorted(seen.machines, key=lambda number: seen.machines[number].rank)
        job = replace(job, first_size=sum(machine.procs for machine in seen.machines.values()))
    return _start_all(job, seen, arrived)


def _start_all(job: Job, seen: Observation, machines: Iterable[int]) -> Job:
    for number in machines:
        for slot in range(seen.machines[number].procs):
            job = _start(job, number, seen.machines[number].rank, slot)
    return job


def _start(job: Job, machine: int, node: int, slot: int) -> Job:
    rank = job.ranks.get((node, slot), len(job.ranks))
    start = {
        "slot": slot,
        "rank": rank,
        "size": max(job.first_size, rank + 1),
        "nodes": max(job.rules.max_nodes, job.num_nodes),
        # A process that is to join a running job has a failure board of its own.
        "attempt": 0 if job.round is None else _APART + sum(job.num_started.values()),
    }
    return replace(
        job,
        ranks={**job.ranks, (node, slot): rank},
        num_started={**job.num_started, machine: job.num_started.get(machine, 0) + 1},
        orders=(*job.orders, Order(machine, start=start)),
    )


def _seat_members(job: Job, seen: Observation) -> Job:
    seats = {member.number: Seat(member, machine, seen.time_s) for member, machine in seen.members}
    job = replace(job, seats={**job.seats, **seats})
    if job.round is None and len(job.seats) >= job.first_size:
        job = _announce(job, seen, sorted(job.seats.values(), key=_order_of))
    return job


def _look_at_seats(job: Job, seen: Observation) -> Job:
    for number, seat in job.seats.items():
        if seat.is_gone:
            continue
        if number in seen.exits:
            code = seen.exits[number]
            job = _lose(job, seen, seat, code, seat.why or _why(code))
        else:
            job = _listen(job, seen, replace(seat, ready=seen.ready.get(number, seat.ready)))
    return job


def _listen(job: Job, seen: Observation, seat: Seat) -> Job:
    """Condemn a process without a heartbeat for its timeout: it is stopped, or its machine is."""
    beat = seen.beats.get(seat.member.number, 0)
    if seen.was_asleep:
        seat = replace(seat, heard_s=seen.time_s + MARGIN_S)
    if beat != seat.beat:
        seat = replace(seat, beat=beat, heard_s=max(seat.heard_s, seen.time_s))
    job = job.with_seat(seat)
    if beat == 0 and seat.ready is not None:
        return job  # its first heartbeat is on the way
    limit_s = job.start_timeout_s if seat.ready is None else seat.ready.timeout_s
    if seen.time_s - seat.heard_s <= limit_s:
        return job
    what = "it did not begin in" if seat.ready is None else "no heartbeat for"
    return _condemn(job, [seat], f"{what} {limit_s:g} s (stopped?)")


def _condemn(job: Job, seats: Iterable[Seat], why: str = "") -> Job:
    """Have processes killed. They stay in the job until they have exited."""
    for seat in seats:
        if not seat.is_condemned:
            job = job.with_seat(replace(seat, is_condemned=True, why=why))
            job = replace(job, orders=(*job.orders, Order(seat.machine, kill=seat.member.number)))
    return job


def _lose(job: Job, seen: Observation, seat: Seat, code: int, why: str) -> Job:
    job = job.with_seat(replace(seat, code=code))
    if code in _GOOD or seen.is_asked_to_stop or job.code is not None:
        return job
    rank = None if job.round is None else job.round.rank_of(seat.member.number)
    if rank is None and job.round is not None:
        return job if code in _FINAL else _replace(job, seen, seat)  # a final one has said why it cannot join
    if seen.is_failure_reported or code in _FINAL:
        # A rank has reported why it fails: the others read it, and would fail in the same way.
        return _end(job, seen, code if code in _FINAL else EXIT_CRASH)
    if rank is None:
        return job  # before the first round: the others report that they wait for it
    place = f"; last seen {seen.last_seen[rank]}" if rank in seen.last_seen else ""
    lost = Lost(rank, seat.member.host, why + place)
    job = _break(replace(job, lost=(*job.lost, lost)).saying(str(lost)), seen)
    return _replace(job, seen, seat)


def _replace(job: Job, seen: Observation, seat: Seat) -> Job:
    if seat.machine not in seen.machines or job.num_restarts >= job.rules.max_restarts:
        return job
    job = replace(job, num_restarts=job.num_restarts + 1)
    return _start(job, seat.machine, seat.member.node, seat.member.slot)


def _break(job: Job, seen: Observation) -> Job:
    if job.broke is not None:
        return job
    now = replace(job.now, is_over=True)
    return replace(job, phase=Phase.BROKEN, broke=(seen.time_s, seen.epoch_s), now=now)


def _end(job: Job, seen: Observation, code: int) -> Job:
    """Decide the exit code. A job that has no round yet ends after its first."""
    phase = Phase.GATHERING if job.round is None else Phase.ENDING
    return replace(job, phase=phase, code=code, deadline_s=seen.time_s + LEAVE_S)


# -- one step of each phase --------------------------------------------------------------------------------------------


def _gather(job: Job, seen: Observation) -> Job:
    codes = [seat.code for seat in job.seats.values() if seat.code is not None]
    is_over = bool(codes) and len(codes) == len(job.seats)
    return replace(job, phase=Phase.ENDED, code=worst(codes)) if is_over else job


def _train(job: Job, seen: Observation) -> Job:
    left = [seat for seat in job.members if not seat.is_gone]
    if not left or any(seat.is_ready(job.current.number) for seat in left):
        return _regroup(_break(job, seen) if left else job, seen)
    has_joiners = any(job.waits_to_join(seat) for seat in job.running)
    return replace(job, now=replace(job.now, is_wanted=True)) if has_joiners else job


def _regroup(job: Job, seen: Observation) -> Job:
    """Form the next round once all members have left this one; those that do not leave in time are killed."""
    left = [seat for seat in job.members if not seat.is_gone]
    if not left:
        return _go_on_without_members(job, seen)
    inside = [seat for seat in left if not seat.is_ready(job.current.number)]
    if not inside:
        return _form(job, seen, [*left, *(seat for seat in job.running if job.waits_to_join(seat))])
    assert job.broke is not None
    broken_s = seen.time_s - job.broke[0]
    stuck = [seat for seat in inside if broken_s > seat.timeout_s + MARGIN_S]
    return _condemn(job, stuck, "it did not leave its step (stuck?)")


def _go_on_without_members(job: Job, seen: Observation) -> Job:
    """End the job whose members have all exited, or have their replacements begin from a checkpoint."""
    finished = [seat.code or 0 for seat in job.members if seat.has_finished]
    if finished:
        return _see_out(_end(job, seen, worst(finished)), seen)
    others = job.running
    if not _is_settled(job, seen):
        return job
    if not others:
        return replace(job, phase=Phase.ENDED, code=EXIT_CRASH)
    return _form(job, seen, others) if all(job.waits_to_join(seat) for seat in others) else job


def _stop(job: Job, seen: Observation) -> Job:
    """Wait until all processes have saved and exited; those that wait to join are killed."""
    if not job.running:
        codes = [seat.code or 0 for seat in job.members if not seat.is_condemned]
        return replace(job, phase=Phase.ENDED, code=worst(codes))
    job = _condemn(job, [seat for seat in job.running if job.waits_to_join(seat)])
    members = [seat for seat in job.running if not seat.is_condemned]
    if members and all(seat.is_ready(job.current.number) for seat in members):
        return _form(job, seen, members)  # asked between two rounds: they save in one more
    return job


def _see_out(job: Job, seen: Observation) -> Job:
    """Wait until all processes have exited; those that are late, or wait for another round, are killed."""
    if not job.running:
        return _end_or_restart_all(job, seen)
    is_late = seen.time_s > job.deadline_s
    number = job.current.number
    vain = [seat for seat in job.running if is_late or job.waits_to_join(seat) or seat.is_ready(number)]
    return _condemn(job, vain)


def _end_or_restart_all(job: Job, seen: Observation) -> Job:
    left = job.rules.max_restarts - job.num_restarts
    if job.code != EXIT_CRASH or not job.may_restart_all or seen.is_asked_to_stop or left <= 0:
        return replace(job, phase=Phase.ENDED)
    job = replace(job, phase=Phase.BROKEN, num_restarts=job.num_restarts + 1, code=None)
    job = job.saying(f"a rank failed: starting all ranks again ({counted(left - 1, 'more restart')} allowed)")
    return _start_all(job, seen, seen.machines)


_STEPS: Mapping[Phase, Callable[[Job, Observation], Job]] = {
    Phase.GATHERING: _gather,
    Phase.TRAINING: _train,
    Phase.BROKEN: _regroup,
    Phase.STOPPING: _stop,
    Phase.ENDING: _see_out,
    Phase.ENDED: lambda job, seen: job,
}


# -- rounds ------------------------------------------------------------------------------------------------------------


class Formation(Enum):
    """Answer to whether these ranks can be a round."""

    NOW = "they can"
    TO_STOP = "they are fewer than `--min-ranks`: they save and end"
    LATER = "they lack ranks, and some are on their way"
    IMPOSSIBLE = "the run needs another number of ranks, and none is on its way"


def can_form(seats: Sequence[Seat], first_size: int, min_ranks: int, *, is_coming: bool) -> Formation:
    """Return whether these can be a round of a job that began with `first_size` ranks."""
    needs_all = any(seat.ready is not None and seat.ready.needs_all for seat in seats)
    is_too_small = len(seats) < min_ranks
    if is_coming and (is_too_small or (needs_all and len(seats) < first_size)):
        return Formation.LATER
    if needs_all and len(seats) != first_size:
        return Formation.IMPOSSIBLE
    return Formation.TO_STOP if is_too_small else Formation.NOW


def _form(job: Job, seen: Observation, seats: Sequence[Seat]) -> Job:
    """Announce the next round, unless it lacks ranks: then wait for more, or end."""
    is_coming = not seen.is_asked_to_stop and _is_rank_coming(job, seen)
    formation = can_form(seats, job.first_size, job.rules.min_ranks, is_coming=is_coming)
    if formation is Formation.LATER:
        return job
    if formation is Formation.IMPOSSIBLE:
        job = job.saying(
            f"error: the run needs {counted(job.first_size, 'rank')}, of which {len(seats)} can go on, and none is "
            "started again (`--max-restarts`)"
        )
        return _condemn(_end(replace(job, may_restart_all=False), seen, EXIT_CRASH), seats)
    return _announce(job, seen, sorted(seats, key=_order_of), stops=formation is Formation.TO_STOP)


def _announce(job: Job, seen: Observation, seats: Sequence[Seat], *, stops: bool = False) -> Job:
    number, joined, holders = 0, tuple[int, ...](), tuple[int, ...]()
    if job.round is not None:
        number, holders = job.round.number + 1, holders_of_newest(seats)
        before = {member.number for member in job.round.members}
        joined = tuple(rank for rank, seat in enumerate(seats) if seat.member.number not in before)
    since = seen.epoch_s if job.broke is None else job.broke[1]
    members = tuple(seat.member for seat in seats)
    phase = Phase.STOPPING if seen.is_asked_to_stop else Phase.TRAINING
    return replace(
        job,
        phase=phase if job.code is None else Phase.ENDING,
        round=Round(number, members, job.first_size, holders, job.lost, joined, since, stops),
        now=Now(number),
        lost=(),
        broke=None,
        deadline_s=seen.time_s + LEAVE_S,
    )


def _is_settled(job: Job, seen: Observation) -> bool:
    """Return True if every process that was ordered from a machine still in the job has started."""
    started = [seat.machine for seat in job.seats.values()]
    return all(started.count(machine) >= job.num_started.get(machine, 0) for machine in seen.machines)


def _is_rank_coming(job: Job, seen: Observation) -> bool:
    """Return True if a process was ordered that is not ready yet."""
    return any(seat.ready is None for seat in job.running) or not _is_settled(job, seen)


def holders_of_newest(seats: Sequence[Seat]) -> tuple[int, ...]:
    """Return the ranks with the newest copy of the state in memory; none if no rank has one."""
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
        return f"it exited with code {code} and reported nothing"
    return f"ended by {signal.Signals(-code).name}{causes(-code)}"
