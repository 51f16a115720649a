from __future__ import annotations

from paceline.world.discover.environment import World
from paceline.world.rounds import Lost, Member, Round

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
