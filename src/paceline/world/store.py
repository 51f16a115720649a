"""The store where the ranks of a job find each other, before any process group exists.

Rank 0 or our launcher serves it (`rendezvous/`) at one address, to processes that know the job's secret. Under torchrun
the ranks share torchrun's own store, which asks nobody who he is.
"""

from __future__ import annotations

import errno
import os
import socket
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Literal, TypeVar

from torch.distributed import DistNetworkError

from paceline.core.errors import PacelineError
from paceline.world.discover.environment import World, is_loopback
from paceline.world.discover.interfaces import GLOO_INTERFACE, list_interfaces
from paceline.world.rendezvous.channel import SecretRefused, StrangerAnswers
from paceline.world.rendezvous.client import BoundedStore, StoreClient, StoreGone, StoreSilent, TorchStoreClient
from paceline.world.rendezvous.secret import Secret, find_secret
from paceline.world.rendezvous.server import EVERYWHERE, LISTEN, StoreServer

if TYPE_CHECKING:
    # torch.distributed has these classes, but its types are only declared here.
    from torch._C._distributed_c10d import HashStore as HashStore
    from torch._C._distributed_c10d import PrefixStore as _PrefixStore
    from torch._C._distributed_c10d import Store as Store
    from torch._C._distributed_c10d import TCPStore as TCPStore
else:
    from torch.distributed import HashStore as HashStore
    from torch.distributed import PrefixStore as _PrefixStore
    from torch.distributed import Store, TCPStore

T = TypeVar("T")
Unreached = Literal["unknown", "refused", "silent"]
"""Why nobody was reached: the name has no address, nobody listens there, or no answer came."""

# A rank that waits for longer says what for.
_PATIENT_S = 10.0
_PROBE_S = 5.0

# One store per meeting point for the life of the process: what rank 0 serves, others may still be reading when it
# has finished, and the next `start` in this process meets at the same place.
_stores: dict[str, BoundedStore] = {}
_servers: dict[str, StoreServer] = {}


class NoMeeting(PacelineError):
    """The ranks of a job cannot meet; so no rank can tell another of it either."""


class FirstRankUnreached(NoMeeting):
    """No store answers at the meeting point."""

    world: World
    waited_s: float
    cause: str
    kind: Unreached = "silent"
    sentence = "rank {world.rank} on {host}: {server} at {world.meeting} was not reached in {waited_s:g} s ({cause})"
    hint = "{advice}"

    @property
    def host(self) -> str:
        return socket.gethostname()

    @property
    def server(self) -> str:
        return "the launcher" if self.world.launcher_hosts_store else "rank 0"

    @property
    def advice(self) -> str:
        if self.kind == "unknown":
            name = _split(str(self.world.meeting))[0]
            return f"no name server knows {name!r}: {_EXPORT_ADDRESS}"
        return "check that rank 0 runs, that MASTER_ADDR names its machine, and that no firewall closes the port"


class MeetingPointTaken(NoMeeting):
    """Rank 0 cannot serve the store at the meeting point."""

    meeting: str
    cause: str
    sentence = "rank 0 cannot listen at {meeting}: {cause}"
    hint = "another job may use this port, or two processes are rank 0: export another MASTER_PORT for all ranks"


_EXPORT_ADDRESS = "export MASTER_ADDR=<name or address of rank 0's machine>, the same for all ranks"


class SecretsDiffer(NoMeeting):
    """A rank has another secret than the process that serves the store."""

    place: str
    meeting: str
    source: str
    sentence = "{place} was refused at {meeting}: the process that serves there has another secret than {source}"
    hint = (
        "give all ranks the same one: copy ~/.config/paceline/secret of the machine of rank 0 to this machine "
        "(mode 600), or export the same PACELINE_SECRET for all ranks; if another job has this port, change MASTER_PORT"
    )


class NotReached(Exception):
    """No answer; the caller knows what that means."""

    def __init__(self, cause: str, kind: Unreached = "silent") -> None:
        super().__init__(cause)
        self.cause, self.kind = cause, kind


class PrefixStore(_PrefixStore):
    """Part of a store. It keeps the store: torch's class holds only the C++ half of one that is written in Python."""

    def __init__(self, prefix: str, store: Store) -> None:
        super().__init__(prefix, store)
        self._whole = store


def meet(world: World, timeout_s: float) -> Store:
    """Return the store of this job and attempt, served by rank 0, or by the launcher if it offers one."""
    assert world.meeting is not None, "a single process meets nobody"
    if world.meeting not in _stores:
        if world.rank == 0 and not world.launcher_hosts_store:
            secret = secret_of(world)
            if world.meeting not in _servers:
                _servers[world.meeting] = serve(world.meeting, secret, _is_one_machine(world))
            _stores[world.meeting] = StoreClient(*_servers[world.meeting].near, secret.value, timeout_s)
        else:
            _stores[world.meeting] = _connect(world, timeout_s, timeout_s)
    answer_within(world, timeout_s)
    return _of_attempt(world, _stores[world.meeting])


def answer_within(world: World, answer_s: float) -> None:
    """Set how long the store of this job may take to answer; then a call raises `StoreSilent`."""
    if world.meeting in _stores:
        _stores[world.meeting].answer_within(answer_s)


def interrupt_waits(world: World, check: Callable[[], None] | None) -> None:
    """Let `check` end waits for keys of this job's store from now on, by what it raises: also those of groups that are
    made later, which wait for the addresses of ranks that may be lost."""
    if world.meeting in _stores:
        _stores[world.meeting].interrupt = check


def meet_apart(world: World, timeout_s: float, answer_s: float) -> Store:
    """Return the same store through another connection, for a thread that must not wait for the main thread's calls."""
    return _of_attempt(world, _connect(world, timeout_s, answer_s))


def meet_beside(world: World, timeout_s: float, answer_s: float) -> BoundedStore:
    """Return the whole store of this job, of all attempts, through a connection of its own."""
    return _connect(world, timeout_s, answer_s)


def _of_attempt(world: World, store: Store) -> Store:
    # torchrun may change the number of ranks without counting an attempt.
    return attempt_store(store, world.attempt, world.size if world.launcher == "torchrun" else None)


def attempt_store(store: Store, attempt: int, size: int | None = None) -> Store:
    """Return the part of a store that belongs to one attempt of an elastic job.

    Without it, restarted ranks would read the addresses of the dead ones and dial them in vain.
    """
    return PrefixStore(f"paceline/attempt{attempt}" + ("" if size is None else f"/size{size}"), store)


def secret_of(world: World) -> Secret:
    """Return the secret of this job."""
    return find_secret(os.environ, _is_one_machine(world))


def _is_one_machine(world: World) -> bool:
    return world.nodes == 1 or is_loopback(_split(str(world.meeting))[0])


def _has_store_of_torch(world: World) -> bool:
    return world.launcher == "torchrun" and world.launcher_hosts_store


def _connect(world: World, timeout_s: float, answer_s: float) -> BoundedStore:
    assert world.meeting is not None
    place = f"rank {world.rank} on {socket.gethostname()}"
    on_wait = _say_once(f"{place} waits for {world.meeting}") if world.local_rank == 0 or world.rank == 1 else None
    try:
        if _has_store_of_torch(world):
            return connect_torch(world.meeting, timeout_s, answer_s, on_wait)
        secret = secret_of(world)
        try:
            return connect(world.meeting, secret, timeout_s, answer_s, on_wait)
        except SecretRefused:
            raise SecretsDiffer(place, world.meeting, secret.source) from None
    except NotReached as error:
        raise FirstRankUnreached(world, timeout_s, error.cause, error.kind) from error


def _say_once(what: str) -> Callable[[str], None]:
    """Return a function that prints, once, that it has been waited for long."""
    began, is_said = time.monotonic(), False

    def say(cause: str) -> None:
        nonlocal is_said
        if not is_said and time.monotonic() - began > _PATIENT_S:
            is_said = True
            sys.stderr.write(f"{what}: {cause}\n")
            sys.stderr.flush()

    return say


def connect(
    meeting: str,
    secret: Secret,
    timeout_s: float,
    answer_s: float,
    on_wait: Callable[[str], None] | None = None,
) -> StoreClient:
    """Return the store that another process serves at `host:port`; retry until the time is over.

    Raises `NotReached`, or `SecretRefused` where the other process has another secret.
    """
    host, port = _split(meeting)
    connect_s = min(max(timeout_s, 0.1), _PROBE_S)
    return _retry(lambda: StoreClient(host, port, secret.value, answer_s, connect_s), timeout_s, on_wait)


def connect_torch(
    meeting: str, timeout_s: float, answer_s: float, on_wait: Callable[[str], None] | None = None
) -> TorchStoreClient:
    """Return the store that torchrun serves at `host:port`; retry until the time is over, else `NotReached`."""
    host, port = _split(meeting)
    limit = timedelta(seconds=max(timeout_s, 10.0))

    def listening() -> None:
        # Plain sockets first: torch's client would fill the screen with a C++ trace per failed attempt.
        socket.create_connection((host, port), timeout=min(timeout_s, _PROBE_S)).close()

    _retry(listening, timeout_s, on_wait)
    try:
        return TorchStoreClient(
            lambda: TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=limit), answer_s
        )
    except DistNetworkError as error:
        raise NotReached(str(error).splitlines()[0]) from error


def _retry(dial: Callable[[], T], timeout_s: float, on_wait: Callable[[str], None] | None) -> T:
    """Call `dial` until it returns, for so long; the last reason why it did not is that of `NotReached`."""
    made: list[T] = []
    last = NotReached("no answer")

    def is_made() -> bool:
        nonlocal last
        try:
            made.append(dial())
            return True
        except SecretRefused:
            raise
        except (OSError, EOFError, StrangerAnswers, StoreSilent) as error:
            cause = _why(error)
            last = NotReached(cause, _kind(error))
            if on_wait is not None:
                on_wait(cause)
        return False

    if not poll(is_made, timeout_s):
        raise last
    return made[0]


def poll(done: Callable[[], bool], timeout_s: float) -> bool:
    """Call `done` until it is True or the time is over. Return its last value.

    The pause is 5 ms at first and grows to 0.25 s, an eighth of the time that has passed.
    """
    began = time.monotonic()
    while not done():
        passed_s = time.monotonic() - began
        if passed_s >= timeout_s:
            return False
        time.sleep(min(max(0.005, passed_s / 8), 0.25))
    return True


def serve(meeting: str, secret: Secret, is_one_machine: bool) -> StoreServer:
    """Serve a store at `host:port`, which must be this machine, to those who know the secret."""
    interfaces = list_interfaces()
    # Where the address is given, the name need not be known yet: that of a pod is a while later than the pod.
    address = os.environ.get(LISTEN) or listen_address(
        _addresses(meeting), is_one_machine, interfaces.get(os.environ.get(GLOO_INTERFACE, ""))
    )
    try:
        return StoreServer(address, _split(meeting)[1], secret.value)
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL:
            names = ", ".join(f"{place} on {name}" for name, place in interfaces.items() if not is_loopback(place))
            host = socket.gethostname()
            raise NoMeeting(
                f"rank 0 runs on {host} and cannot listen at {meeting}: {address} is not an address of this machine",
                hint="export MASTER_ADDR=<an address of rank 0's machine> for all ranks "
                f"({host} has {names or 'none'}); "
                f"if that address is forwarded to {host}, also export PACELINE_LISTEN=0.0.0.0 there",
            ) from None
        raise MeetingPointTaken(meeting, _why(error)) from None


def _addresses(meeting: str) -> list[str]:
    """Return the addresses that the name of a meeting point has on this machine, IPv4 first."""
    try:
        found = socket.getaddrinfo(*_split(meeting), type=socket.SOCK_STREAM)
    except OSError as error:
        raise NoMeeting(
            f"rank 0 cannot listen at {meeting}: the name has no address ({_why(error)})", hint=_EXPORT_ADDRESS
        ) from None
    return [str(address[0]) for _, _, _, _, address in sorted(found)]


def listen_address(addresses: list[str], is_one_machine: bool, gloo_address: str | None) -> str:
    """Return the address at which to listen, of those that the name of the meeting point has on this machine.

    Debian lets the name of a machine mean 127.0.1.1, where no other machine arrives: then it is the address of the
    interface that gloo was told to use, and without one every address of this machine.
    """
    if is_one_machine or not is_loopback(addresses[0]):
        return addresses[0]
    return gloo_address or EVERYWHERE


def _kind(error: Exception) -> Unreached:
    if isinstance(error, socket.gaierror):
        return "unknown"
    return "refused" if isinstance(error, (ConnectionError, EOFError)) else "silent"


def is_refusal(error: Exception) -> bool:
    """Return True if nobody serves the store any more: the machine answers, the process is not there."""
    return isinstance(error, StoreGone) or (isinstance(error, FirstRankUnreached) and error.kind == "refused")


def _why(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__


def _split(meeting: str) -> tuple[str, int]:
    host, _, port = meeting.rpartition(":")
    return host.removeprefix("[").removesuffix("]"), int(port)
