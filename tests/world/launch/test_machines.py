"""Machines that arrive at a job, are refused or fall silent, with a store in memory."""

from __future__ import annotations

import json
import time

import pytest
from torch.distributed import HashStore

from paceline.world.launch import heartbeat
from paceline.world.launch.agents import Node
from paceline.world.launch.machines import Machines


class Arrivals:
    """A job's machines, and the store in which they arrive."""

    def __init__(self, nodes: int, max_nodes: int) -> None:
        self.store = HashStore()
        self.machines = Machines(self.store, Node(0, nodes), max_nodes)
        for rank in range(nodes):
            self.arrive(rank)

    def arrive(self, rank: int) -> list[int]:
        number = self.store.add("nodes", 1) - 1
        self.store.set(f"nodes/{number}", json.dumps({"rank": rank, "host": f"host{rank}", "procs": 1}))
        return self.machines.meet()

    def refusal(self, number: int) -> str | None:
        key = f"orders/{number}/0"
        return json.loads(self.store.get(key))["refuse"] if self.store.check([key]) else None


def test_machines_of_the_job_are_known_by_rank_and_arrival() -> None:
    job = Arrivals(nodes=2, max_nodes=2)
    assert {number: machine.rank for number, machine in job.machines.present().items()} == {0: 0, 1: 1}
    assert job.machines.missing() == []


def test_machine_without_room_or_with_a_taken_rank_is_refused() -> None:
    job = Arrivals(nodes=1, max_nodes=2)
    assert job.arrive(2) == job.arrive(0) == []
    assert "room for 2 machines" in (job.refusal(1) or "")
    assert "node 0 on host0 is in it" in (job.refusal(2) or "")
    assert list(job.machines.present()) == [0]


def test_second_machine_of_a_rank_is_refused_while_the_first_lives() -> None:
    job = Arrivals(nodes=2, max_nodes=2)
    assert job.arrive(1) == []
    assert job.machines.settle_doubts() == []
    assert job.refusal(2) is None
    job.store.add("beat/1", 3)
    assert job.machines.settle_doubts() == []
    assert "node 1 on host1 is in it" in (job.refusal(2) or "")


def test_machine_that_returns_replaces_its_silent_predecessor(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Arrivals(nodes=2, max_nodes=2)
    assert job.arrive(1) == []
    assert job.machines.fall_silent() == []
    later = time.monotonic() + 60.0
    monkeypatch.setattr(heartbeat.time, "monotonic", lambda: later)
    assert job.machines.fall_silent() == [1]
    assert job.machines.settle_doubts() == [2]
    assert list(job.machines.present()) == [0, 2]


def test_silence_before_listen_anew_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Arrivals(nodes=2, max_nodes=2)
    job.machines.fall_silent()
    later = time.monotonic() + 60.0
    monkeypatch.setattr(heartbeat.time, "monotonic", lambda: later)
    job.machines.listen_anew()
    assert job.machines.fall_silent() == []
