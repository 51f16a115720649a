"""The store where the ranks of a job find each other, before any process group exists."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING

from torch.distributed import DistNetworkError

from paceline.core.errors import PacelineError
from paceline.world.discover.environment import World

if TYPE_CHECKING:
    # torch.distributed has these classes, but its types are only declared here.
    from torch._C._distributed_c10d import HashStore as HashStore
    from torch._C._distributed_c10d import PrefixStore as PrefixStore
    from torch._C._distributed_c10d import Store as Store
    from torch._C._distributed_c10d import TCPStore as TCPStore
else:
    from torch.distributed import HashStore as HashStore
    from torch.distributed import PrefixStore, Store, TCPStore

# One store per meeting point for the life of the process: what rank 0 serves, others may still be reading when it
# has finished, and the next `start` in this process meets at the same place. Connecting is not free either: torch
# looks up the name of every peer, which without a working name server can take 5 s.
_stores: dict[str, Store] = {}


class FirstRankUnreached(PacelineError):
    """No store answers at the meeting point."""

    world: World
    waited_s: float
    cause: str
    sentence = "rank {world.rank} on {host}: {server} at {world.meeting} was not reached in {waited_s:g} s ({cause})"
    hint = "check that rank 0 runs, that MASTER_ADDR names its machine, and that no firewall closes the port"

    @property
    def host(self) -> str:
        return socket.gethostname()

    @property
    def server(self) -> str:
        return "the launcher" if self.world.launcher_hosts_store else "rank 0"


class MeetingPointTaken(PacelineError):
    """Rank 0 cannot serve the store at the meeting point."""

    meeting: str
    cause: str
    sentence = "rank 0 cannot listen at {meeting}: {cause}"
    hint = "another job may use this port, or two processes are rank 0: export another MASTER_PORT for all ranks"


class NotReached(Exception):
    """No answer; the caller knows what that means."""

    def __init__(self, cause: str) -> None:
        super().__init__(cause)
        self.cause = cause


def meet(world: World, timeout_s: float) -> Store:
    """Return the store of this job and attempt, served by rank 0, or by the launcher if it offers one."""
    assert world.meeting is not None, "a single process meets nobody"
    if world.meeting not in _stores:
        serves = world.rank == 0 and not world.launcher_hosts_store
        _stores[world.meeting] = serve(world.meeting, timeout_s) if serves else _connect(world, timeout_s)
    return attempt_store(_stores[world.meeting], world.attempt, world.size)


def meet_apart(world: World, timeout_s: float) -> Store:
    """Return the same store through another connection, for a thread that must not wait for the main thread's calls."""
    return attempt_store(_connect(world, timeout_s), world.attempt, world.size)


def attempt_store(store: Store, attempt: int, size: int) -> Store:
    """Return the part of a store that belongs to one attempt of an elastic job.

    Without it, restarted ranks would read the addresses of the dead ones and dial them in vain.
    """
    return PrefixStore(f"paceline/attempt{attempt}/size{size}", store)


def _connect(world: World, timeout_s: float) -> Store:
    assert world.meeting is not None
    try:
        return connect(world.meeting, timeout_s)
    except NotReached as error:
        raise FirstRankUnreached(world, timeout_s, error.cause) from error


def connect(meeting: str, timeout_s: float) -> Store:
    """Return the store that another process serves at `host:port`; retry until the time is over."""
    host, port = _split(meeting)
    cause = "no answer"

    def listening() -> bool:
        # Plain sockets first: torch's client would fill the screen with a C++ trace per failed attempt.
        nonlocal cause
        try:
            socket.create_connection((host, port), timeout=min(timeout_s, 5.0)).close()
        except OSError as error:
            cause = str(error)
            return False
        return True

    if not poll(listening, timeout_s):
        raise NotReached(cause)
    try:
        return TCPStore(
            host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=max(timeout_s, 10.0))
        )
    except DistNetworkError as error:
        raise NotReached(str(error).splitlines()[0]) from error


def poll(done: Callable[[], bool], timeout_s: float) -> bool:
    """Call `done` until it is True or the time is over, every 5 ms at first, 0.25 s later. Return its last value."""
    deadline, pause_s = time.monotonic() + timeout_s, 0.005
    while not done():
        if time.monotonic() >= deadline:
            return False
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.25)
    return True


def serve(meeting: str, timeout_s: float) -> Store:
    """Serve a store at `host:port`, which must be this machine."""
    host, port = _split(meeting)
    try:
        return TCPStore(
            host, port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=max(timeout_s, 10.0))
        )
    except DistNetworkError as error:
        raise MeetingPointTaken(meeting, str(error).splitlines()[0]) from error


def _split(meeting: str) -> tuple[str, int]:
    host, _, port = meeting.rpartition(":")
    return host, int(port)
