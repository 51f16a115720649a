"""Failure board in the store: the first failure report, and the last known place of each rank."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from paceline.world.discover.environment import World
from paceline.world.failure.flight_recorder import SAVING
from paceline.world.store import PrefixStore, Store

EXIT_USER_ERROR = 2
EXIT_CRASH = 1
EXIT_DIVERGED = 3
EXIT_STOPPED = 75
"""What a rank tells its launcher with: it was asked to stop, has saved and left. The user sees `--stopped-code`."""
EXIT_INTERRUPT = 130

Kind = Literal["user", "crash", "lost", "interrupt"]


@dataclass(frozen=True)
class Seen:
    """Place of a rank, updated about once a second."""

    host: str
    beat: int
    """Number of its updates; a rank whose number does not grow is dead or stopped."""
    number: int
    """Its collectives so far."""
    where: str

    @property
    def is_saving(self) -> bool:
        """True while it writes a checkpoint."""
        return self.where.startswith(SAVING)


@dataclass(frozen=True)
class Failure:
    """The report of the rank that failed first."""

    rank: int
    host: str
    kind: Kind
    message: str
    trace: str = ""
    where: str = ""
    """Step and last collective of the reporting rank."""
    lost: str = ""
    """Report of a rank that lost others: a line for each, with its state and last known place."""
    user_code: int = EXIT_USER_ERROR
    """Exit code of a user's mistake."""

    @property
    def exit_code(self) -> int:
        return {"user": self.user_code, "interrupt": EXIT_INTERRUPT}.get(self.kind, EXIT_CRASH)

    def __str__(self) -> str:
        if self.kind == "user":
            return self.message
        where = f"\n  rank {self.rank}: {self.where}" if self.where else ""
        if self.kind == "lost":
            return (
                f"{self.trace}\nrank {self.rank} on {self.host} lost the other ranks: "
                f"{self.lost or 'one of them ended without a word or is stuck'}{where}\n  {self.message}"
            ).lstrip("\n")
        return f"{self.trace}\nrank {self.rank} on {self.host} failed first: {self.message}{where}"


def describe(rank: int, host: str | None, last: Seen | None, is_alive: bool) -> str:
    """Return a line about a rank that others wait for: its state, and its last known place."""
    name = f"rank {rank}" + (f" on {host}" if host else "")
    fate = "ended without a word (killed? out of memory?) or is stopped"
    if is_alive:
        fate = "runs, but did not come (stuck?)"
    return f"{name} {fate}" + (f"\n  rank {rank}: last seen {last.where}" if last is not None else "")


def who_is_silent(world: World, first_host: str | None) -> str:
    """Return a clause about the process that serves the store and does not answer."""
    name = "the launcher" if world.launcher_hosts_store else "rank 0" + (f" on {first_host}" if first_host else "")
    return f"{name} does not answer (stopped? its machine cut off?)"


def who_is_missing(number: int, before: Mapping[int, Seen | None], now: Mapping[int, Seen | None]) -> dict[int, bool]:
    """Return the silent ranks that others wait for, and True for those that still run, judged by two looks.

    One that runs and has begun as many collectives (`number`) waits in vain, too; unless nobody else is left.
    """
    alive = set()
    for rank, seen in now.items():
        then = before.get(rank)
        if seen is not None and then is not None and seen.beat > then.beat:
            alive.add(rank)
    late = [rank for rank, seen in now.items() if rank not in alive or (seen is not None and seen.number < number)]
    return {rank: rank in alive for rank in late or now}


class FailureBoard:
    """One place in the store for one report, and one for each rank to say where it is."""

    def __init__(self, store: Store) -> None:
        self._store = PrefixStore("failure", store)

    def post(self, failure: Failure) -> Failure:
        """Post a failure; return the first one that was posted."""
        return _failure(self._store.compare_set("first", "", json.dumps(asdict(failure))))

    def read(self) -> Failure | None:
        return _failure(self._store.get("first")) if self._store.check(["first"]) else None

    def acknowledge(self, rank: int) -> None:
        """Say that this rank knows; its watch and its main thread may both say so, which counts once."""
        if self._store.add(f"seen/{rank}", 1) == 1:
            self._store.add("seen", 1)

    def all_know(self, num_ranks: int) -> bool:
        return self._store.add("seen", 0) >= num_ranks

    def tell_alive(self, rank: int) -> None:
        """Say that this rank runs, although it lost others."""
        self._store.set(f"alive/{rank}", "")

    def silent(self, size: int) -> list[int]:
        """Return the ranks that have not called `tell_alive`."""
        return [rank for rank in range(size) if not self._store.check([f"alive/{rank}"])]

    def tell_ended(self, ranks: Sequence[int]) -> None:
        """Say, as their launcher, that these ranks have ended: who has not reported a failure by now will not do so."""
        self._store.set("ended", json.dumps(list(ranks)))

    def ended(self) -> list[int]:
        """Return the ranks whose launcher has called `tell_ended`."""
        return list(json.loads(self._store.get("ended"))) if self._store.check(["ended"]) else []

    def tell_place(self, rank: int, seen: Seen) -> None:
        """Say where this rank is."""
        self._store.set(f"place/{rank}", json.dumps(asdict(seen)))

    def last_seen(self, rank: int) -> Seen | None:
        key = f"place/{rank}"
        return Seen(**json.loads(self._store.get(key))) if self._store.check([key]) else None


def _failure(text: bytes) -> Failure:
    return Failure(**json.loads(text))
