"""Observations and orders of the coordinator, with a store in memory and machines that are only simulated."""

from __future__ import annotations

import json
import signal
import time
from dataclasses import asdict

import pytest
from torch.distributed import HashStore

from paceline.world.failure.board import Failure, FailureBoard, Seen
from paceline.world.launch import coordinator
from paceline.world.launch.agents import Node
from paceline.world.launch.coordinator import Coordinator
from paceline.world.launch.decisions import Survival
from paceline.world.rounds import PREFIX, Now, Ready, read_now, read_round
from paceline.world.store import PrefixStore, attempt_store


class Machine:
    """A machine with its coordinator, whose processes are only said to run."""

    def __init__(self, procs: int, **rules: int) -> None:
        self.raw = HashStore()
        self.store = PrefixStore(PREFIX, self.raw)
        self.coordinator = Coordinator(self.raw, Node(), Survival(**rules))
        self.num_orders = 0
        self.store.add("nodes", 1)
        self.store.set("nodes/0", json.dumps({"rank": 0, "host": "here", "procs": procs}))
        self.poll()
        for order in self.orders():
            self.start(order["start"]["slot"])
        self.poll()

    def start(self, slot: int) -> None:
        number = self.store.add("members", 1) - 1
        member = {"incarnation": 0, "node": 0, "slot": slot, "host": "here"}
        self.store.set(f"members/{number}", json.dumps(member))

    def poll(self) -> int | None:
        self.store.add("events", 1)
        return self.coordinator.poll()

    def orders(self) -> list[dict]:  # type: ignore[type-arg]
        """Return the orders since the last call."""
        orders = []
        while self.store.check([f"orders/0/{self.num_orders}"]):
            orders.append(json.loads(self.store.get(f"orders/0/{self.num_orders}")))
            self.num_orders += 1
        return orders


def test_round_is_published_once_all_processes_have_started() -> None:
    machine = Machine(2)
    assert read_now(machine.store) == Now(0)
    assert [member.slot for member in read_round(machine.store, 0).members] == [0, 1]
    assert machine.coordinator.is_steady
    assert machine.coordinator.missing() == []


def test_death_is_reported_and_a_replacement_is_ordered(capsys: pytest.CaptureFixture[str]) -> None:
    machine = Machine(2, max_restarts=1)
    FailureBoard(attempt_store(machine.raw, 0)).tell_place(1, Seen("here", 1, 1, "training, step 7"))
    machine.store.set("exits/1", str(-signal.SIGKILL))
    assert machine.poll() is None
    assert read_now(machine.store) == Now(0, is_over=True)
    assert "rank 1 on here was lost: ended by SIGKILL" in (line := capsys.readouterr().err)
    assert "last seen training, step 7" in line
    (order,) = machine.orders()
    assert (order["start"]["rank"], order["start"]["slot"]) == (1, 1)
    machine.store.set("ready/0", json.dumps(asdict(Ready(0, 5, 30.0))))
    machine.poll()
    assert read_round(machine.store, 1).holders == (0,)


def test_reported_failure_ends_the_job_and_is_told_to_the_launchers() -> None:
    machine = Machine(2)
    FailureBoard(attempt_store(machine.raw, 0)).post(Failure(0, "here", "crash", "ValueError: no"))
    machine.store.set("exits/0", "1")
    assert machine.poll() is None
    machine.store.set("exits/1", "1")
    assert machine.poll() == 1
    assert machine.orders()[-1]["end"] == 1


def test_silence_is_observed_without_events(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(1)
    machine.store.set("ready/0", json.dumps(asdict(Ready(-1, None, 30.0))))
    machine.store.add("pulse/0", 1)
    machine.poll()
    later = time.monotonic() + 31.0
    monkeypatch.setattr(coordinator.time, "monotonic", lambda: later)
    machine.coordinator.poll()
    assert [order["kill"] for order in machine.orders()] == [0]


@pytest.mark.parametrize(("code", "is_signal"), [(-signal.SIGTERM, True), (0, False)])
def test_signal_that_ended_all_processes_is_recognised(code: int, is_signal: bool) -> None:
    machine = Machine(2)
    for member in (0, 1):
        machine.store.set(f"exits/{member}", str(code))
    machine.poll()
    assert machine.coordinator.ended_by(signal.SIGTERM) is is_signal


def test_checkpoint_in_progress_is_recognised_by_a_growing_heartbeat() -> None:
    machine = Machine(1)
    board = FailureBoard(attempt_store(machine.raw, 0))
    assert not machine.coordinator.is_saving()
    board.tell_place(0, Seen("here", 1, 1, "saving, step 7"))
    assert machine.coordinator.is_saving()
    assert not machine.coordinator.is_saving()
