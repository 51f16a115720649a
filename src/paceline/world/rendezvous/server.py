"""Server of the store: a table of keys and bytes that the processes of one job share, each after a handshake.

It runs in threads of the launcher, or of rank 0 where no launcher of ours is there, and imports no torch.
"""

from __future__ import annotations

import base64
import json
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from paceline.world.rendezvous.channel import Channel, StrangerAnswers, answer, hang_up, keep, keep_alive

LONGEST_WAIT_S = 1.0
"""A request waits for keys for at most so long; the client asks again, and so notices a server that is frozen."""
LISTEN = "PACELINE_LISTEN"
"""Variable with the address at which to listen, where the name of the meeting point does not say it."""
EVERYWHERE = "0.0.0.0"
"""The address that means all addresses of a machine."""
_HANDSHAKE_S = 10.0
_SEND_S = 60.0
# Connections whose caller is not known yet; more are closed at once.
_MOST_UNKNOWN = 256
# Addresses of strangers that are reported; a scan of the network must not fill the screen.
_MOST_REPORTED = 8


def report_stranger(address: str, meeting: str) -> None:
    """Print who was turned away."""
    sys.stderr.write(
        f"warning: a process at {address} connected to the store of this job at {meeting} without the job's secret, "
        "or ended while it connected, and was turned away\n"
        "  if it is a rank of this job that runs, give it the same secret: see docs/security.md\n"
    )
    sys.stderr.flush()


class StoreServer:
    """Listens at one address of this machine; port 0 lets the system choose. `close` ends it, else the process does."""

    def __init__(
        self, host: str, port: int, secret: bytes, on_stranger: Callable[[str, str], None] = report_stranger
    ) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, port), family=family, backlog=1024)
        keep(self._listener)
        self.host, self.port = host, int(self._listener.getsockname()[1])
        self._secret, self._on_stranger = secret, on_stranger
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self._unknown = threading.BoundedSemaphore(_MOST_UNKNOWN)
        self._reported: set[str] = set()
        self._connections: weakref.WeakSet[socket.socket] = weakref.WeakSet()
        self._thread = threading.Thread(target=self._accept, name="paceline-store", daemon=True)
        self._thread.start()

    @property
    def meeting(self) -> str:
        return f"{self.host}:{self.port}"

    @property
    def near(self) -> tuple[str, int]:
        """Address and port for clients on this machine."""
        return "127.0.0.1" if self.host == EVERYWHERE else self.host, self.port

    def close(self) -> None:
        """Stop listening, and hang up."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread inside `accept`
        hang_up(self._listener)
        for connection in list(self._connections):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while True:
            try:
                connection, address = self._listener.accept()
            except OSError:
                if self._listener.fileno() < 0:
                    return
                time.sleep(0.1)  # out of file descriptors, for a moment
                continue
            keep(connection)
            if not self._unknown.acquire(blocking=False):
                hang_up(connection)
                continue
            self._connections.add(connection)
            threading.Thread(
                target=self._serve, args=(connection, str(address[0])), name="paceline-store-client", daemon=True
            ).start()

    def _serve(self, connection: socket.socket, address: str) -> None:
        try:
            keep_alive(connection)
            channel = self._greet(connection, address)
            if channel is not None:
                self._answer_all(channel, address)
        except (OSError, EOFError):
            pass  # it hung up, or its machine is gone
        finally:
            hang_up(connection)

    def _greet(self, connection: socket.socket, address: str) -> Channel | None:
        try:
            return answer(connection, self._secret, time.monotonic() + _HANDSHAKE_S)
        except (StrangerAnswers, TimeoutError):
            self._report(address)
        except EOFError as error:
            # Who says nothing at all looks whether the port is open, or is a rank that was ended just then.
            if str(error) == "partly":
                self._report(address)
        except ConnectionError:
            pass  # before it said a word, or after it has proven that it knows the secret
        finally:
            self._unknown.release()
        return None

    def _report(self, address: str) -> None:
        if address not in self._reported and len(self._reported) < _MOST_REPORTED:
            self._reported.add(address)
            self._on_stranger(address, self.meeting)

    def _answer_all(self, channel: Channel, address: str) -> None:
        try:
            while True:
                request = json.loads(channel.receive(None))
                reply = json.dumps(self.do(*request)).encode()
                channel.send(reply, time.monotonic() + _SEND_S)
        except StrangerAnswers:  # somebody between the two
            self._report(address)

    def do(self, what: str, *arguments: Any) -> Any:
        """Answer a request: that of a client, or of the process that serves, which needs no connection."""
        operations: dict[str, Callable[..., Any]] = {
            "set": self._set,
            "get": self._get,
            "wait": self._wait,
            "add": self._add,
            "compare_set": self._compare_set,
            "append": self._append,
            "delete": self._delete,
            "count": self._count,
        }
        return operations[what](*arguments)

    @contextmanager
    def _changing(self) -> Iterator[dict[str, bytes]]:
        with self._changed:
            yield self._values
            self._changed.notify_all()

    def _set(self, values: dict[str, str]) -> None:
        with self._changing() as table:
            table.update({key: unpack(value) for key, value in values.items()})

    def _get(self, keys: list[str], wait_s: float) -> list[str] | None:
        with self._changed:
            if not self._wait(keys, wait_s):
                return None
            return [pack(self._values[key]) for key in keys]

    def _wait(self, keys: list[str], wait_s: float) -> bool:
        with self._changed:
            return self._changed.wait_for(
                lambda: all(key in self._values for key in keys), min(max(wait_s, 0.0), LONGEST_WAIT_S)
            )

    def _add(self, key: str, amount: int) -> int:
        with self._changed:
            if amount == 0 and key in self._values:  # a look, for which nobody is to wake
                return int(self._values[key])
        with self._changing() as table:
            total = int(table.get(key, b"0")) + amount
            table[key] = str(total).encode()
            return total

    def _compare_set(self, key: str, expected: str, desired: str) -> str:
        """As torch's stores do it: a missing key equals the empty value."""
        with self._changing() as table:
            if key not in table:
                if expected:
                    return expected
                table[key] = unpack(desired)
            elif table[key] == unpack(expected):
                table[key] = unpack(desired)
            return pack(table[key])

    def _append(self, key: str, value: str) -> None:
        with self._changing() as table:
            table[key] = table.get(key, b"") + unpack(value)

    def _delete(self, key: str) -> bool:
        with self._changing() as table:
            return table.pop(key, None) is not None

    def _count(self) -> int:
        return len(self._values)


def pack(value: bytes) -> str:
    """Return bytes as JSON can hold them."""
    return base64.b64encode(value).decode()


def unpack(text: str) -> bytes:
    return base64.b64decode(text)
