from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from paceline.world import group_sockets
from paceline.world import rounds as rounds_module
from paceline.world.discover.environment import World
from paceline.world.rendezvous.client import StoreClient
from paceline.world.rendezvous.server import StoreServer
from paceline.world.rounds import PREFIX, Lost, Member, Now, Round, Rounds, is_for_good, tell_now
from paceline.world.store import PrefixStore

AROUND = World(3, 1, 4, 2, 1, 2, "procs", "host0:29500", attempt=0, launcher_hosts_store=True)
ROUND = Round(
    number=5,
    members=(Member(0, 0, 0, "host0"), Member(7, 1, 1, "host1")),
    first_size=4,
    holders=(0,),
    lost=(Lost(2, "host1", "ended by SIGKILL"),),
    joined=(1,),
    since=12.5,
)


def test_round_travels_as_json() -> None:
    assert Round.from_json(ROUND.to_json()) == ROUND


def test_rank_of_a_member() -> None:
    assert ROUND.rank_of(7) == 1
    assert ROUND.rank_of(3) is None


def test_world_of_a_rank_keeps_its_device_and_its_meeting_point() -> None:
    world = ROUND.world(1, AROUND)
    assert (world.rank, world.size, world.attempt) == (1, 2, 5)
    assert (world.local_rank, world.local_size, world.nodes, world.meeting) == (1, 2, 2, "host0:29500")


def test_lost_rank_in_words() -> None:
    assert str(ROUND.lost[0]) == "rank 2 on host1 was lost: ended by SIGKILL"


class Follower:
    is_asked_to_stop = False

    def __init__(self) -> None:
        self.told: list[str] = []

    def ask_to_regroup(self) -> None:
        self.told.append("regroup")

    def ask_to_stop(self) -> None:
        self.told.append("stop")


@pytest.fixture
def server() -> Iterator[StoreServer]:
    server = StoreServer("127.0.0.1", 0, b"secret")
    yield server
    server.close()


@pytest.fixture
def store(server: StoreServer) -> PrefixStore:
    return PrefixStore(PREFIX, StoreClient(*server.near, b"secret", 20.0))


@pytest.fixture
def inside(server: StoreServer, store: PrefixStore, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rounds]:
    """A process in round 5, with minutes between two beats: what happens meanwhile must wake it."""
    monkeypatch.setattr(rounds_module, "meet_beside", lambda *_: StoreClient(*server.near, b"secret", 20.0))
    monkeypatch.setattr(rounds_module, "_BEAT_S", 300.0)
    tell_now(store, Now(5), before=None)
    store.set("round/5", ROUND.to_json())
    with Rounds(AROUND, 7, start_timeout_s=1.0, timeout_s=1.0) as rounds:
        assert rounds.next(holds=None)[0] == ROUND
        wait_until(lambda: store.add("pulse/7", 0) > 0)
        yield rounds


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20.0
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_collectives_of_a_round_that_lost_a_member_are_broken_off(inside: Rounds, store: PrefixStore) -> None:
    with group_sockets.noted():
        near, far = socket.socketpair()
    with near, far:
        near.settimeout(20.0)
        tell_now(store, Now(5, is_over=True), before=Now(5))
        assert near.recv(1) == b""  # as a collective that waits for a peer which is stopped
    group_sockets.forget()


def test_members_are_asked_to_leave_when_somebody_waits(inside: Rounds, store: PrefixStore) -> None:
    follower = Follower()
    inside.follow(follower)
    tell_now(store, Now(5, is_wanted=True), before=Now(5))
    wait_until(lambda: "regroup" in follower.told)


def test_who_waits_for_the_next_round_is_woken_by_it(inside: Rounds, store: PrefixStore) -> None:
    found: list[Round] = []
    waits = threading.Thread(target=lambda: found.append(inside.next(holds=12)[0]), daemon=True)
    waits.start()
    wait_until(lambda: store.check(["ready/7"]))
    later = replace(ROUND, number=6)
    store.set("round/6", later.to_json())
    tell_now(store, Now(6), before=Now(5))
    waits.join(20.0)
    assert found == [later]


@pytest.mark.parametrize(
    ("silent_s", "is_gone", "is_asked", "is_over"),
    [(60.0, True, False, True), (60.0, False, False, False), (60.0, False, True, True), (3.0, True, True, False)],
)
def test_launcher_is_gone_not_frozen(silent_s: float, is_gone: bool, is_asked: bool, is_over: bool) -> None:
    """Ctrl-Z freezes it; a signal of the launcher of this machine says that the other one is out of reach."""
    assert is_for_good(silent_s, is_gone=is_gone, is_asked=is_asked) is is_over
