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
from collections.abc import Mapping
from typing import NoReturn

from torch.distributed import DistError

from paceline.world.discover.environment import World
from paceline.world.failure import stacks
from paceline.world.failure.board import EXIT_CRASH, Failure, FailureBoard, Seen, describe
from paceline.world.failure.flight_recorder import trail
from paceline.world.store import FirstRankUnreached, meet_apart, poll

# How long a rank that learns of a failure may go on by itself before its watch ends it.
_GRACE_S = 5.0
_EVERY_S = 1.0
# Looks in a row without an answer after which the store, and the process that served it, count as gone.
_MOST_UNANSWERED = 10
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


def behind(mine: int, others: Mapping[int, Seen | None]) -> list[int]:
    """Return the ranks that have begun fewer collectives than this one, which must be waiting for them."""
    return [rank for rank, seen in others.items() if seen is not None and seen.number < mine]


class FailureWatch:
    """The watch of one job. With `overdue_s` it also ends a wait that nothing else would end well.

    NCCL waits on the device, where no exception reaches the main thread: at its own time-out it aborts the process
    with no word about who did not come. So where this rank has not moved for `overdue_s` seconds and others have begun
    fewer collectives, these are named.
    """

    def __init__(self, world: World, grace_s: float | None = None) -> None:
        self._world, self._host = world, socket.gethostname()
        self._grace_s = _GRACE_S if grace_s is None else min(grace_s, _GRACE_S)
        self.overdue_s: float | None = None
        self.heard: Failure | None = None
        """Report of another rank, once this watch has read it: the store may be gone when others ask."""
        self._beats = 0
        self._place, self._since = (0, 0), time.monotonic()
        self._waits_since: float | None = None
        self._slept_s = 0.0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="paceline-failure-watch", daemon=True)
        # A thread inside C++ code when the interpreter ends would abort the process.
        atexit.register(self._finish)
        self._thread.start()

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
        unanswered = 0
        while not self._wait():
            try:
                board = board or FailureBoard(meet_apart(self._world, _EVERY_S))
                self._say(board)
                failure, unanswered = board.read(), 0
                late = self._late(board) if failure is None else None
                if late is not None:
                    failure = board.post(late)
                if failure is not None:
                    return self._obey(board, failure, is_mine=failure == late)
            except (DistError, FirstRankUnreached):
                board, unanswered = None, unanswered + 1
                if unanswered >= _MOST_UNANSWERED:
                    host = "the launcher" if self._world.launcher_hosts_store else "rank 0"
                    why = f"rank {self._world.rank}: {host} is gone, leaving"
                    stacks.dump(why)
                    _print(f"{why}\n  {trail}\n")
                    return self._leave(EXIT_CRASH)
        return None

    def _say(self, board: FailureBoard) -> None:
        self._beats += 1
        board.tell_place(self._world.rank, Seen(self._host, self._beats, trail.number, str(trail)))

    def _late(self, board: FailureBoard) -> Failure | None:
        """Return the report that others keep this rank waiting for too long; None if they do not."""
        place, now = (trail.number, trail.step), time.monotonic()
        if place != self._place:
            self._place, self._since = place, now
        if self.overdue_s is None or now - self._since < self.overdue_s:
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
        message = f"no word from them for {self.overdue_s:g} s (--timeout-s)"
        return Failure(self._world.rank, self._host, "lost", message, where=str(trail), lost=";\n".join(lines))

    def _obey(self, board: FailureBoard, failure: Failure, is_mine: bool) -> None:
        if is_mine:  # before others know and end, which the main thread would notice, and end too
            _print(f"{failure}\n")
        stacks.dump(f"rank {failure.rank} on {failure.host} reported: {failure.message}")
        self.heard = failure
        board.acknowledge(self._world.rank)
        if serves(self._world):
            poll(lambda: board.all_know(self._world.size), LINGER_S)
        self._leave(failure.exit_code)

    def _leave(self, code: int) -> None:
        if not self._stopped.wait(self._grace_s):
            exit_now(code)
