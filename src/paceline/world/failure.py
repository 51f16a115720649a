"""All ranks fail together, and the first real failure is printed once.

The failing rank posts its report in the store, the first one wins and prints. A rank whose collective broke because
another is gone looks there before it believes its own error; a rank that computes or hangs is told by its watch.
"""

from __future__ import annotations

import atexit
import json
import os
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Literal, NoReturn

from torch.distributed import DistBackendError, DistError, DistNetworkError

from paceline.config.errors import PacelineError
from paceline.world.discover import World
from paceline.world.meeting import FirstRankUnreached, MeetingPointTaken, PrefixStore, Store, meet, meet_apart, poll
from paceline.world.preflight import RanksMissing

EXIT_USER_ERROR = 2
EXIT_CRASH = 1
EXIT_INTERRUPT = 130

# How long a rank with a broken collective looks for another's report before it files its own.
_LOOK_S = 3.0
# How long a rank that learns of a failure may go on by itself before its watch ends it.
_GRACE_S = 5.0
_WATCH_EVERY_S = 1.0
# Looks in a row without an answer after which the store, and the process that served it, count as gone.
_MOST_UNANSWERED = 10
# How long the rank that serves the store stays, so that the others can read the report.
_LINGER_S = 10.0
# How long a rank that failed before it ever met the others tries to reach them.
_LATE_MEETING_S = 3.0

Kind = Literal["user", "crash", "lost", "interrupt"]


@dataclass(frozen=True)
class Failure:
    """The report of the rank that failed first."""

    rank: int
    host: str
    kind: Kind
    message: str
    trace: str = ""
    silent: str = ""
    """Of a rank that lost others: those that say nothing any more, as `rank 2 on n1`."""

    @property
    def exit_code(self) -> int:
        return {"user": EXIT_USER_ERROR, "interrupt": EXIT_INTERRUPT}.get(self.kind, EXIT_CRASH)

    def __str__(self) -> str:
        if self.kind == "user":
            return self.message
        if self.kind == "lost":
            return (
                f"{self.trace}\nrank {self.rank} on {self.host} lost the other ranks: {self.silent or 'one of them'} "
                f"ended without a word (killed? out of memory?) or is stuck\n  {self.message}"
            )
        return f"{self.trace}\nrank {self.rank} on {self.host} failed first: {self.message}"


class FailureBoard:
    """One place in the store for one report; the first to write it wins."""

    def __init__(self, store: Store) -> None:
        self._store = PrefixStore("failure", store)

    def post(self, failure: Failure) -> Failure:
        """The failure that counts: this one if it is the first."""
        return _failure(self._store.compare_set("first", "", json.dumps(asdict(failure))))

    def read(self) -> Failure | None:
        return _failure(self._store.get("first")) if self._store.check(["first"]) else None

    def acknowledge(self, rank: int) -> None:
        """Say that this rank knows; its watch and its main thread may both say so, which counts once."""
        if self._store.add(f"seen/{rank}", 1) == 1:
            self._store.add("seen", 1)

    def tell_alive(self, rank: int) -> None:
        """Say that this rank runs, although it lost others."""
        self._store.set(f"alive/{rank}", "")

    def silent(self, size: int) -> list[int]:
        """The ranks that have not said so."""
        return [rank for rank in range(size) if not self._store.check([f"alive/{rank}"])]

    def all_know(self, num_ranks: int) -> bool:
        return self._store.add("seen", 0) >= num_ranks


class FailureWatch:
    """A thread that ends this process when another rank has failed and the main thread does not notice.

    It may be inside a GPU collective that waits for the dead, or in a long computation of its own.
    """

    def __init__(self, world: World, grace_s: float | None = None) -> None:
        self._world = world
        self._grace_s = _GRACE_S if grace_s is None else min(grace_s, _GRACE_S)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="paceline-failure-watch", daemon=True)
        # A thread inside C++ code when the interpreter ends would abort the process.
        atexit.register(self._finish)
        self._thread.start()

    def stop(self) -> None:
        """End the watch, without waiting for its last look."""
        self._stopped.set()

    def _finish(self) -> None:
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        board: FailureBoard | None = None
        unanswered = 0
        while not self._stopped.wait(_WATCH_EVERY_S):
            try:
                board = board or FailureBoard(meet_apart(self._world, _WATCH_EVERY_S))
                failure, unanswered = board.read(), 0
                if failure is not None:
                    self._tell(board)
                    return self._leave(failure.exit_code, "")
            except (DistError, FirstRankUnreached):
                board, unanswered = None, unanswered + 1
                if unanswered >= _MOST_UNANSWERED:
                    host = "the launcher" if self._world.launcher_hosts_store else "rank 0"
                    return self._leave(EXIT_CRASH, f"rank {self._world.rank}: {host} is gone, leaving\n")
        return None

    def _tell(self, board: FailureBoard) -> None:
        board.acknowledge(self._world.rank)
        if _serves(self._world):
            poll(lambda: board.all_know(self._world.size), _LINGER_S)

    def _leave(self, code: int, message: str) -> None:
        if not self._stopped.wait(self._grace_s):
            sys.stderr.write(message)
            exit_now(code)


# The store of the last `start` in this process: also after it was closed, as a late failure still wants to be told.
_last_meeting: Meeting | None = None


@dataclass
class Meeting:
    """What a failing rank needs to know about the job it was in."""

    world: World
    store: Store
    watch: FailureWatch
    hosts: tuple[str, ...] = ()
    """The machine of each rank, once the roll was called."""
    look_s: float = _LOOK_S


def remember_meeting(world: World, store: Store, watch: FailureWatch, timeout_s: float) -> Meeting:
    """Let `fail_together` find the store of this job."""
    global _last_meeting
    # All is to be over within twice the time-out of a collective, also where that is short.
    _last_meeting = Meeting(world, store, watch, look_s=min(_LOOK_S, timeout_s / 4))
    return _last_meeting


def fail_together(world: World, job: Callable[[], int | None]) -> int:
    """Run the whole job of this rank and return its exit code; on a failure, all ranks end with the same code.

    A `PacelineError` is shown without a traceback. With one rank, other exceptions pass through; with several, the
    process ends here in any case, because a process group may hang or abort when it is taken down.
    """
    try:
        code = job() or 0
        if world.size > 1:
            # Threads of the process group that are still there when the interpreter ends abort it, rarely.
            atexit._run_exitfuncs()
            exit_now(code)
        return code
    except KeyboardInterrupt as error:
        if world.size > 1:
            _fail(world, error)
        return EXIT_INTERRUPT
    except Exception as error:
        if world.size > 1:
            _fail(world, error)
        if not isinstance(error, PacelineError):
            raise
        sys.stderr.write(f"{user_message(error)}\n")
        return EXIT_USER_ERROR


def user_message(error: PacelineError) -> str:
    """A user's mistake in words: what and why, then what to type next."""
    return f"error: {error}" + (f"\n  {error.hint}" if error.hint else "")


def is_broken_link(error: BaseException | None) -> bool:
    """Whether the error, or one that caused it, says only that other ranks are gone or silent."""
    while error is not None:
        # gloo raises a plain RuntimeError that begins with its source file.
        if isinstance(error, (DistBackendError, DistNetworkError)):
            return True
        if isinstance(error, RuntimeError) and ("gloo/" in str(error) or "Gloo" in str(error)):
            return True
        error = error.__cause__
    return False


def exit_now(code: int) -> NoReturn:
    """End the process without taking anything down, after flushing what was printed."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


def _fail(world: World, error: BaseException) -> NoReturn:
    mine = _report(world, error)
    first, board, serves = mine, None, False
    try:
        board, serves = _board(world, error)
        if board is not None:
            if mine.kind == "lost":
                mine = _look(board, world, mine)
            first = board.post(mine)
    except (DistError, PacelineError):
        # The store went with the rank that served it. All survivors are here: let one per machine speak.
        if mine.kind == "lost":
            mine = replace(mine, silent="the launcher" if world.launcher_hosts_store else _name(0))
        board, first = None, mine
        if mine.kind == "lost" and world.rank != 1 and world.local_rank != 0:
            exit_now(mine.exit_code)
    if first == mine and mine.kind != "interrupt":
        sys.stderr.write(f"{mine}\n")
        sys.stderr.flush()
    if board is not None:
        try:
            board.acknowledge(world.rank)
            if serves:
                audience = _audience(world, first, error)
                poll(lambda: board.all_know(audience), _LINGER_S)
                if first.kind == "lost":
                    # A rank that is stuck, not dead, has a watch that looks here from time to time.
                    poll(lambda: board.all_know(world.size), _look_s())
        except DistError:
            exit_now(first.exit_code)
    exit_now(first.exit_code)


def _audience(world: World, first: Failure, error: BaseException) -> int:
    """How many ranks can still hear of the failure."""
    if isinstance(error, RanksMissing):
        return len(error.present)
    return world.size - 1 if first.kind == "lost" else world.size


def _look(board: FailureBoard, world: World, mine: Failure) -> Failure:
    """Give the rank that really failed time to say so; else say who is silent."""
    board.tell_alive(world.rank)
    if poll(lambda: board.read() is not None, _look_s()):
        return mine
    return replace(mine, silent=", ".join(map(_name, board.silent(world.size))))


def _look_s() -> float:
    return _last_meeting.look_s if _last_meeting is not None else _LOOK_S


def _name(rank: int) -> str:
    hosts = _last_meeting.hosts if _last_meeting is not None else ()
    return f"rank {rank} on {hosts[rank]}" if hosts else f"rank {rank}"


def _board(world: World, error: BaseException) -> tuple[FailureBoard | None, bool]:
    """The board of this job, and whether this process serves it; ranks that never met meet now."""
    serves = _serves(world)
    if _last_meeting is not None and _last_meeting.world == world:
        _last_meeting.watch.stop()
        return FailureBoard(_last_meeting.store), serves
    if isinstance(error, (FirstRankUnreached, MeetingPointTaken)):
        return None, False
    return FailureBoard(meet(world, _LATE_MEETING_S)), serves


def _serves(world: World) -> bool:
    return world.rank == 0 and not world.launcher_hosts_store


def _report(world: World, error: BaseException) -> Failure:
    host = socket.gethostname()
    if isinstance(error, PacelineError):
        return Failure(world.rank, host, "user", user_message(error))
    if isinstance(error, KeyboardInterrupt):
        return Failure(world.rank, host, "interrupt", "interrupted")
    trace = "".join(traceback.format_exception(error)).rstrip()
    lines = traceback.format_exception_only(error)
    return Failure(world.rank, host, "lost" if is_broken_link(error) else "crash", lines[-1].strip(), trace)


def _failure(text: bytes) -> Failure:
    return Failure(**json.loads(text))
