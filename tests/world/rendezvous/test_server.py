"""The store through its own sockets: as torch's, for those who know the secret, and for nobody else."""

from __future__ import annotations

import hmac
import os
import pickle
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from paceline.world.rendezvous.channel import SecretRefused, StrangerAnswers, answer, call
from paceline.world.rendezvous.client import NearStore, StoreClient, StoreGone, StoreSilent, TorchStoreClient
from paceline.world.rendezvous.secret import Secret
from paceline.world.rendezvous.server import StoreServer
from paceline.world.store import NoMeeting, listen_address, serve

SECRET = b"a secret of the tests"


@pytest.fixture
def strangers() -> list[str]:
    return []


@pytest.fixture
def server(strangers: list[str]) -> Iterator[StoreServer]:
    made = StoreServer("127.0.0.1", 0, SECRET, lambda address, meeting: strangers.append(address))
    yield made
    made.close()


def client(server: StoreServer, secret: bytes = SECRET, answer_s: float = 10.0) -> StoreClient:
    return StoreClient(server.host, server.port, secret, answer_s)


def torch_store(server: StoreServer) -> dist.Store:
    return dist.HashStore()


def near(server: StoreServer) -> NearStore:
    return NearStore(server, 10.0)


STORES: list[Callable[[StoreServer], Any]] = [client, near, torch_store]


@pytest.mark.parametrize("make", STORES)
def test_every_operation_is_that_of_torch_s_own_stores(make: Callable[[StoreServer], Any], server: StoreServer) -> None:
    whole = make(server)
    store = dist.PrefixStore("part", whole)
    store.set("a", "1")
    store.set("b", bytes(range(256)))
    assert (store.get("a"), store.get("b")) == (b"1", bytes(range(256)))
    assert store.check(["a", "b"])
    assert not store.check(["a", "c"])
    assert store.compare_set("c", "", "first") == b"first"
    assert store.compare_set("c", "", "second") == b"first"
    assert store.compare_set("c", "first", "second") == b"second"
    assert store.compare_set("none", "x", "y") == b"x"
    assert not store.check(["none"])
    assert [store.add("n", 3), store.add("n", -1), store.get("n")] == [3, 2, b"2"]
    store.append("a", "23")
    store.multi_set(["d", "e"], ["4", "5"])
    assert store.multi_get(["a", "d", "e"]) == [b"123", b"4", b"5"]
    store.wait(["d"], timedelta(seconds=1))
    with pytest.raises(dist.DistError):
        store.wait(["never"], timedelta(milliseconds=50))
    assert store.delete_key("d")
    assert not store.delete_key("d")
    assert not store.check(["d"])


def test_the_process_that_serves_and_its_clients_have_one_table(server: StoreServer) -> None:
    here, there = near(server), client(server)
    here.set("a", "1")
    assert there.get("a") == b"1"
    assert there.add("n", 2) == 2
    assert here.add("n", 0) == 2  # a look
    assert here.compare_set("b", "", "2") == there.get("b") == b"2"


def test_keys_that_come_late_are_waited_for(server: StoreServer) -> None:
    with ThreadPoolExecutor(1) as pool:
        late = pool.submit(client(server).get, "late")
        other = client(server)
        assert not other.check(["late"])
        other.set("late", "here")
        assert late.result(10) == b"here"


def test_who_does_not_know_the_secret_is_turned_away_and_named_once(server: StoreServer, strangers: list[str]) -> None:
    client(server).set("run folder", "/mine")
    for _ in range(3):
        with pytest.raises(SecretRefused):
            client(server, b"a guess of a stranger")
    with pytest.raises(dist.DistError):  # torch's own client speaks another language
        dist.TCPStore(server.host, server.port, is_master=False, timeout=timedelta(seconds=1))
    assert strangers == ["127.0.0.1"]
    assert client(server).get("run folder") == b"/mine"


def test_one_that_is_ended_while_it_connects_is_no_stranger(server: StoreServer, strangers: list[str]) -> None:
    """Killed before it has read the greeting, its connection is reset."""
    for _ in range(3):
        with socket.create_connection(server.near):
            time.sleep(0.02)
    client(server).set("a", "1")
    assert strangers == []
    with pytest.raises(dist.DistError):
        dist.TCPStore(server.host, server.port, is_master=False, timeout=timedelta(seconds=1))
    assert strangers == ["127.0.0.1"]


class Bomb:
    """Unpickled, it leaves a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_garbage_pickles_and_recorded_greetings_change_nothing(server: StoreServer, tmp_path: Path) -> None:
    mine = client(server)
    mine.set("a", "1")
    bomb = pickle.dumps(Bomb(tmp_path / "owned"))
    recorded: list[bytes] = []
    for data in (bomb, b"\x00" * 4096, b"\xff" * 4096, b"GET / HTTP/1.0\r\n\r\n", b""):
        with socket.create_connection(server.near) as connection:
            recorded.append(connection.recv(1024))
            connection.sendall(data)
    assert len(set(recorded)) == len(recorded)  # never the same greeting: an old answer fits no other
    assert not (tmp_path / "owned").exists()
    assert mine.get("a") == b"1"
    assert mine.num_keys() == 1


def pair(secret_here: bytes = SECRET, secret_there: bytes = SECRET) -> tuple[Any, Any, socket.socket, socket.socket]:
    """Two channels, and the two sockets between them that somebody in the middle holds."""
    (a, a_middle), (b, b_middle) = socket.socketpair(), socket.socketpair()
    deadline = time.monotonic() + 5

    def pump() -> None:
        b_to_a = b_middle.recv(1024)
        a_middle.sendall(b_to_a)
        b_middle.sendall(a_middle.recv(1024))
        a_middle.sendall(b_middle.recv(1024))

    with ThreadPoolExecutor(3) as pool:
        pool.submit(pump)
        listening = pool.submit(answer, b, secret_there, deadline)
        calling = pool.submit(call, a, secret_here, deadline)
        return calling.result(), listening.result(), a_middle, b_middle


@pytest.mark.parametrize("attack", ["flip", "repeat", "reflect"])
def test_frames_that_were_changed_repeated_or_sent_back_are_noticed(attack: str) -> None:
    caller, listener, near, far = pair()
    deadline = time.monotonic() + 5
    caller.send(b"first", deadline)
    frame = near.recv(1024)
    far.sendall(frame)
    assert listener.receive(deadline) == b"first"
    if attack == "flip":
        caller.send(b"second", deadline)
        frame = near.recv(1024)
        far.sendall(frame[:-1] + bytes([frame[-1] ^ 1]))
    elif attack == "repeat":
        far.sendall(frame)
    else:
        near.sendall(frame)
    with pytest.raises(StrangerAnswers):
        (caller if attack == "reflect" else listener).receive(deadline)
    for each in (near, far):
        each.close()


def test_a_server_that_does_not_know_the_secret_is_not_believed() -> None:
    """A stranger who took the port first says yes to everybody, and repeats what he heard."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def pretend() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.sendall(b"paceline store 1\n" + bytes(32))
                reply = connection.recv(1024)
                connection.sendall(b"+" + hmac.digest(b"a guess", reply, "sha256"))

        thread = threading.Thread(target=pretend)
        thread.start()
        with pytest.raises(StrangerAnswers, match="does not know the secret"):
            StoreClient(*listener.getsockname(), SECRET, 5.0)
        thread.join()


def test_a_frozen_server_is_noticed_and_a_dead_one_told_apart(server: StoreServer) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:  # the system accepts, nobody answers
        with pytest.raises(TimeoutError):
            StoreClient(*listener.getsockname(), SECRET, 5.0, connect_s=0.2)
        frozen = TorchStoreClientOf(*listener.getsockname())
        with pytest.raises(StoreSilent):
            frozen()
    mine = client(server, answer_s=0.3)
    mine.set("a", "1")
    with server._changed, pytest.raises(StoreSilent):  # its threads cannot get on
        mine.set("a", "2")
    assert mine.get("a") in (b"1", b"2")  # it connects again
    server.close()
    with pytest.raises(StoreGone):
        mine.get("a")


class TorchStoreClientOf:
    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host, port

    def __call__(self) -> TorchStoreClient:
        # torch goes on trying in a thread and writes to stderr when it gives up: not while a later test looks at it.
        return TorchStoreClient(
            lambda: dist.TCPStore(self._host, self._port, is_master=False, timeout=timedelta(seconds=1)), 0.3
        )


def test_forked_children_do_not_keep_the_port(server: StoreServer) -> None:
    mine = client(server)
    ready, go = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        os.write(ready[1], b"x")
        os.read(go[0], 1)
        os._exit(0)
    try:
        os.read(ready[0], 1)
        mine.set("a", "1")
        server.close()
        with pytest.raises(ConnectionError):
            socket.create_connection(server.near).close()
    finally:
        os.write(go[1], b"x")
        os.waitpid(child, 0)
        for end in (*ready, *go):
            os.close(end)


def test_an_address_that_is_given_needs_no_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """The name server of a cluster learns a pod's name after the pod has begun: that was the end of the job."""
    secret = Secret(SECRET, "the tests")
    with pytest.raises(NoMeeting, match="job-0.job.invalid:0: the name has no address"):
        serve("job-0.job.invalid:0", secret, is_one_machine=False)
    monkeypatch.setenv("PACELINE_LISTEN", "127.0.0.1")
    server = serve("job-0.job.invalid:0", secret, is_one_machine=False)
    assert server.host == "127.0.0.1"
    server.close()


def test_a_name_that_means_loopback_is_not_where_other_machines_arrive() -> None:
    assert listen_address(["10.0.0.4"], False, None) == "10.0.0.4"
    assert listen_address(["127.0.1.1"], True, None) == "127.0.1.1"
    assert listen_address(["127.0.1.1"], False, "10.0.0.4") == "10.0.0.4"
    assert listen_address(["127.0.1.1"], False, None) == "0.0.0.0"
