"""Clients of a store whose every call ends: those of our own server, here or elsewhere, and a bound around torch's.

All are stores for torch, too: process groups find their peers through them.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar, cast

from torch.distributed import DistNetworkError, DistStoreError

from paceline.world.rendezvous.channel import Channel, StrangerAnswers, call, hang_up, keep, keep_alive
from paceline.world.rendezvous.server import LONGEST_WAIT_S, StoreServer, pack, unpack

if TYPE_CHECKING:
    # torch.distributed has these classes, but its types are only declared here.
    from torch._C._distributed_c10d import Store
else:
    from torch.distributed import Store

T = TypeVar("T")
S = TypeVar("S", bound=Store)
_CONNECT_S = 5.0
# How long a wait for keys takes at a time where something may interrupt it.
_INTERRUPTIBLE_S = 0.1


class StoreSilent(DistNetworkError):
    """The store did not answer in time: its process is stopped or busy, or its machine cannot be reached."""


class StoreGone(DistNetworkError):
    """Nobody serves the store any more: its machine answers, its process does not exist."""


class BoundedStore(Store):
    """A store whose every call ends within `answer_s` seconds beyond what it was told to wait; then `StoreSilent`."""

    def __init__(self, answer_s: float) -> None:
        super().__init__()
        self.answer_s = answer_s
        self.interrupt: Callable[[], None] | None = None
        """Called while keys are waited for: what it raises ends the wait."""
        # torch, which asks for clones, holds only their C++ half.
        self._clones: list[Store] = []
        self.set_timeout(timedelta(seconds=max(answer_s, 10.0)))

    @property
    def limit(self) -> timedelta:
        """How long to wait for keys where a call does not say; `set_timeout` sets it."""
        limit: timedelta = cast(Any, self).timeout  # not in torch's declarations
        return limit

    def _kept(self, clone: S) -> S:
        self._clones.append(clone)
        return clone

    def deleteKey(self, key: str) -> bool:
        return self.delete_key(key)

    def getNumKeys(self) -> int:
        return self.num_keys()

    def answer_within(self, seconds: float) -> None:
        """Set how long the store may take to answer, from the next call on."""
        self.answer_s = seconds

    def break_off(self) -> None:
        """Let the call that another thread is in fail now; nothing where it cannot be reached."""


class AskedStore(BoundedStore):
    """A store of our own server, in terms of its requests."""

    @abstractmethod
    def _ask(self, what: str, *arguments: Any, wait_s: float = 0.0) -> Any:
        """Return the answer to a request, for which the server may wait so long."""

    def set(self, key: str, value: str | bytes) -> None:
        self._ask("set", {key: pack(_bytes(value))})

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def check(self, keys: Sequence[str]) -> bool:
        is_there: bool = self._ask("wait", list(keys), 0.0)
        return is_there

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._wait_for("wait", keys, timeout)

    def add(self, key: str, value: int) -> int:
        total: int = self._ask("add", key, value)
        return total

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        return unpack(self._ask("compare_set", key, pack(_bytes(expected)), pack(_bytes(desired))))

    def append(self, key: str, value: str | bytes) -> None:
        self._ask("append", key, pack(_bytes(value)))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return [unpack(value) for value in self._wait_for("get", keys, None)]

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        self._ask("set", {key: pack(_bytes(value)) for key, value in zip(keys, values, strict=True)})

    def delete_key(self, key: str) -> bool:
        was_there: bool = self._ask("delete", key)
        return was_there

    def num_keys(self) -> int:
        number: int = self._ask("count")
        return number

    def has_extended_api(self) -> bool:
        return True

    def _wait_for(self, what: str, keys: Sequence[str], timeout: timedelta | None) -> Any:
        """Ask in short waits until the keys are there; a server that is frozen is noticed between two of them."""
        limit = self.limit if timeout is None else timeout
        deadline = time.monotonic() + limit.total_seconds()
        while True:
            longest_s = LONGEST_WAIT_S if self.interrupt is None else _INTERRUPTIBLE_S
            wait_s = min(max(deadline - time.monotonic(), 0.0), longest_s)
            answer = self._ask(what, list(keys), wait_s, wait_s=wait_s)
            if answer not in (None, False):
                return answer
            if self.interrupt is not None:
                self.interrupt()
            if time.monotonic() >= deadline:
                raise DistStoreError(f"nobody has set {', '.join(keys)} in {limit.total_seconds():g} s")


class StoreClient(AskedStore):
    """Connection to a `StoreServer`. A thread that must not wait for another thread's calls has one of its own."""

    def __init__(self, host: str, port: int, secret: bytes, answer_s: float, connect_s: float = _CONNECT_S) -> None:
        super().__init__(answer_s)
        self._address, self._secret = (host, port), secret
        self._lock = threading.Lock()
        self._channel: Channel | None = self._dial(time.monotonic() + connect_s)

    def _dial(self, deadline: float) -> Channel:
        """Connect; `OSError`, `EOFError` or `StrangerAnswers` say why not."""
        connection = socket.create_connection(self._address, timeout=max(deadline - time.monotonic(), 1e-3))
        try:
            keep(connection)
            keep_alive(connection)
            return call(connection, self._secret, deadline)
        except BaseException:
            hang_up(connection)
            raise

    def _ask(self, what: str, *arguments: Any, wait_s: float = 0.0) -> Any:
        deadline = time.monotonic() + wait_s + self.answer_s
        with self._lock:
            try:
                if self._channel is None:
                    self._channel = self._dial(min(deadline, time.monotonic() + _CONNECT_S))
                self._channel.send(json.dumps([what, *arguments]).encode(), deadline)
                return json.loads(self._channel.receive(deadline))
            except (OSError, EOFError, StrangerAnswers) as error:
                # What was asked may have been done or not: the connection is of no use any more.
                if self._channel is not None:
                    self._channel.close()
                self._channel = None
                host, port = self._address
                is_gone = isinstance(error, (ConnectionError, EOFError))
                kind = StoreGone if is_gone else StoreSilent
                raise kind(f"the store at {host}:{port} does not answer ({error or type(error).__name__})") from error

    def break_off(self) -> None:
        channel = self._channel
        if channel is not None:
            channel.shut_down()

    def clone(self) -> StoreClient:
        return self._kept(StoreClient(*self._address, self._secret, self.answer_s))


class NearStore(AskedStore):
    """The store of a server in this process: a launcher looks at it many times a second, which is to cost nothing."""

    def __init__(self, server: StoreServer, answer_s: float) -> None:
        super().__init__(answer_s)
        self._server = server

    def _ask(self, what: str, *arguments: Any, wait_s: float = 0.0) -> Any:
        return self._server.do(what, *arguments)

    def clone(self) -> NearStore:
        return self._kept(NearStore(self._server, self.answer_s))


class TorchStoreClient(BoundedStore):
    """A store of torch's own, which may block for ever in C++: each call has a thread that can be left behind."""

    def __init__(self, connect: Callable[[], Store], answer_s: float) -> None:
        super().__init__(answer_s)
        self._is_lost = False
        self._connect = connect
        self._inner: Any = self._within(connect, 0.0)  # torch declares only a part of its stores

    def _within(self, ask: Callable[[], T], wait_s: float) -> T:
        if self._is_lost:  # the call that was left behind has the connection
            raise StoreSilent("the store does not answer")
        answers: list[T] = []
        errors: list[BaseException] = []

        def run() -> None:
            try:
                answers.append(ask())
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=run, name="paceline-store-call", daemon=True)
        thread.start()
        thread.join(wait_s + self.answer_s)
        if thread.is_alive():
            self._is_lost = True
            raise StoreSilent(f"the store did not answer in {self.answer_s:g} s")
        if errors:
            raise errors[0]
        return answers[0]

    def set(self, key: str, value: str | bytes) -> None:
        self._within(lambda: self._inner.set(key, _bytes(value)), 0.0)

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def check(self, keys: Sequence[str]) -> bool:
        answer: bool = self._within(lambda: self._inner.check(list(keys)), 0.0)
        return answer

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        limit = self.limit if timeout is None else timeout
        self._within(lambda: self._inner.wait(list(keys), limit), limit.total_seconds())

    def add(self, key: str, value: int) -> int:
        answer: int = self._within(lambda: self._inner.add(key, value), 0.0)
        return answer

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        answer: bytes = self._within(lambda: self._inner.compare_set(key, _bytes(expected), _bytes(desired)), 0.0)
        return answer

    def append(self, key: str, value: str | bytes) -> None:
        self._within(lambda: self._inner.append(key, _bytes(value)), 0.0)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        self.wait(keys)
        answer: list[bytes] = self._within(lambda: self._inner.multi_get(list(keys)), 0.0)
        return answer

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        self._within(lambda: self._inner.multi_set(list(keys), [_bytes(value) for value in values]), 0.0)

    def delete_key(self, key: str) -> bool:
        answer: bool = self._within(lambda: self._inner.delete_key(key), 0.0)
        return answer

    def num_keys(self) -> int:
        answer: int = self._within(self._inner.num_keys, 0.0)
        return answer

    def has_extended_api(self) -> bool:
        return True

    def clone(self) -> TorchStoreClient:
        return self._kept(TorchStoreClient(self._connect, self.answer_s))


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
