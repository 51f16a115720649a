"""Watchdog thread of a rank: posts its place once a second, and ends the process when another rank has failed.

The main thread may not notice by itself: it may be inside a GPU collective that waits for the dead, in a long
computation of its own, or stuck in a user's code.
"""

from __future__ import annotations

import atexit
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

from torch.distributed import DistError

from paceline.world.discover.environment import World
from paceline.world.failure import stacks
from paceline.world.failure.board import EXIT_CRASH, Failure, FailureBoard, Seen, describe, who_is_silent
from paceline.world.failure.flight_recorder import trail
from paceline.world.store import NoMeeting, is_refusal, meet_apart, poll

# How long a rank that learns of a failure may go on by itself before its watch ends it.
_GRACE_S = 5.0
_EVERY_S = 1.0
# Looks in a row that were refused, after which the store, and the process that served it, count as gone.
_MOST_REFUSED = 10
# A store that is silent for so many time-outs, while this rank does not get on either, ends this rank.
SILENT_TIMEOUTS = 1.5
# A look at the store is to be over in this time.
_LONGEST_ANSWER_S = 10.0
# How long the rank that serves the store stays, so that the others can read the report.
LINGER_S = 10.0


def exit_now(code: int) -> NoReturn:
    """End the process without taking anything down, after flushing what was printed."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


def _print(message: str) -> None:
    sys.stderr.write(message)
    sys.stderr.flush()


def serves(world: World) -> bool:
    """Return True if this process serves the store."""
    return world.rank == 0 and not world.launcher_hosts_store


def speaks_for_machine(world: World) -> bool:
    """Return True if this rank prints what all ranks of its machine notice; rank 0 may be the one that is lost."""
    return world.rank == 1 or world.local_rank == 0


def repeats(world: World, host: str, failure: Failure) -> bool:
    """Return True if this rank, on `host`, prints a mistake that another one has reported: its console lacks it.

    Ranks that were started by hand have a console each, those of our launcher and of torchrun one per machine.
    """
    if failure.kind != "user" or failure.rank == world.rank:
        return False
    is_elsewhere = failure.host != host and world.local_rank == 0 and world.launcher in ("procs", "torchrun")
    return world.launcher == "environment" or is_elsewhere


def repeated(world: World, failure: Failure) -> str:
    """Return the mistake of another rank, with the word that it is one."""
    return f"rank {world.rank} ends too: rank {failure.rank} on {failure.host} reports\n{failure}\n"


def silence_s(before_s: float, elapsed_s: float, longest_s: float, is_heard: bool) -> float:
    """Return for how long the store has been silent, after one more look; 0 if it answered or this rank got on.

    `elapsed_s` is the time since the look before. More than the longest look can take is time in which this process
    was stopped itself, and proves nothing about the store.
    """
    return 0.0 if is_heard else before_s + min(elapsed_s, longest_s)


def behind(mine: int, others: Mapping[int, Seen | None]) -> list[int]:
    """Return the ranks that have begun fewer collectives than this one, which must be waiting for them."""
    return [rank for rank, seen in others.items() if seen is not None and seen.number < mine]


class FailureWatch:
    """The watch of one job.

    It ends what nothing else would end well. Where the store is silent and this rank does not get on, for 1.5 times
    the time-out, whoever serves the store is frozen or cut off: `on_silence` gets the report, and by default prints it
    and ends the process. And NCCL waits on the device, where no exception reaches the main thread: at its own
    time-out it aborts the process with no word about who did not come. So where this rank has not moved for the
    time-out and others have begun fewer collectives, these are named.

    Where survivors go on (`is_surviving`), both are left to the watch of their rounds (`world/rounds.py`), which takes
    them out of the round: an error that a rank reports is all that ends the others.
    """

    def __init__(
        self,
        world: World,
        timeout_s: float,
        on_silence: Callable[[FailureWatch, Failure], None] | None = None,
        *,
        is_surviving: bool = False,
    ) -> None:
        self._is_surviving = is_surviving
        self._world, self._host = world, socket.gethostname()
        self._timeout_s, self._grace_s = timeout_s, min(timeout_s / 4, _GRACE_S)
        self._answer_s = min(max(timeout_s / 8, 0.5), _LONGEST_ANSWER_S)
        self._on_silence = on_silence or FailureWatch.leave_silent
        self._first_host: str | None = None
        self._is_on_device = False
        self.heard: Failure | None = None
        """Report of another rank, once this watch has read it: the store may be gone when others ask."""
        self._beats = 0
        self._place, self._since = (0, 0), time.monotonic()
        self._waits_since: float | None = None
        self._slept_s = 0.0
        self._silent_s, self._num_refused = 0.0, 0
        self._stopped, self._has_repeated = threading.Event(), threading.Lock()
        self._thread = threading.Thread(target=self._run, name="paceline-failure-watch", daemon=True)
        # A thread inside C++ code when the interpreter ends would abort the process.
        atexit.register(self._finish)
        self._thread.start()

    def follow_group(self, hosts: Sequence[str], is_on_device: bool) -> None:
        """Take note that the process group is up: its machines, and True if collectives wait on a device."""
        self._first_host, self._is_on_device = hosts[0], is_on_device

    def stop(self) -> None:
        """End the watch, without waiting for its last look."""
        self._stopped.set()

    @property
    def slept_s(self) -> float:
        """Seconds in which this process was stopped: its watch should have run, and did not."""
        since = self._waits_since
        now_s = 0.0 if since is None else time.monotonic() - since - _EVERY_S
        return max(self._slept_s, now_s)

    def _wait(self) -> bool:
        self._waits_since = time.monotonic()
        stopped = self._stopped.wait(_EVERY_S)
        self._slept_s, self._waits_since = self.slept_s, None
        return stopped

    def _finish(self) -> None:
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        board: FailureBoard | None = None
        looked = time.monotonic()
        while not self._wait():
            place = (trail.number, trail.step)
            is_heard = place != self._place
            try:
                board = board or FailureBoard(meet_apart(self._world, _EVERY_S, self._answer_s))
                self._say(board)
                failure, self._num_refused, is_heard = board.read(), 0, True
                late = self._late(board) if failure is None else None
                if late is not None:
                    failure = board.post(late)
                if failure is not None:
                    return self._obey(board, failure, is_mine=failure == late)
            except (DistError, NoMeeting) as error:
                board = None
                self._num_refused = self._num_refused + 1 if is_refusal(error) else 0
            if place != self._place:
                self._place, self._since = place, time.monotonic()
            before, looked = looked, time.monotonic()
            longest_s = 2.0 * (_EVERY_S + self._answer_s)
            self._silent_s = silence_s(self._silent_s, looked - before, longest_s, is_heard)
            if self._is_surviving:
                continue
            if self._num_refused >= _MOST_REFUSED:
                return self._leave_gone()
            if self._silent_s >= SILENT_TIMEOUTS * self._timeout_s:
                return self._on_silence(self, self._report_silence())
        return None

    def _leave_gone(self) -> None:
        host = "the launcher" if self._world.launcher_hosts_store else "rank 0"
        why = f"rank {self._world.rank}: {host} is gone, leaving"
        stacks.dump(why)
        _print(f"{why}\n  {trail}\n")
        self._leave(EXIT_CRASH)

    def _report_silence(self) -> Failure:
        message = f"no answer from the store for {self._silent_s:.0f} s ({SILENT_TIMEOUTS:g} times --timeout-s)"
        who = who_is_silent(self._world, self._first_host)
        return Failure(self._world.rank, self._host, "lost", message, where=str(trail), lost=who)

    def leave_silent(self, failure: Failure) -> None:
        """Print the report once per machine, have it in the log, and end the process."""
        stacks.dump(str(failure))
        if speaks_for_machine(self._world):
            _print(f"{failure}\n")
        self._leave(failure.exit_code)

    def _say(self, board: FailureBoard) -> None:
        self._beats += 1
        board.tell_place(self._world.rank, Seen(self._host, self._beats, trail.number, str(trail)))

    def _late(self, board: FailureBoard) -> Failure | None:
        """Return the report that others keep this rank waiting for too long; None if they do not."""
        if not self._is_on_device or self._is_surviving or (trail.number, trail.step) != self._place:
            return None
        if time.monotonic() - self._since < self._timeout_s:
            return None
        others = {rank: board.last_seen(rank) for rank in range(self._world.size) if rank != self._world.rank}
        late = behind(trail.number, others)
        if not late:
            return None  # a long computation, for all that is known
        first = {rank: others[rank] for rank in late}
        self._stopped.wait(1.5 * _EVERY_S)  # who speaks again in this time is alive
        lines = []
        for rank, before in first.items():
            seen = board.last_seen(rank)
            assert before is not None
            lines.append(describe(rank, before.host, seen, seen is not None and seen.beat > before.beat))
        message = f"no word from them for {self._timeout_s:g} s (--timeout-s)"
        return Failure(self._world.rank, self._host, "lost", message, where=str(trail), lost=";\n".join(lines))

    def _obey(self, board: FailureBoard, failure: Failure, is_mine: bool) -> None:
        if is_mine:  # before others know and end, which the main thread would notice, and end too
            _print(f"{failure}\n")
        else:
            self.repeat(failure)
        stacks.dump(f"rank {failure.rank} on {failure.host} reported: {failure.message}")
        self.heard = failure
        board.acknowledge(self._world.rank)
        if serves(self._world):
            poll(lambda: board.all_know(self._world.size), LINGER_S)
        self._leave(failure.exit_code)

    def repeat(self, failure: Failure) -> None:
        """Print the mistake that another rank has reported, once, if this rank's console lacks it."""
        if repeats(self._world, self._host, failure) and self._has_repeated.acquire(blocking=False):
            _print(repeated(self._world, failure))

    def _leave(self, code: int) -> None:
        if not self._stopped.wait(self._grace_s):
            exit_now(code)
