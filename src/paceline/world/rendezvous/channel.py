"""Authenticated connection between two processes of a job that know one secret.

Both sides prove that they know it before anything else is read, so that a stranger reaches no more than the few lines
of the handshake. Every frame then carries a code over its number and its bytes: nothing can be changed, repeated, left
out, or taken from another connection. Nothing is encrypted: what ranks tell each other is not secret.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import socket
import struct
import time
from contextlib import suppress

_GREETING = b"paceline store 1\n"
_NONCE_BYTES = 32
_CODE_BYTES = hashlib.sha256().digest_size
_ACCEPTED, _REFUSED = b"+", b"-"
_LENGTH = struct.Struct("!I")
_NUMBER = struct.Struct("!Q")
_MOST_BYTES = 64 << 20


# Open connections of this process, which its forked children (workers of data loaders) must not keep open.
_open: set[socket.socket] = set()


def _close_in_child() -> None:
    for each in list(_open):
        hang_up(each)


os.register_at_fork(after_in_child=_close_in_child)


def keep(connection: socket.socket) -> None:
    """Hold a socket until `hang_up`, and close it in processes that are forked from this one."""
    _open.add(connection)


def hang_up(connection: socket.socket) -> None:
    """Close a socket."""
    _open.discard(connection)
    connection.close()


def keep_alive(connection: socket.socket) -> None:
    """Have the system notice a machine that is gone, and send small frames at once."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


class StrangerAnswers(Exception):
    """Another program, or one that does not know the secret, is at the other end."""


class SecretRefused(StrangerAnswers):
    """The other end is a store like ours, with another secret."""


class Channel:
    """One side of a connection. A call that is not done at its deadline raises `TimeoutError`."""

    def __init__(self, connection: socket.socket, send_key: bytes, receive_key: bytes) -> None:
        self._socket = connection
        self._send_key, self._receive_key = send_key, receive_key
        self._num_sent = self._num_received = 0

    def send(self, payload: bytes, deadline: float) -> None:
        """Send one frame before `deadline` (of `time.monotonic`)."""
        code = _frame_code(self._send_key, self._num_sent, payload)
        self._num_sent += 1
        _write(self._socket, _LENGTH.pack(len(payload)) + code + payload, deadline)

    def receive(self, deadline: float | None) -> bytes:
        """Return the next frame; None waits for ever. Raises `EOFError` where the other side is gone."""
        head = _read(self._socket, _LENGTH.size + _CODE_BYTES, deadline)
        (length,) = _LENGTH.unpack_from(head)
        if length > _MOST_BYTES:
            raise StrangerAnswers("a frame that is too long")
        payload = _read(self._socket, length, deadline)
        code = _frame_code(self._receive_key, self._num_received, payload)
        self._num_received += 1
        if not hmac.compare_digest(head[_LENGTH.size :], code):
            raise StrangerAnswers("a frame that was changed on its way")
        return payload

    def shut_down(self) -> None:
        """End calls that another thread is in, with an error."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        hang_up(self._socket)

    def __del__(self) -> None:
        self.close()


def call(connection: socket.socket, secret: bytes, deadline: float) -> Channel:
    """Return the channel of the side that connected, after both sides have proven that they know the secret."""
    greeting = _read(connection, len(_GREETING) + _NONCE_BYTES, deadline)
    if not greeting.startswith(_GREETING):
        raise StrangerAnswers("another program answers there")
    nonces = greeting[len(_GREETING) :] + os.urandom(_NONCE_BYTES)
    _write(connection, nonces[_NONCE_BYTES:] + _code(secret, b"client", nonces), deadline)
    if _read(connection, 1, deadline) != _ACCEPTED:
        raise SecretRefused("it has another secret")
    if not hmac.compare_digest(_read(connection, _CODE_BYTES, deadline), _code(secret, b"server", nonces)):
        raise StrangerAnswers("what answers there does not know the secret of this job")
    return Channel(connection, _code(secret, b"up", nonces), _code(secret, b"down", nonces))


def answer(connection: socket.socket, secret: bytes, deadline: float) -> Channel:
    """Return the channel of the side that listened; `StrangerAnswers` if the caller does not know the secret."""
    nonce = os.urandom(_NONCE_BYTES)
    _write(connection, _GREETING + nonce, deadline)
    reply = _read(connection, _NONCE_BYTES + _CODE_BYTES, deadline)
    nonces = nonce + reply[:_NONCE_BYTES]
    if not hmac.compare_digest(reply[_NONCE_BYTES:], _code(secret, b"client", nonces)):
        with suppress(OSError):  # it need not wait for the answer
            _write(connection, _REFUSED, deadline)
        raise StrangerAnswers("it does not know the secret")
    _write(connection, _ACCEPTED + _code(secret, b"server", nonces), deadline)
    return Channel(connection, _code(secret, b"down", nonces), _code(secret, b"up", nonces))


def _code(secret: bytes, purpose: bytes, nonces: bytes) -> bytes:
    return hmac.digest(secret, _GREETING + purpose + b"\n" + nonces, "sha256")


def _frame_code(key: bytes, number: int, payload: bytes) -> bytes:
    return hmac.digest(key, _NUMBER.pack(number) + payload, "sha256")


def _write(connection: socket.socket, data: bytes, deadline: float) -> None:
    _wait_until(connection, deadline)
    connection.sendall(data)


def _read(connection: socket.socket, size: int, deadline: float | None) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        _wait_until(connection, deadline)
        try:
            part = connection.recv(size - len(parts))
        except ConnectionError:  # it has hung up without reading what was sent to it
            part = b""
        if not part:
            raise EOFError("partly" if parts else "the other side is gone")
        parts += part
    return bytes(parts)


def _wait_until(connection: socket.socket, deadline: float | None) -> None:
    """Let the next call on the socket wait until `deadline` at most."""
    connection.settimeout(None if deadline is None else max(deadline - time.monotonic(), 1e-3))
