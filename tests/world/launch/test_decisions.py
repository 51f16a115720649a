"""Decisions of a job whose survivors go on, from plain values: no store, no process, no clock."""

from __future__ import annotations

import signal
from collections import Counter
from typing import Any

import pytest

from paceline.world.failure.board import EXIT_STOPPED
from paceline.world.launch.decisions import (
    LEAVE_S,
    Formation,
    Job,
    Observation,
    Order,
    Phase,
    Seat,
    Survival,
    can_form,
    decide,
    holders_of_newest,
    worst,
)
from paceline.world.launch.machines import Machine
from paceline.world.rounds import Member, Now, Ready, Round

TIMEOUT_S = 30.0


class Cluster:
    """Machines that execute the orders of `decide` at once."""

    def __init__(self, *procs: int, nodes: int | None = None, **rules: Any) -> None:
        count = len(procs) if nodes is None else nodes
        self.state = Job(Survival(**{"max_nodes": count, **rules}), count)
        self.time_s = 0.0
        self.machines: dict[int, Machine] = {}
        self.members: list[tuple[Member, int]] = []
        self.exits: dict[int, int] = {}
        self.leaves: dict[int, Ready] = {}
        self.beats: Counter[int] = Counter()
        self.is_failure_reported = self.is_asked_to_stop = self.was_asleep = False
        self.last_seen: dict[int, str] = {}
        self.killed: list[int] = []
        self.lines: list[str] = []
        self._arrived: list[int] = []
        self._silent: dict[int, str] = {}
        self._num_arrivals = self._num_reported = 0
        for rank, number in enumerate(procs):
            self.arrive(rank, number)
        self.poll()

    def arrive(self, rank: int, procs: int) -> None:
        self.machines[self._num_arrivals] = Machine(rank, f"host{rank}", procs)
        self._arrived.append(self._num_arrivals)
        self._num_arrivals += 1

    def fall_silent(self, machine: int) -> None:
        self._silent[machine] = self.machines.pop(machine).host

    def poll(self) -> int | None:
        """Decide, and execute orders, until there are none; return the exit code once the job has ended."""
        orders: tuple[Order, ...] | None = None
        while orders is None or orders:
            seen = Observation(
                self.time_s,
                machines=self.machines,
                arrived=self._arrived,
                silent=self._silent,
                is_complete=len({machine.rank for machine in self.machines.values()}) >= self.state.num_nodes,
                members=self.members[self._num_reported :],
                exits=self.exits,
                ready=self.leaves,
                beats=self.beats,
                is_failure_reported=self.is_failure_reported,
                last_seen=self.last_seen,
                is_asked_to_stop=self.is_asked_to_stop,
                was_asleep=self.was_asleep,
            )
            self._num_reported = len(self.members)
            self._arrived, self._silent, self.was_asleep = [], {}, False
            self.state, orders, lines = decide(self.state, seen)
            self.lines += lines
            for order in orders:
                self._execute(order)
        return self.state.code if self.state.phase is Phase.ENDED else None

    def _execute(self, order: Order) -> None:
        if order.start is not None:
            machine = self.machines[order.machine]
            member = Member(len(self.members), machine.rank, order.start["slot"], machine.host)
            self.members.append((member, order.machine))
        if order.kill is not None:
            self.killed.append(order.kill)
            self.exit(order.kill, -signal.SIGKILL)

    def exit(self, member: int, code: int) -> None:
        self.exits[member] = code

    def ready(self, member: int, after: int, holds: int | None = None, *, needs_all: bool = False) -> None:
        self.leaves[member] = Ready(after, holds, TIMEOUT_S, needs_all)

    @property
    def round(self) -> Round:
        return self.state.current

    @property
    def round_members(self) -> list[int]:
        return [member.number for member in self.round.members]

    @property
    def now(self) -> Now:
        return self.state.now


def test_first_round_has_the_ranks_of_all_machines_in_order() -> None:
    job = Cluster(2, 2)
    assert job.round.number == 0
    assert [(member.node, member.slot) for member in job.round.members] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert job.now == Now(0)


def test_survivors_form_the_next_round_when_all_have_left() -> None:
    job = Cluster(3)
    job.exit(1, -signal.SIGKILL)
    job.poll()
    assert job.now == Now(0, is_over=True)
    job.ready(0, after=0, holds=7)
    job.poll()
    assert job.round.number == 0  # the third may still be in its step
    job.ready(2, after=0, holds=8)
    job.poll()
    assert (job.round.number, job.round_members, job.round.holders) == (1, [0, 2], (1,))
    assert [(lost.rank, lost.host) for lost in job.round.lost] == [(1, "host0")]
    assert "SIGKILL" in job.round.lost[0].why
    assert job.now == Now(1)


def test_replacement_joins_when_it_is_ready() -> None:
    job = Cluster(2, max_restarts=1)
    job.exit(0, -signal.SIGKILL)
    job.poll()
    assert len(job.members) == 3
    assert not job.state.is_steady
    job.ready(1, after=0, holds=5)
    job.poll()
    assert job.round_members == [1]  # nobody waits for a process that starts
    assert not job.state.is_steady  # but it is looked for often
    job.ready(2, after=-1)
    job.poll()
    assert job.now == Now(1, is_wanted=True)
    job.ready(1, after=1, holds=9)
    job.poll()
    assert (job.round_members, job.round.holders, job.round.joined) == ([2, 1], (1,), (0,))
    assert job.state.is_steady


def test_restarts_are_limited() -> None:
    job = Cluster(3, max_restarts=1)
    for member in (0, 1):
        job.exit(member, -signal.SIGKILL)
        job.poll()
    assert len(job.members) == 4


def test_rank_that_does_not_leave_a_broken_round_is_killed() -> None:
    job = Cluster(3)
    for member in (0, 1, 2):
        job.ready(member, after=-1)
    job.poll()
    job.exit(0, -signal.SIGKILL)
    job.ready(1, after=0, holds=3)
    job.poll()
    assert job.killed == []
    job.time_s += TIMEOUT_S + 10.0
    for member in (1, 2):
        job.beats[member] += 1  # its heart beats: it is stuck, not stopped
    job.poll()
    assert job.killed == [2]
    assert job.round_members == [1]
    assert [lost.rank for lost in job.round.lost] == [0, 2]
    assert "stuck" in job.round.lost[1].why


def test_rank_without_heartbeat_is_killed() -> None:
    job = Cluster(2)
    for member in (0, 1):
        job.ready(member, after=-1)
        job.beats[member] += 1
    job.poll()
    job.time_s += TIMEOUT_S + 1.0
    job.beats[0] += 1
    job.poll()
    assert job.killed == [1]
    assert job.now.is_over


def test_silence_while_the_launcher_was_stopped_does_not_count() -> None:
    """Ctrl-Z stops the store, too: no heart could be heard."""
    job = Cluster(2)
    for member in (0, 1):
        job.ready(member, after=-1)
        job.beats[member] += 1
    job.poll()
    job.time_s += TIMEOUT_S + 1.0
    job.was_asleep = True
    job.poll()
    assert job.killed == []
    job.time_s += TIMEOUT_S + 6.0
    job.beats[0] += 1
    job.poll()
    assert job.killed == [1]


@pytest.mark.parametrize("num_beats", [0, 1])
def test_replacement_that_never_begins_is_killed(num_beats: int) -> None:
    """Stopped while it imports, or before it has said that it is ready."""
    job = Cluster(2, max_restarts=1)
    job.exit(0, -signal.SIGKILL)
    job.ready(1, after=0, holds=3)
    job.beats[2] += num_beats
    job.poll()
    job.time_s += job.state.start_timeout_s + 1.0
    job.beats[1] += 1
    job.poll()
    assert job.killed == [2]
    assert job.round_members == [1]


def test_fewer_than_min_ranks_save_and_stop() -> None:
    job = Cluster(3, min_ranks=2)
    for member in (0, 1):
        job.exit(member, -signal.SIGKILL)
    job.ready(2, after=0, holds=4)
    job.poll()
    assert job.round.stops
    assert job.round_members == [2]


def test_fewer_than_min_ranks_wait_for_replacements() -> None:
    job = Cluster(2, min_ranks=2, max_restarts=1)
    job.exit(0, -signal.SIGKILL)
    job.ready(1, after=0, holds=4)
    job.poll()
    assert job.round.number == 0
    job.ready(2, after=-1)
    job.poll()
    assert (job.round_members, job.round.stops) == ([2, 1], False)


def test_run_that_needs_all_ranks_waits_for_the_replacement_or_ends() -> None:
    job = Cluster(2, max_restarts=1)
    job.exit(0, -signal.SIGKILL)
    job.ready(1, after=0, needs_all=True)
    job.poll()
    assert job.round.number == 0
    job.ready(2, after=-1, needs_all=True)
    job.poll()
    assert (job.round.number, job.round_members, job.round.holders) == (1, [2, 1], ())
    job.exit(2, -signal.SIGKILL)
    job.ready(1, after=1, needs_all=True)
    assert job.poll() == 1


def test_reported_failure_ends_all() -> None:
    job = Cluster(2)
    job.is_failure_reported = True
    job.exit(0, 1)
    job.poll()
    assert (job.state.phase, len(job.members)) == (Phase.ENDING, 2)
    job.exit(1, 1)
    assert job.poll() == 1


@pytest.mark.parametrize("code", [2, 3])
def test_mistakes_and_divergence_are_final(code: int) -> None:
    job = Cluster(2, max_restarts=5)
    for member in (0, 1):
        job.exit(member, code)
    assert job.poll() == code


def test_finished_run_is_over() -> None:
    job = Cluster(2)
    job.exit(0, 0)
    assert job.poll() is None
    job.exit(1, 0)
    assert job.poll() == 0


@pytest.mark.parametrize("is_told_here", [True, False])
def test_stopped_run_is_told_from_a_finished_one(is_told_here: bool) -> None:
    """Also where another machine was told, as when one pod of several is evicted: the ranks have agreed on it."""
    job = Cluster(1, 1, max_restarts=5)
    job.is_asked_to_stop = is_told_here
    job.exit(0, EXIT_STOPPED)
    assert job.poll() is None
    job.exit(1, EXIT_STOPPED)
    assert job.poll() == EXIT_STOPPED
    assert len(job.members) == 2


def test_death_after_others_have_finished_is_no_failure() -> None:
    job = Cluster(2)
    job.exit(0, 0)
    job.exit(1, -signal.SIGKILL)
    assert job.poll() == 0


def test_last_rank_left_continues_alone() -> None:
    job = Cluster(3)
    job.exit(0, 0)
    job.exit(1, -signal.SIGKILL)
    job.ready(2, after=0, holds=12)
    job.poll()
    assert job.round_members == [2]


def test_all_dead_without_restarts_is_a_crash() -> None:
    job = Cluster(2)
    for member in (0, 1):
        job.exit(member, -signal.SIGKILL)
    assert job.poll() == 1


def test_all_dead_with_restarts_begin_from_the_checkpoint() -> None:
    job = Cluster(2, max_restarts=2)
    for member in (0, 1):
        job.exit(member, -signal.SIGKILL)
    assert job.poll() is None
    job.ready(2, after=-1)
    job.poll()
    assert job.round.number == 0  # the other is on its way
    job.ready(3, after=-1)
    job.poll()
    assert (job.round.number, job.round_members, job.round.holders) == (1, [2, 3], ())


def test_replacement_that_cannot_join_does_not_end_the_others() -> None:
    job = Cluster(2, max_restarts=5)
    job.exit(0, -signal.SIGKILL)
    job.ready(1, after=0, holds=4)
    job.poll()
    job.exit(2, 2)
    assert job.poll() is None
    assert (job.round_members, len(job.members)) == ([1], 3)


def test_machine_that_arrives_later_joins() -> None:
    job = Cluster(1, nodes=1, max_nodes=2)
    assert job.round_members == [0]
    job.arrive(1, 2)
    job.poll()
    assert len(job.members) == 3
    for member in (1, 2):
        job.ready(member, after=-1)
    job.poll()
    assert job.now.is_wanted
    job.ready(0, after=0, holds=3)
    job.poll()
    assert (job.round_members, job.round.joined, job.round.holders) == ([0, 1, 2], (1, 2), (0,))


def test_silent_machine_is_lost_and_may_come_back() -> None:
    job = Cluster(1, 2)
    job.fall_silent(1)
    job.poll()
    job.ready(0, after=0, holds=6)
    job.poll()
    assert job.round_members == [0]
    assert [lost.why.partition(";")[0] for lost in job.round.lost] == ["its machine is gone"] * 2
    job.arrive(1, 2)
    job.poll()
    assert len(job.members) == 5
    for member in (3, 4):
        job.ready(member, after=-1)
    job.poll()
    assert job.now.is_wanted


def test_no_rank_is_restarted_after_a_stop_request() -> None:
    job = Cluster(2, max_restarts=5)
    job.is_asked_to_stop = True
    job.exit(0, 0)
    job.exit(1, -signal.SIGKILL)
    assert job.poll() == 1
    assert len(job.members) == 2


def test_error_of_a_rank_restarts_all_ranks_while_restarts_are_left() -> None:
    """It may be another kind of death: a device that failed, a file that could not be read."""
    job = Cluster(2, max_restarts=1)
    job.is_failure_reported = True
    job.exit(0, 1)
    job.ready(1, after=0, holds=3)  # it has lost the other, and waits for a round that does not come
    job.poll()
    assert job.killed == [1]
    assert len(job.members) == 4
    assert job.state.phase is Phase.BROKEN
    assert "starting all ranks again (0 more restarts allowed)" in job.lines[-1]
    for member in (2, 3):
        job.ready(member, after=-1)
    job.poll()
    assert (job.round.number, job.round_members, job.round.holders) == (1, [2, 3], ())
    for member in (2, 3):
        job.exit(member, 1)
    assert job.poll() == 1


def test_rank_that_waits_to_join_is_killed_when_the_run_is_stopped() -> None:
    job = Cluster(2, max_restarts=1)
    job.exit(0, -signal.SIGKILL)
    job.ready(1, after=0, holds=3)
    job.poll()
    job.ready(2, after=-1)
    job.is_asked_to_stop = True
    job.poll()
    assert job.killed == [2]
    job.exit(1, 0)
    assert job.poll() == 0


def test_survivors_stopped_between_rounds_save_in_one_more_round() -> None:
    job = Cluster(3)
    job.exit(0, -signal.SIGKILL)
    job.poll()
    job.is_asked_to_stop = True
    for member in (1, 2):
        job.ready(member, after=0, holds=3)
    job.poll()
    assert (job.round.number, job.round_members, job.killed) == (1, [1, 2], [])


@pytest.mark.parametrize(
    ("number", "needs_all", "is_coming", "formation"),
    [
        (3, False, True, Formation.NOW),
        (1, False, True, Formation.LATER),
        (1, False, False, Formation.TO_STOP),
        (2, True, True, Formation.LATER),
        (2, True, False, Formation.IMPOSSIBLE),
        (3, True, False, Formation.NOW),
        (4, True, True, Formation.IMPOSSIBLE),
    ],
)
def test_round_needs_enough_ranks(number: int, needs_all: bool, is_coming: bool, formation: Formation) -> None:
    seats = [Seat(Member(each, 0, each, "here"), 0, ready=Ready(0, 5, 1.0, needs_all)) for each in range(number)]
    assert can_form(seats, first_size=3, min_ranks=2, is_coming=is_coming) is formation


def test_no_process_starts_before_all_first_machines_have_arrived() -> None:
    job = Cluster(2, nodes=2)
    assert (job.state.phase, job.members) == (Phase.GATHERING, [])
    job.arrive(1, 1)
    job.poll()
    assert (job.state.phase, job.round_members) == (Phase.TRAINING, [0, 1, 2])


def test_processes_that_do_not_exit_in_time_are_killed_at_the_end() -> None:
    job = Cluster(3)
    job.exit(0, 3)
    job.poll()
    job.time_s += LEAVE_S - 1.0
    job.poll()
    assert (job.state.phase, job.killed) == (Phase.ENDING, [])
    job.time_s += 2.0
    assert job.poll() == 3
    assert job.killed == [1, 2]


def test_lost_rank_is_reported_with_its_last_place() -> None:
    job = Cluster(2)
    job.last_seen = {1: "training, step 7"}
    job.exit(1, -signal.SIGSEGV)
    job.poll()
    assert job.lines == ["rank 1 on host0 was lost: ended by SIGSEGV; last seen training, step 7"]


def test_decide_leaves_its_input_unchanged() -> None:
    job = Cluster(2, max_restarts=1)
    before = job.state
    after, orders, lines = decide(before, Observation(1.0, machines=job.machines, exits={0: -signal.SIGKILL}))
    assert (before.phase, before.seats[0].code, before.now) == (Phase.TRAINING, None, Now(0))
    assert (after.phase, after.seats[0].code, after.now) == (Phase.BROKEN, -signal.SIGKILL, Now(0, is_over=True))
    assert [order.start is not None for order in orders] == [True]
    assert len(lines) == 1


def test_holders_are_the_ranks_with_the_newest_copy() -> None:
    held = (7, None, 8, 8)
    seats = [Seat(Member(n, 0, n, "here"), 0, ready=Ready(0, step, 1.0)) for n, step in enumerate(held)]
    assert holders_of_newest(seats) == (2, 3)
    assert holders_of_newest(seats[1:2]) == ()


@pytest.mark.parametrize(("codes", "code"), [((0, 0), 0), ((0, 75), 75), ((-9, 0), 1), ((-9, 3), 3), ((3, 2), 2)])
def test_worst_exit_code_is_a_final_one_or_a_crash(codes: tuple[int, ...], code: int) -> None:
    assert worst(codes) == code
