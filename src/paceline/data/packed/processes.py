"""Pieces made by several processes, which end with the one that began them, however it ends."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from itertools import islice

from paceline.core.errors import PacelineError
from paceline.world.parent_process import end_with_parent

Make = Callable[[int], None]
"""Makes the piece of this number, and leaves it where it belongs."""


class WorkerDied(PacelineError):
    """A process that read rows was killed, most likely for lack of memory."""

    hint = "type the same command to go on; fewer `--processes` need less memory"

    def __init__(self) -> None:
        super().__init__("a process that read data was killed")


_make: Make | None = None
"""What forked processes do: a data set need not be one that can be pickled."""


def in_processes(make: Make, missing: Sequence[int], processes: int) -> Iterator[int]:
    """Make these pieces; their numbers, as they are done."""
    global _make
    if not missing:
        return
    _make = make
    pool = ProcessPoolExecutor(min(processes, len(missing)), multiprocessing.get_context("fork"), _begin)
    waiting: set[Future[int]] = set()
    todo = iter(missing)
    try:
        while True:
            # Not all at once: who stops at the first error must not wait for thousands of others.
            waiting |= {pool.submit(_one, number) for number in islice(todo, 2 * processes - len(waiting))}
            if not waiting:
                return
            done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
            for future in done:
                yield future.result()
    except BrokenProcessPool:
        raise WorkerDied from None
    finally:
        pool.shutdown(cancel_futures=True)
        _make = None


def default_processes() -> int:
    return len(os.sched_getaffinity(0))


def _begin() -> None:
    """In each process: one thread, and an end with the process that began it, even if that is killed."""
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent(signal.SIGKILL)


def _one(number: int) -> int:
    assert _make is not None
    _make(number)
    return number
