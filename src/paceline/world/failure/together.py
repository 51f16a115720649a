"""All ranks fail together, and the first real failure is printed once: a user's mistake once on each console.

The failing rank posts its report in the store, the first one wins and prints. A rank whose collective broke because
another is gone looks there before it believes its own error; a rank that computes or hangs is told by its watch.
"""

from __future__ import annotations

import atexit
import socket
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import NoReturn

from torch.distributed import DistBackendError, DistError, DistNetworkError, DistStoreError

from paceline.core.errors import PacelineError
from paceline.core.terminal import warn
from paceline.world.discover.environment import World
from paceline.world.failure import stacks
from paceline.world.failure.board import (
    EXIT_INTERRUPT,
    Failure,
    FailureBoard,
    Kind,
    describe,
    who_is_missing,
    who_is_silent,
)
from paceline.world.failure.flight_recorder import trail
from paceline.world.failure.watchdog import (
    LINGER_S,
    FailureWatch,
    exit_now,
    repeated,
    repeats,
    serves,
    speaks_for_machine,
)
from paceline.world.rendezvous.client import StoreSilent
from paceline.world.roll_call import RanksMissing, SizesDiffer
from paceline.world.store import NoMeeting, Store, answer_within, meet, poll

# How long a rank with a broken collective looks for another's report before it files its own.
_LOOK_S = 3.0
# How long a rank that failed before it ever met the others tries to reach them.
_LATE_MEETING_S = 3.0

# A process that did not run for so long was stopped; a busy machine lets its threads wait for less.
_ASLEEP_S = 3.0

_OF_GLOO = ("gloo/", "Gloo", "caused pair closure", "Connection closed by peer", "Socket closed")

# The store of the last `start` in this process: also after it was closed, as a late failure still wants to be told.
_last_meeting: Meeting | None = None
# `fail_together` is running a job.
_is_guarded = False


@dataclass
class Meeting:
    """The job of this rank, as a failure needs to know it."""

    world: World
    store: Store
    watch: FailureWatch
    hosts: tuple[str, ...] = ()
    """The machine of each rank, once the roll was called."""
    look_s: float = _LOOK_S
    logged: BaseException | None = None
    """The broken link that is in the log of this rank already."""

    def host(self, rank: int) -> str | None:
        return self.hosts[rank] if self.hosts else None


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
    global _is_guarded
    _is_guarded = True
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
        warn(f"{user_message(error)}\n")
        return error.exit_code
    finally:
        _is_guarded = False


def is_guarded() -> bool:
    """Return True inside `fail_together`, which tells the other ranks of a failure and ends the process."""
    return _is_guarded


def user_message(error: PacelineError) -> str:
    """Return the text of a user's mistake: what and why, then what to type next."""
    return error.rendered()


def is_broken_link(error: BaseException | None) -> bool:
    """Return True if the error, or a cause of it, means only that other ranks are gone or silent."""
    while error is not None:
        # gloo raises a plain RuntimeError that begins with its source file, but for a time-out in a send or receive.
        # The store: a rank that was killed while the group was made has not left its address there.
        if isinstance(error, (DistBackendError, DistNetworkError, DistStoreError)):
            return True
        if isinstance(error, RuntimeError) and any(word in str(error) for word in _OF_GLOO):
            return True
        error = error.__cause__
    return False


def _fail(world: World, error: BaseException) -> NoReturn:
    """Agree with the other ranks on the first failure, print it once, and end."""
    meeting = _last_meeting
    if meeting is not None and meeting.world.meeting == world.meeting:
        world = meeting.world  # where survivors go on, ranks and attempts change
    mine = _report(world, error)
    if mine.kind == "lost":
        _log_lost(mine, error, meeting)
        if stacks.has_log():
            mine = replace(mine, trace="")  # the message names who is lost; the log has the rest
    try:
        board = _board(world, error, meeting)
        if board is not None and mine.kind == "lost":
            mine = _look(board, world, mine, meeting)
        first = mine if board is None else board.post(mine)
    except (DistError, PacelineError) as unheard:
        board, first = (
            None,
            (mine := _report_without_store(world, mine, meeting, is_silent=isinstance(unheard, StoreSilent))),
        )
    if first == mine and mine.kind != "interrupt":
        warn(f"{mine}\n")
        sys.stderr.flush()
    elif meeting is not None:
        meeting.watch.repeat(first)
    elif repeats(world, mine.host, first):
        warn(repeated(world, first))
    if board is not None:
        with suppress(DistError):
            _tell_others(board, world, first, error, _look_s(meeting))
    exit_now(first.exit_code)


def _report_without_store(world: World, mine: Failure, meeting: Meeting | None, *, is_silent: bool) -> Failure:
    """Return the report of this rank where the store went with the rank that served it, or end without one.

    `is_silent`: the store did not answer, so whoever serves it may be frozen or cut off instead of gone.
    """
    heard = meeting.watch.heard if meeting is not None else None
    if heard is not None:
        exit_now(heard.exit_code)  # the rank that served the store has reported, and waited for no other
    if mine.kind != "lost":
        return mine
    if not speaks_for_machine(world):
        exit_now(mine.exit_code)  # all survivors come here
    return replace(mine, lost=_who_is_gone(world, meeting, is_silent=is_silent))


def _tell_others(board: FailureBoard, world: World, first: Failure, error: BaseException, look_s: float) -> None:
    """Acknowledge the failure; the rank that serves the store stays until the others have read it."""
    board.acknowledge(world.rank)
    if serves(world):
        audience = _audience(world, first, error)
        poll(lambda: board.all_know(audience), LINGER_S)
        if first.kind == "lost":
            # A rank that is stuck, not dead, has a watch that looks here from time to time.
            poll(lambda: board.all_know(world.size), look_s)


@contextmanager
def log_if_lost(world: World) -> Iterator[None]:
    """Have a broken link in the log of this rank at once: launchers end the ranks that are left within moments."""
    try:
        yield
    except Exception as error:
        if world.size > 1 and is_broken_link(error):
            _log_lost(_report(world, error), error, _last_meeting)
        raise


def _log_lost(mine: Failure, error: BaseException, meeting: Meeting | None) -> None:
    if meeting is not None:
        if error is meeting.logged:
            return
        meeting.logged = error
    stacks.dump(f"{mine.trace}\nrank {mine.rank} on {mine.host} lost the other ranks: {mine.where}")


def _who_is_gone(world: World, meeting: Meeting | None, *, is_silent: bool) -> str:
    """Return a sentence about the process that served the store."""
    slept_s = meeting.watch.slept_s if meeting is not None else 0.0
    first_host = meeting.host(0) if meeting is not None else None
    if slept_s >= _ASLEEP_S:
        return f"it did not run for {slept_s:.0f} s itself (stopped?), and they have ended meanwhile"
    if is_silent:
        return who_is_silent(world, first_host)
    if world.launcher_hosts_store:
        return "the launcher is gone"
    return describe(0, first_host, None, is_alive=False)


def _audience(world: World, first: Failure, error: BaseException) -> int:
    """Return the number of ranks that can still read the failure."""
    if isinstance(error, RanksMissing):
        return len(error.present)
    if isinstance(error, SizesDiffer):
        return min(error.first.size, error.second.size)
    return world.size - 1 if first.kind == "lost" else world.size


def _look(board: FailureBoard, world: World, mine: Failure, meeting: Meeting | None) -> Failure:
    """Give the rank that really failed time to say so; else say who is silent, and where these were last."""
    board.tell_alive(world.rank)
    before = {rank: board.last_seen(rank) for rank in board.silent(world.size)}
    poll(lambda: board.read() is not None or bool(board.ended()), _look_s(meeting))
    ended = board.ended()
    if board.read() is not None:
        return mine
    now = {rank: board.last_seen(rank) for rank in ended or board.silent(world.size)}
    missing = dict.fromkeys(ended, False) or who_is_missing(trail.number, before, now)
    hosts = {rank: None if meeting is None else meeting.host(rank) for rank in missing}
    lines = [describe(rank, hosts[rank], now[rank], is_alive) for rank, is_alive in missing.items()]
    return replace(mine, lost=";\n".join(lines))


def _look_s(meeting: Meeting | None) -> float:
    return meeting.look_s if meeting is not None else _LOOK_S


def _board(world: World, error: BaseException, meeting: Meeting | None) -> FailureBoard | None:
    """Return the board of this job; ranks that never met meet now."""
    if meeting is not None and meeting.world == world:
        meeting.watch.stop()
        answer_within(world, meeting.look_s)  # who serves it may be the one that is frozen
        return FailureBoard(meeting.store)
    if isinstance(error, NoMeeting):
        return None
    return FailureBoard(meet(world, _LATE_MEETING_S))


def _report(world: World, error: BaseException) -> Failure:
    host = socket.gethostname()
    if isinstance(error, PacelineError):
        return Failure(world.rank, host, "user", user_message(error), user_code=error.exit_code)
    if isinstance(error, KeyboardInterrupt):
        return Failure(world.rank, host, "interrupt", "interrupted")
    trace = "".join(traceback.format_exception(error)).rstrip()
    lines = traceback.format_exception_only(error)
    kind: Kind = "lost" if is_broken_link(error) else "crash"
    return Failure(world.rank, host, kind, lines[-1].strip(), trace, where=str(trail))
