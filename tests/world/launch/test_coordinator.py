"""Decisions of the coordinator, with a store in memory and processes that are only said to run."""

from __future__ import annotations

import json
import signal
import time
from dataclasses import asdict
from typing import Any

import pytest
from torch.distributed import HashStore

from paceline.world.failure.board import EXIT_STOPPED, Failure, FailureBoard
from paceline.world.launch import coordinator
from paceline.world.launch.agents import Node
from paceline.world.launch.coordinator import Coordinator, Formation, Move, Seat, Survival, can_form, next_move
from paceline.world.rounds import PREFIX, Member, Now, Ready, Round, read_now
from paceline.world.store import PrefixStore, attempt_store

TIMEOUT_S = 30.0


class Job:
    """A job on machines that do as they are told, at once."""

    def __init__(self, *procs: int, nodes: int | None = None, **rules: Any) -> None:
        self.raw = HashStore()
        self.store = PrefixStore(PREFIX, self.raw)
        self.num_members = 0
        self.orders: dict[int, int] = {}
        self.killed: list[int] = []
        self.ends: list[int] = []
        self.refused: dict[int, str] = {}
        self.arrivals: list[int] = []
        count = len(procs) if nodes is None else nodes
        self.coordinator = Coordinator(self.raw, Node(0, count), Survival(**{"max_nodes": count, **rules}))
        for rank, number in enumerate(procs):
            self.arrive(rank, number)
        self.poll()

    def arrive(self, rank: int, procs: int) -> None:
        incarnation = self.store.add("nodes", 1) - 1
        self.arrivals.append(rank)
        self.store.set(f"nodes/{incarnation}", json.dumps({"rank": rank, "host": f"host{rank}", "procs": procs}))

    def poll(self) -> int | None:
        """Let the coordinator look, and do what it orders, until it orders nothing more."""
        code = None
        for _ in range(4):
            self.store.add("events", 1)
            code = self.coordinator.poll()
            for incarnation, rank in enumerate(self.arrivals):
                while self.store.check([f"orders/{incarnation}/{self.orders.get(incarnation, 0)}"]):
                    number = self.orders.get(incarnation, 0)
                    self.orders[incarnation] = number + 1
                    self.obey(incarnation, rank, **json.loads(self.store.get(f"orders/{incarnation}/{number}")))
            if code is not None:
                return code
        return code

    def obey(
        self,
        incarnation: int,
        rank: int,
        start: dict[str, int] | None = None,
        kill: int | None = None,
        end: int | None = None,
        refuse: str = "",
    ) -> None:
        if start is not None:
            number = self.store.add("members", 1) - 1
            member = {"incarnation": incarnation, "node": rank, "slot": start["slot"], "host": f"host{rank}"}
            self.store.set(f"members/{number}", json.dumps(member))
            self.num_members += 1
        if kill is not None:
            self.killed.append(kill)
            self.exit(kill, -signal.SIGKILL)
        if end is not None:
            self.ends.append(end)
        if refuse:
            self.refused[incarnation] = refuse

    def exit(self, member: int, code: int) -> None:
        self.store.set(f"exits/{member}", str(code))

    def ready(self, member: int, after: int, holds: int | None = None, *, needs_all: bool = False) -> None:
        self.store.set(f"ready/{member}", json.dumps(asdict(Ready(after, holds, TIMEOUT_S, needs_all))))

    @property
    def round(self) -> Round:
        assert self.coordinator.round is not None
        return self.coordinator.round

    @property
    def members(self) -> list[int]:
        return [member.number for member in self.round.members]

    @property
    def now(self) -> Now:
        return read_now(self.store)


def test_first_round_has_all() -> None:
    job = Job(2, 2)
    assert job.round.number == 0
    assert [(member.node, member.slot) for member in job.round.members] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert job.now == Now(0)


def test_survivors_form_the_next_round_when_all_have_left() -> None:
    job = Job(3)
    job.exit(1, -signal.SIGKILL)
    job.poll()
    assert job.now == Now(0, is_over=True)
    job.ready(0, after=0, holds=7)
    job.poll()
    assert job.round.number == 0  # the third may still be in its step
    job.ready(2, after=0, holds=8)
    job.poll()
    assert (job.round.number, job.members, job.round.holders) == (1, [0, 2], (1,))
    assert [(lost.rank, lost.host) for lost in job.round.lost] == [(1, "host0")]
    assert "SIGKILL" in job.round.lost[0].why
    assert job.now == Now(1)


def test_replacement_joins_when_it_is_ready() -> None:
    job = Job(2, max_restarts=1)
    job.exit(0, -signal.SIGKILL)
    job.poll()
    assert job.num_members == 3
    assert not job.coordinator.is_steady
    job.ready(1, after=0, holds=5)
    job.poll()
    assert job.members == [1]  # nobody waits for a process that starts
    assert not job.coordinator.is_steady  # but it is looked for often
    job.ready(2, after=-1)
    job.poll()
    assert job.now == Now(1, is_wanted=True)
    job.ready(1, after=1, holds=9)
    job.poll()
    assert (job.members, job.round.holders, job.round.joined) == ([2, 1], (1,), (0,))
    assert job.coordinator.is_steady


def test_restarts_are_limited() -> None:
    job = Job(3, max_restarts=1)
    for member in (0, 1):
        job.exit(member, -signal.SIGKILL)
        job.poll()
    assert job.num_members == 4


def test_one_that_does_not_leave_its_step_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(3)
    for member in (0, 1, 2):
        job.ready(member, after=-1)
    job.poll()
    job.exit(0, -signal.SIGKILL)
    job.ready(1, after=0, holds=3)
    job.poll()
    assert job.killed == []
    later = time.monotonic() + TIMEOUT_S + 10.0
    monkeypatch.setattr(coordinator.time, "monotonic", lambda: later)
    for member in (1, 2):
        job.store.add(f"pulse/{member}", 1)  # its heart beats: it is stuck, not stopped
    job.poll()
    assert job.killed == [2]
    assert job.members == [1]
    assert [lost.rank for lost in job.round.lost] == [0, 2]
    assert "stuck" in job.round.lost[1].why


def test_one_without_heartbeat_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(2)
    for member in (0, 1):
        job.ready(member, after=-1)
        job.store.add(f"pulse/{member}", 1)
    job.poll()
    later = time.monotonic() + TIMEOUT_S + 1.0
    monkeypatch.setattr(coordinator.time, "monotonic", lambda: later)
    job.store.add("pulse/0", 1)
    job.poll()
    assert job.killed == [1]
    assert job.now.is_over


def test_who_was_silent_while_the_launcher_was_stopped_is_heard_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-Z stops the store, too: no heart could be heard."""
    job = Job(2)
    for member in (0, 1):
        job.ready(member, after=-1)
        job.store.add(f"pulse/{member}", 1)
    job.poll()
    later = time.monotonic() + TIMEOUT_S + 1.0
    monkeypatch.setattr(coordinator.time, "monotonic", lambda: later)
    job.coordinator.listen_anew()
    job.poll()
    assert job.killed == []
    later += TIMEOUT_S + 6.0
    job.store.add("pulse/0", 1)
    job.poll()
    assert job.killed == [1]


@pytest.mark.parametrize("num_beats", [0, 1])
def test_replacement_that_never_begins_is_killed(num_beats: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped while it imports, or before it has said that it is ready."""
    job = Job(2, max_restarts=1)
    job.exit(0, -signal.SIGKILL)
    job.ready(1, after=0, holds=3)
    job.store.add("pulse/2", num_beats)
    job.poll()
    later = time.monotonic() + Node().timeout_s + 1.0
    monkeypatch.setattr(coordinator.time, "monotonic", lambda: later)
    job.store.add("pulse/1", 1)
    job.poll()
    assert job.killed == [2]
    assert job.members == [1]


def test_fewer_than_min_ranks_save_and_stop() -> None:
    job = Job(3, min_ranks=2)
    for member in (0, 1):
        job.exit(member, -signal.SIGKILL)
    job.ready(2, after=0, holds=4)
    job.poll()
    assert job.round.stops
    assert job.members == [2]


def test_fewer_than_min_ranks_wait_for_replacements() -> None:
    job = Job(2, min_ranks=2, max_restarts=1)
    job.exit(0, -signal.SIGKILL)
    job.ready(1, after=0, holds=4)
    job.poll()
    assert job.round.number == 0
    job.ready(2, after=-1)
    job.poll()
    assert (job.members, job.round.stops) == ([2, 1], False)


def test_run_that_needs_all_ranks_waits_for_the_replacement_or_ends() -> None:
    job = Job(2, max_restarts=1)
    job.exit(0, -signal.SIGKILL)
    job.ready(1, after=0, needs_all=True)
    job.poll()
    assert job.round.number == 0
    job.ready(2, after=-1, needs_all=True)
    job.poll()
    assert (job.round.number, job.members, job.round.holders) == (1, [2, 1], ())
    job.exit(2, -signal.SIGKILL)
    job.ready(1, after=1, needs_all=True)
    assert job.poll() == 1


def test_reported_failure_ends_all() -> None:
    job = Job(2)
    board = FailureBoard(attempt_store(job.raw, 0))
    board.post(Failure(0, "host0", "crash", "ValueError: no"))
    job.exit(0, 1)
    job.poll()
    assert job.num_members == 2
    job.exit(1, 1)
    assert job.poll() == 1


@pytest.mark.parametrize("code", [2, 3])
def test_mistakes_and_divergence_are_final(code: int) -> None:
    job = Job(2, max_restarts=5)
    for member in (0, 1):
        job.exit(member, code)
    assert job.poll() == code
    assert job.ends == [code]


def test_finished_run_is_over() -> None:
    job = Job(2)
    job.exit(0, 0)
    assert job.poll() is None
    job.exit(1, 0)
    assert job.poll() == 0


@pytest.mark.parametrize("is_told_here", [True, False])
def test_stopped_run_is_told_from_a_finished_one(is_told_here: bool) -> None:
    """Also where another machine was told, as when one pod of several is evicted: the ranks have agreed on it."""
    job = Job(1, 1, max_restarts=5)
    job.coordinator.is_stopping = is_told_here
    job.exit(0, EXIT_STOPPED)
    assert job.poll() is None
    job.exit(1, EXIT_STOPPED)
    assert job.poll() == EXIT_STOPPED
    assert (job.ends, job.num_members) == ([EXIT_STOPPED] * 2, 2)


def test_death_after_others_have_finished_is_no_failure() -> None:
    job = Job(2)
    job.exit(0, 0)
    job.exit(1, -signal.SIGKILL)
    assert job.poll() == 0


def test_one_left_alone_at_the_end_goes_on_by_itself() -> None:
    job = Job(3)
    job.exit(0, 0)
    job.exit(1, -signal.SIGKILL)
    job.ready(2, after=0, holds=12)
    job.poll()
    assert job.members == [2]


def test_all_dead_without_restarts_is_a_crash() -> None:
    job = Job(2)
    for member in (0, 1):
        job.exit(member, -signal.SIGKILL)
    assert job.poll() == 1


def test_all_dead_with_restarts_begin_from_the_checkpoint() -> None:
    job = Job(2, max_restarts=2)
    for member in (0, 1):
        job.exit(member, -signal.SIGKILL)
    assert job.poll() is None
    job.ready(2, after=-1)
    job.poll()
    assert job.round.number == 0  # the other is on its way
    job.ready(3, after=-1)
    job.poll()
    assert (job.round.number, job.members, job.round.holders) == (1, [2, 3], ())


def test_one_that_cannot_join_does_not_end_the_others() -> None:
    job = Job(2, max_restarts=5)
    job.exit(0, -signal.SIGKILL)
    job.ready(1, after=0, holds=4)
    job.poll()
    job.exit(2, 2)
    assert job.poll() is None
    assert (job.members, job.num_members) == ([1], 3)


def test_machine_that_comes_later_joins() -> None:
    job = Job(1, nodes=1, max_nodes=2)
    assert job.members == [0]
    job.arrive(1, 2)
    job.poll()
    assert job.num_members == 3
    for member in (1, 2):
        job.ready(member, after=-1)
    job.poll()
    assert job.now.is_wanted
    job.ready(0, after=0, holds=3)
    job.poll()
    assert (job.members, job.round.joined, job.round.holders) == ([0, 1, 2], (1, 2), (0,))


def test_machine_is_refused_where_there_is_no_room() -> None:
    job = Job(1, nodes=1, max_nodes=2)
    job.arrive(2, 1)
    job.arrive(0, 1)
    job.poll()
    assert "room for 2 machines" in job.refused[1]
    assert "node 0 on host0 is in it" in job.refused[2]
    assert job.num_members == 1


def test_machine_that_is_back_before_it_was_missed_waits_for_that(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(1, 1)
    job.arrive(1, 1)
    job.poll()
    assert (job.refused, job.num_members) == ({}, 2)
    later = time.monotonic() + 60.0
    monkeypatch.setattr(coordinator.time, "monotonic", lambda: later)
    job.poll()
    assert (job.refused, job.num_members) == ({}, 3)
    job.ready(0, after=0, holds=6)
    job.ready(2, after=-1)
    job.poll()
    assert (job.members, job.round.joined) == ([0, 2], (1,))


def test_second_machine_of_a_number_is_refused_when_the_first_lives() -> None:
    job = Job(1, 1)
    job.arrive(1, 1)
    job.poll()
    assert job.refused == {}
    job.store.add("beat/1", 3)
    job.poll()
    assert "node 1 on host1 is in it" in job.refused[2]
    assert job.num_members == 2


def test_silent_machine_is_lost_and_may_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(1, 2)
    job.poll()
    later = time.monotonic() + 60.0
    monkeypatch.setattr(coordinator.time, "monotonic", lambda: later)
    job.poll()
    job.ready(0, after=0, holds=6)
    job.poll()
    assert job.members == [0]
    assert [lost.why.partition(";")[0] for lost in job.round.lost] == ["its machine is gone"] * 2
    job.arrive(1, 2)
    job.poll()
    assert job.num_members == 5
    for member in (3, 4):
        job.ready(member, after=-1)
    job.poll()
    assert job.now.is_wanted


def test_nobody_is_started_again_when_the_user_has_asked_to_stop() -> None:
    job = Job(2, max_restarts=5)
    job.coordinator.is_stopping = True
    job.exit(0, 0)
    job.exit(1, -signal.SIGKILL)
    assert job.poll() == 1
    assert job.num_members == 2


def test_error_of_a_rank_starts_all_again_while_that_is_allowed(capsys: pytest.CaptureFixture[str]) -> None:
    """It may be another kind of death: a device that failed, a file that could not be read."""
    job = Job(2, max_restarts=1)
    FailureBoard(attempt_store(job.raw, 0)).post(Failure(0, "host0", "crash", "OSError: no such disk"))
    job.exit(0, 1)
    job.ready(1, after=0, holds=3)  # it has lost the other, and waits for a round that does not come
    job.poll()
    assert job.killed == [1]
    assert job.num_members == 4
    assert "starting all ranks again (0 more restarts allowed)" in capsys.readouterr().err
    for member in (2, 3):
        job.ready(member, after=-1)
    job.poll()
    assert (job.round.number, job.members, job.round.holders) == (1, [2, 3], ())
    FailureBoard(attempt_store(job.raw, 1)).post(Failure(0, "host0", "crash", "OSError: no such disk"))
    for member in (2, 3):
        job.exit(member, 1)
    assert job.poll() == 1


def test_who_waits_to_join_does_not_keep_a_stopped_run_alive() -> None:
    job = Job(2, max_restarts=1)
    job.exit(0, -signal.SIGKILL)
    job.ready(1, after=0, holds=3)
    job.poll()
    job.ready(2, after=-1)
    job.coordinator.is_stopping = True
    job.poll()
    assert job.killed == [2]
    job.exit(1, 0)
    assert job.poll() == 0


def test_survivors_that_are_stopped_between_rounds_get_one_more_to_save_in() -> None:
    job = Job(3)
    job.exit(0, -signal.SIGKILL)
    job.poll()
    job.coordinator.is_stopping = True
    for member in (1, 2):
        job.ready(member, after=0, holds=3)
    job.poll()
    assert (job.round.number, job.members, job.killed) == (1, [1, 2], [])


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
def test_whether_ranks_can_be_a_round(number: int, needs_all: bool, is_coming: bool, formation: Formation) -> None:
    seats = [Seat(Member(each, 0, each, "here"), 0, ready=Ready(0, 5, 1.0, needs_all)) for each in range(number)]
    assert can_form(seats, first_size=3, min_ranks=2, is_coming=is_coming) is formation


def test_next_move() -> None:
    inside, ready = Seat(Member(0, 0, 0, "here"), 0), Seat(Member(1, 0, 1, "here"), 0, ready=Ready(4, 5, 1.0))
    assert next_move([inside, ready], [], 4, is_broken=False) is Move.WAIT
    assert next_move([inside, ready], [ready], 4, is_broken=False) is Move.INVITE
    assert next_move([inside, ready], [ready], 4, is_broken=True) is Move.HURRY
    assert next_move([ready], [], 4, is_broken=True) is Move.FORM
