from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from paceline.world import group_sockets


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    near, far = socket.socketpair()
    with near, far:
        yield near, far
    group_sockets.forget()


def test_connections_of_groups_end_and_others_stay(pair: tuple[socket.socket, socket.socket]) -> None:
    with group_sockets.noted():
        near, far = socket.socketpair()
    with near, far:
        assert group_sockets.shut_down() == 2
        assert near.recv(1) == b""
        pair[0].send(b"x")
        assert pair[1].recv(1) == b"x"
    assert group_sockets.shut_down() == 0  # closed by their owner


def test_a_group_that_is_just_being_made_is_broken_off(pair: tuple[socket.socket, socket.socket]) -> None:
    with group_sockets.noted():
        near, far = socket.socketpair()
        with near, far:
            assert group_sockets.shut_down() == 2
    pair[0].send(b"x")
    assert pair[1].recv(1) == b"x"


def test_forgotten_connections_stay() -> None:
    with group_sockets.noted():
        near, far = socket.socketpair()
    group_sockets.forget()
    with near, far:
        assert group_sockets.shut_down() == 0
        near.send(b"x")
        assert far.recv(1) == b"x"


def test_where_others_connect_stays_open() -> None:
    """gloo ends the process where its listener is shut down."""
    with group_sockets.noted():
        listener = socket.create_server(("127.0.0.1", 0))
    with listener:
        assert group_sockets.shut_down() == 0
        with socket.create_connection(listener.getsockname()):
            listener.accept()[0].close()
    group_sockets.forget()
