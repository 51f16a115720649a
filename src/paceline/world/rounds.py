"""Rounds of a job whose survivors go on: who is in, on which rank, and who has the newest state.

A round is one process group. It ends when a member is lost or when somebody waits to join; the launcher of node 0,
which alone decides (`launch/survivors.py`), then announces the next one, in its store. A process is a member by the
number that its launcher gave it, however often its rank changes, and is never one again once it was left out.

    member                                          launcher of node 0
    ready(after=r, holds=step)       ------------>  all that are left are ready, or were taken for dead
    waits                            <------------  round r+1: members by rank, who holds the newest state
    group of its own prefix, state from a holder, goes on
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from functools import partial
from types import TracebackType
from typing import Any, Protocol, TypeVar

from torch.distributed import DistError, DistNetworkError, DistStoreError

from paceline.core.errors import RanksDiffer
from paceline.world.consistency import differences
from paceline.world.discover.environment import World
from paceline.world.failure.board import EXIT_CRASH
from paceline.world.failure.flight_recorder import SAVING, trail
from paceline.world.failure.watchdog import exit_now
from paceline.world.link import break_off
from paceline.world.rendezvous.client import StoreSilent
from paceline.world.store import PrefixStore, Store, is_refusal, meet_beside

T = TypeVar("T")
MEMBER = "PACELINE_MEMBER"
"""Environment variable with the number of a process among all that the job has ever had."""
PREFIX = "paceline/rounds"
# How often a process says that it runs: a tenth of the time after which silence means that it does not, within these.
_BEAT_S, _SLOWEST_BEAT_S = 0.5, 1.0
# A store that is gone for so long is not coming back.
_GONE_S = 10.0
# How long the store may take to answer.
_ANSWER_S = 5.0


class RoundOver(DistNetworkError):
    """The launcher has ended the round in which this process waits for others."""


@dataclass(frozen=True)
class Member:
    """A process of the job."""

    number: int
    node: int
    slot: int
    """Its place among the processes of its machine, which a replacement takes over."""
    host: str


@dataclass(frozen=True)
class Lost:
    """A member that a round has lost."""

    rank: int
    host: str
    why: str

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host} was lost: {self.why}"


@dataclass(frozen=True)
class Round:
    """One process group of the job."""

    number: int
    members: tuple[Member, ...]
    """By rank."""
    first_size: int
    """Ranks that the job began with."""
    holders: tuple[int, ...] = ()
    """Ranks that have the newest state in memory; none: it is in the newest checkpoint, if anywhere."""
    lost: tuple[Lost, ...] = ()
    """Members of the round before that are gone."""
    joined: tuple[int, ...] = ()
    """Ranks of those that were not in the round before."""
    since: float = 0.0
    """Seconds since the epoch when the round before ended."""
    stops: bool = False
    """True if fewer are left than `--min-ranks`: the run is saved and ends."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: bytes | str) -> Round:
        values = json.loads(text)
        values["members"] = tuple(Member(**member) for member in values["members"])
        values["lost"] = tuple(Lost(**lost) for lost in values["lost"])
        values |= {name: tuple(values[name]) for name in ("holders", "joined")}
        return cls(**values)

    def rank_of(self, number: int) -> int | None:
        """Return the rank of a member; None if it is not in this round."""
        return next((rank for rank, member in enumerate(self.members) if member.number == number), None)

    def world(self, rank: int, around: World) -> World:
        """Return the place of a rank. Device, threads and meeting point stay what the process was started with."""
        slot = self.members[rank].slot
        return replace(around, rank=rank, size=len(self.members), attempt=self.number, local_rank=slot)


@dataclass(frozen=True)
class Now:
    """State of the job, which the launcher keeps in the store."""

    round: int
    is_over: bool = False
    """The round has lost a member."""
    is_wanted: bool = False
    """Somebody waits to join: the members are to leave the round after the step they are in."""


@dataclass(frozen=True)
class Ready:
    """A process that has left its round, or has none yet, and waits for the next."""

    after: int
    """The round that it has left; -1 for one that was in none."""
    holds: int | None
    """Steps that its state in memory has done; None if it has none."""
    timeout_s: float
    needs_all: bool = False
    """True if the run cannot go on with another number of ranks than it began with."""


class Follower(Protocol):
    """What trains in a round, and is told what happens to it, by a thread."""

    @property
    def is_asked_to_stop(self) -> bool: ...

    def ask_to_regroup(self) -> None:
        """Somebody waits to join: leave the round after the step."""
        ...

    def ask_to_stop(self) -> None:
        """The launcher of node 0 is gone: save and leave."""
        ...


class Rounds:
    """The rounds of this process: `next` leaves one and waits for the following.

    A thread says once or twice a second that the process runs, looks whether it is still wanted, and takes the main
    thread out of collectives of a round that has lost a member, which it would wait for.
    """

    def __init__(self, world: World, number: int, *, start_timeout_s: float, timeout_s: float) -> None:
        self._around, self.number, self._timeout_s = world, number, timeout_s
        self._beat_s = min(max(timeout_s / 10, _BEAT_S), _SLOWEST_BEAT_S)
        self.node = world.node_rank
        """Number of the machine; the launcher of the first one decides."""
        answer_s = min(_ANSWER_S, timeout_s)
        self._store = PrefixStore(PREFIX, meet_beside(world, start_timeout_s, answer_s))
        self._watch_client = meet_beside(world, start_timeout_s, answer_s)
        self._watch_store: Store = PrefixStore(PREFIX, self._watch_client)
        self.round: Round | None = None
        self._is_inside = False
        self._follower: Follower | None = None
        self.is_leaving = False
        """The process was asked to stop between two rounds."""
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="paceline-round-watch", daemon=True)
        self._thread.start()

    @classmethod
    def around(cls, env: Mapping[str, str], world: World, *, start_timeout_s: float, timeout_s: float) -> Rounds | None:
        """Return the rounds of this process; None where its launcher does not let survivors go on."""
        if MEMBER not in env:
            return None
        return cls(world, int(env[MEMBER]), start_timeout_s=start_timeout_s, timeout_s=timeout_s)

    def next(self, holds: int | None, *, needs_all: bool = False) -> tuple[Round, World]:
        """Leave the round, saying which state this process has, and wait for the next one that it is a member of.

        Raises `DistError` where the launcher of node 0, which decides, is gone.
        """
        after = -1 if self.round is None else self.round.number
        self.follow(None)
        self._is_inside = False
        ready = Ready(after, holds, self._timeout_s, needs_all)
        self._patiently(lambda: self._say_ready(ready))
        while True:
            now, round_ = self._patiently(lambda: self._look(after))
            rank = None if round_ is None else round_.rank_of(self.number)
            if round_ is not None and rank is not None:
                self.round, self._is_inside = round_, True
                return round_, round_.world(rank, self._around)
            self._patiently(partial(wait_for_change, self._store, now, _BEAT_S))

    def _say_ready(self, ready: Ready) -> None:
        self._store.set(f"ready/{self.number}", json.dumps(asdict(ready)))
        self._store.add("events", 1)

    def _look(self, after: int) -> tuple[Now, Round | None]:
        """Return the state of the job, and its round if that is a later one than `after`."""
        now = read_now(self._store)
        return now, read_round(self._store, now.round) if now.round > after else None

    def _patiently(self, ask: Callable[[], T]) -> T:
        """Ask again while the store is silent, for the time-out: its launcher may be frozen; not if asked to stop."""
        deadline = time.monotonic() + self._timeout_s
        while True:
            try:
                return ask()
            except StoreSilent:
                if self.is_leaving or time.monotonic() > deadline:
                    raise

    def compare(self, facts: Mapping[str, Any]) -> None:
        """Raise `RanksDiffer` unless this process has the facts of the first that has called it.

        Those of a round compare all that they have; this keeps one that joins from ending the round of the others.
        """
        text = json.dumps(facts, sort_keys=True, default=str)
        first = self._store.compare_set("facts", "", text).decode()
        found = differences([json.loads(text), json.loads(first)]) if first != text else []
        if found:
            lines = "\n".join(f"  {each.name} is {' and not '.join(each.values)}" for each in found[:12])
            raise RanksDiffer(
                f"this process cannot join the run, because it differs from the ranks that train it:\n{lines}",
                hint="the run continues without it; code and settings of a run must not change while it runs",
            )

    def check(self) -> None:
        """Raise `RoundOver` if the launcher has ended the round: who is waited for will not come."""
        now = read_now(self._store)
        if self.round is not None and (now.round > self.round.number or now.is_over):
            raise RoundOver(f"round {self.round.number} has lost a member")

    def follow(self, follower: Follower | None) -> None:
        """Tell who trains in this round what happens to it."""
        self._follower = follower

    def close(self) -> None:
        """End the thread."""
        self._stopped.set()
        self._watch_client.break_off()
        self._thread.join()

    def __enter__(self) -> Rounds:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _watch(self) -> None:
        heard = moved = time.monotonic()
        place, state = (trail.number, trail.step), None
        while not self._stopped.is_set():
            now = time.monotonic()
            if place != (trail.number, trail.step):
                place, moved = (trail.number, trail.step), now
            try:
                self._watch_store.add(f"pulse/{self.number}", 1)
                state = state or read_now(self._watch_store)
                self._obey(state)
                heard = time.monotonic()
                if wait_for_change(self._watch_store, state, self._beat_s):
                    state = None
            except DistError as error:
                state = None
                if not self._stopped.is_set():
                    self._go_without_store(now - heard, now - moved, is_gone=is_refusal(error))
                self._stopped.wait(_BEAT_S)

    def _obey(self, now: Now) -> None:
        current, follower = self.round, self._follower
        if current is None:
            return
        if now.round > current.number and read_round(self._watch_store, now.round).rank_of(self.number) is None:
            exit_now(EXIT_CRASH)  # taken for dead: what it does could only disturb those that went on
        if now.round != current.number:
            return
        if now.is_over and self._is_inside:
            break_off()
        if now.is_wanted and follower is not None:
            follower.ask_to_regroup()

    def _go_without_store(self, silent_s: float, stuck_s: float, *, is_gone: bool) -> None:
        """Have the run saved when the launcher of node 0 is gone, or silent and this process was asked to stop."""
        follower = self._follower
        is_asked = self.is_leaving if follower is None else follower.is_asked_to_stop
        if not is_for_good(silent_s, is_gone=is_gone, is_asked=is_asked):
            return
        if follower is not None:
            follower.ask_to_stop()
        if self._is_inside and stuck_s > _GONE_S and trail.doing != SAVING:
            break_off()  # it waits for ranks that are gone with that launcher


def is_for_good(silent_s: float, *, is_gone: bool, is_asked: bool) -> bool:
    """Return True if a store that has not answered for so long is not coming back.

    One that is silent, but not gone, may be that of a launcher which Ctrl-Z has frozen; not if this process was asked
    to stop, which the launcher of its own machine does when it is out of reach for that one, too.
    """
    return silent_s > _GONE_S and (is_gone or is_asked)


def read_now(store: Store) -> Now:
    """Return the state of the job, which the launcher has written before any process."""
    return Now(**json.loads(store.get("now")))


def tell_now(store: Store, now: Now, before: Now | None) -> None:
    """Write the state of the job, and wake who waits for the one before to be over."""
    store.set("now", json.dumps(asdict(now)))
    if before is not None:
        store.set(_past(before), "")


def wait_for_change(store: Store, now: Now, seconds: float) -> bool:
    """Return True as soon as the job is in another state than `now`, False after so many seconds."""
    try:
        store.wait([_past(now)], timedelta(seconds=seconds))
    except DistStoreError:  # nobody has written it in that time
        return False
    return True


def _past(now: Now) -> str:
    return f"past/{now.round}/{int(now.is_over)}{int(now.is_wanted)}"


def read_round(store: Store, number: int) -> Round:
    return Round.from_json(store.get(f"round/{number}"))


def ready_of(text: bytes) -> Ready:
    values: dict[str, Any] = json.loads(text)
    return Ready(**values)
