"""Connections of the process groups of this process, to break off their collectives: gloo has no abort.

A thread that shuts a connection down makes the main thread's wait for a peer end with an error at once, instead of
after the time-out; for gloo it is the same as a connection that the peer has closed. Groups are made inside `noted()`.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_DESCRIPTORS = "/proc/self/fd"
# `socket:[inode]`: unlike the number of its descriptor never the name of another socket later.
_of_groups: set[str] = set()
# Sockets that were open when the group that is being made was begun; None while there is none.
_before: frozenset[str] | None = None


@contextmanager
def noted() -> Iterator[None]:
    """Take note of the connections that are made meanwhile; none where the system does not tell."""
    global _before
    _before = frozenset(_open_sockets())
    try:
        yield
    finally:
        _of_groups.update(_open_sockets().keys() - _before)
        _before = None


def forget() -> None:
    """Forget all connections, when the groups are given up."""
    _of_groups.clear()


def shut_down() -> int:
    """End the connections that are still open, and return their number. Their descriptors stay with gloo."""
    number, before = 0, _before
    for name, descriptor in _open_sockets().items():
        if name in _of_groups or (before is not None and name not in before):
            with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
                # Where gloo listens it would end the process: a listener that is shut down is an error that it throws.
                if not connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    connection.shutdown(socket.SHUT_RDWR)
                    number += 1
    return number


def _open_sockets() -> dict[str, int]:
    """Return the sockets of this process: name and descriptor."""
    found: dict[str, int] = {}
    with suppress(OSError):  # a system without this folder
        for descriptor in os.listdir(_DESCRIPTORS):
            with suppress(OSError):  # closed meanwhile
                name = os.readlink(f"{_DESCRIPTORS}/{descriptor}")
                if name.startswith("socket:"):
                    found[name] = int(descriptor)
    return found
