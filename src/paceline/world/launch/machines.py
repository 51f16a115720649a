"""Machines of a job whose survivors go on, as the launcher of node 0 knows them: who has come, who is silent."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from paceline.core.units import counted
from paceline.world.launch.agents import Node
from paceline.world.launch.heartbeat import HeartbeatMonitor, beats
from paceline.world.store import Store

# Beats of a launcher, of two in a second, that show that it lives.
_ALIVE_BEATS = 2


@dataclass(frozen=True)
class Machine:
    """A machine that has come: one that comes again is another one."""

    rank: int
    """Its `--node-rank`."""
    host: str
    procs: int


class Machines:
    """Machines by the number of their arrival. Those that are refused, or silent, are gone for good."""

    def __init__(self, store: Store, node: Node, max_nodes: int) -> None:
        self._store, self._node, self._max_nodes = store, node, max_nodes
        self._all: dict[int, Machine] = {}
        self._gone: set[int] = set()
        self._doubtful: dict[int, tuple[int, int]] = {}
        """Machines that have come while another launcher says to be the same: its number and its beats by then."""
        self._beats = HeartbeatMonitor()
        self._num_orders: dict[int, int] = {}

    def __getitem__(self, number: int) -> Machine:
        return self._all[number]

    def is_gone(self, number: int) -> bool:
        return number in self._gone

    def present(self) -> dict[int, Machine]:
        """Return the machines that are in the job."""
        aside = self._gone | self._doubtful.keys()
        return {number: machine for number, machine in self._all.items() if number not in aside}

    def missing(self) -> list[int]:
        """Return the node ranks of those that the job begins with and that have not come."""
        here = {machine.rank for machine in self._all.values()}
        return [rank for rank in range(self._node.count) if rank not in here]

    def hosts(self) -> list[str]:
        return [machine.host for machine in self._all.values()]

    def meet(self) -> list[int]:
        """Look who has come; return those that are in the job since."""
        came = []
        for number in range(len(self._all), self._store.add("nodes", 0)):
            if not self._store.check([f"nodes/{number}"]):
                break
            self._all[number] = Machine(**json.loads(self._store.get(f"nodes/{number}")))
            if self._all[number].rank >= self._max_nodes:
                self._refuse(number, f"it has room for {counted(self._max_nodes, 'machine')}")
            elif self._is_taken_in(number):
                came.append(number)
        return came

    def fall_silent(self) -> list[int]:
        """Look whose launcher has not been heard for long; return those, which are gone now."""
        if self._node.count == 1 and self._max_nodes == 1:
            return []
        others = [number for number, machine in self.present().items() if machine.rank != self._node.rank]
        silent = sorted(self._beats.silent(beats(self._store, others)))
        self._gone.update(silent)
        return silent

    def listen_anew(self) -> None:
        """Count the silence of launchers from now on."""
        self._beats = HeartbeatMonitor()

    def settle_doubts(self) -> list[int]:
        """Return doubtful machines that are in the job since the one that said to be the same is gone."""
        came = []
        for number, (other, before) in list(self._doubtful.items()):
            if other in self._gone:
                del self._doubtful[number]
                came += [number] if self._is_taken_in(number) else []
            elif self._beats_of(other) > before + _ALIVE_BEATS:
                self._refuse_second(number, other)
        return came

    def order(self, number: int, **order: Any) -> None:
        """Tell a machine's launcher what to do."""
        place = self._num_orders.get(number, 0)
        self._num_orders[number] = place + 1
        self._store.set(f"orders/{number}/{place}", json.dumps(order))

    def order_all(self, **order: Any) -> None:
        for number in self._all:
            self.order(number, **order)

    def _is_taken_in(self, number: int) -> bool:
        """Return True unless there is a machine of the same node rank: that may be dead, and not noticed yet."""
        rank = self._all[number].rank
        same = [other for other, machine in self.present().items() if machine.rank == rank and other != number]
        if not same:
            return True
        other = same[0]
        if rank == self._node.rank:
            self._refuse_second(number, other)
        else:
            self._doubtful[number] = other, self._beats_of(other)
        return False

    def _refuse_second(self, number: int, other: int) -> None:
        before = self._all[other]
        self._refuse(number, f"node {before.rank} on {before.host} is in it")

    def _refuse(self, number: int, why: str) -> None:
        self._doubtful.pop(number, None)
        self._gone.add(number)
        self.order(number, refuse=why)

    def _beats_of(self, number: int) -> int:
        return beats(self._store, [number])[number]
