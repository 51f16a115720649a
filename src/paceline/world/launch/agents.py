"""Rendezvous of the launchers of one job, one per machine: who is there, which attempt it is, when all restart."""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from torch.distributed import DistError
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from paceline.core.errors import PacelineError, RanksDiffer
from paceline.world.discover.environment import OWN_RUN_ID
from paceline.world.discover.hostlist import fold
from paceline.world.launch.heartbeat import Heartbeat, HeartbeatMonitor, beats
from paceline.world.rendezvous.channel import SecretRefused
from paceline.world.rendezvous.client import NearStore
from paceline.world.rendezvous.secret import Secret, find_secret, new_secret
from paceline.world.rendezvous.server import StoreServer
from paceline.world.store import NotReached, PrefixStore, SecretsDiffer, Store, connect, poll, serve

_HOST = "127.0.0.1"
# How long the launcher that serves the store stays for the others, whose ranks still read why the job failed.
_LINGER_S = 15.0
# How long the launcher that serves the store may take to answer another.
_ANSWER_S = 10.0
_ALIKE = "give each machine its own --node-rank, and the same --nnodes, --max-restarts and --on-failure to all"


@dataclass(frozen=True)
class Node:
    """This machine among those of a job."""

    rank: int = 0
    count: int = 1
    meeting: str | None = None
    """`host:port` where the launcher of node 0 serves; None on one machine."""
    timeout_s: float = 300.0
    """Seconds that launchers wait for each other."""


@dataclass(frozen=True)
class Agent:
    """Description of a launcher."""

    host: str
    pid: int
    nodes: int
    procs: int
    max_restarts: int


class LauncherUnreached(PacelineError):
    """The launcher of node 0 does not answer."""

    node: Node
    cause: str
    sentence = (
        "node {node.rank} on {host}: the launcher of node 0 at {node.meeting} was not reached "
        "in {node.timeout_s:g} s ({cause})"
    )
    hint = "start `paceline launch --node-rank 0` on the machine that --master-addr names; check firewall and port"

    @property
    def host(self) -> str:
        return socket.gethostname()


class NodesMissing(PacelineError):
    """Launchers of other machines did not arrive."""

    node: Node
    missing: Sequence[int]
    present: Sequence[str]
    sentence = (
        "{num_missing} of {node.count} nodes did not arrive in {node.timeout_s:g} s: node {numbers}\n  present: {hosts}"
    )
    hint = "start `paceline launch` on every machine with its own --node-rank; --start-timeout-s waits longer"

    @property
    def num_missing(self) -> int:
        return len(self.missing)

    @property
    def numbers(self) -> str:
        return ", ".join(map(str, self.missing))

    @property
    def hosts(self) -> str:
        return fold(self.present) or "none"


class AgentRendezvous(RendezvousHandler):
    """The rendezvous of torch's elastic agents, over one store that lives as long as the job.

    One machine serves it on a port that the system chose, so that no two jobs race for one. Each attempt has keys of
    its own; an agent that starts again makes the others do so, and all count the same attempts.
    """

    def __init__(self, node: Node, procs: int, max_restarts: int, on_failure: str = "restart") -> None:
        self.node = node
        self.mine = Agent(socket.gethostname(), os.getpid(), node.count, procs, max_restarts)
        self.rounds = 0
        """Number of rendezvous so far."""
        self.size = procs
        """Ranks of the whole job."""
        self.leaving: signal.Signals | None = None
        """The signal by which the ranks were told to leave: nobody starts again then."""
        self.silent: dict[int, str] = {}
        """Machines whose launchers ended without a word, by the number of the node; known at the end only."""
        self._num_told = 0
        self._others = [rank for rank in range(node.count) if rank != node.rank]
        self._heartbeat: Heartbeat | None = None
        self._server: StoreServer | None = None
        if node.meeting is None:
            self.secret = Secret(new_secret().encode(), "this launcher")
            self._server = StoreServer(_HOST, 0, self.secret.value)
        else:
            self.secret = find_secret(os.environ, is_one_machine=False)
            if node.rank == 0:
                self._server = serve(node.meeting, self.secret, is_one_machine=False)
        self.meeting = node.meeting if node.meeting is not None else self._served.meeting
        self.store: Store = self._join()
        self._agents = PrefixStore("agents", self.store)
        first = self._agents.compare_set("on failure", "", on_failure).decode()
        if first != on_failure:
            raise RanksDiffer(
                f"node {node.rank} on {self.mine.host} was started with --on-failure {on_failure}, another one with "
                f"{first}",
                hint=_ALIKE,
            )

    @property
    def _served(self) -> StoreServer:
        assert self._server is not None
        return self._server

    def _join(self) -> Store:
        if self._server is not None:
            return NearStore(self._server, _ANSWER_S)
        place = f"node {self.node.rank} on {self.mine.host}"
        try:
            return connect(self.meeting, self.secret, self.node.timeout_s, _ANSWER_S)
        except SecretRefused:
            raise SecretsDiffer(place, self.meeting, self.secret.source) from None
        except NotReached as error:
            raise LauncherUnreached(self.node, error.cause) from None

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait until the launchers of all machines have arrived for the next attempt."""
        round_number = self.rounds
        self._arrive(round_number)
        if self._heartbeat is None and self.node.count > 1:
            self._heartbeat = Heartbeat(self._agents, self.node.rank)
        # The first one in this round makes the others come.
        self._agents.add(f"round/{round_number}", 1)
        agents = self._wait_for_agents(round_number)
        self._check_alike(agents)
        self.rounds += 1
        self.size = sum(agent.procs for agent in agents)
        host, _, port = self.meeting.rpartition(":")
        store = PrefixStore(f"round{round_number}", self.store)
        return RendezvousInfo(store, self.node.rank, self.node.count, RendezvousStoreInfo(host, int(port)))

    def _arrive(self, round_number: int) -> None:
        text = json.dumps(asdict(self.mine))
        first = self._agents.compare_set(self._key(round_number, self.node.rank), "", text).decode()
        if first != text:
            other = Agent(**json.loads(first)).host
            raise RanksDiffer(
                f"two launchers say --node-rank {self.node.rank}: on {other} and {self.mine.host}", hint=_ALIKE
            )

    def _wait_for_agents(self, round_number: int) -> list[Agent]:
        keys = [self._key(round_number, rank) for rank in range(self.node.count)]
        if not poll(lambda: self.leaving is not None or self._agents.check(keys), self.node.timeout_s):
            arrived = [rank for rank in range(self.node.count) if self._agents.check([keys[rank]])]
            self._others = [rank for rank in arrived if rank != self.node.rank]
            missing = tuple(rank for rank in range(self.node.count) if rank not in arrived)
            raise NodesMissing(self.node, missing, [self._agent(round_number, rank).host for rank in arrived])
        if self.leaving is not None:
            raise SignalException("told to leave while waiting for the other nodes", self.leaving)
        return [self._agent(round_number, rank) for rank in range(self.node.count)]

    def _check_alike(self, agents: Sequence[Agent]) -> None:
        for rank, agent in enumerate(agents):
            if (agent.nodes, agent.max_restarts) != (self.mine.nodes, self.mine.max_restarts):
                raise RanksDiffer(
                    f"node {rank} on {agent.host} was started with --nnodes {agent.nodes} --max-restarts "
                    f"{agent.max_restarts}, node {self.node.rank} on {self.mine.host} with --nnodes "
                    f"{self.mine.nodes} --max-restarts {self.mine.max_restarts}",
                    hint=_ALIKE,
                )

    def num_nodes_waiting(self) -> int:
        """Return the number of launchers that wait for this one to start its ranks again."""
        if self.leaving is not None or self.node.count == 1:
            return 0
        try:
            waiting: int = self._agents.add(f"round/{self.rounds}", 0)
        except DistError:
            return 0  # the launcher of node 0 is gone: the ranks notice by themselves, and leave
        return waiting

    def leave(self, number: signal.Signals) -> None:
        """Leave, as the user asked; asked a second time, do not wait for other machines either."""
        self.leaving = number
        self._num_told += 1

    def finish(self, timeout_s: float) -> None:
        """Wait for the ranks of the other machines, after ours went well, as long as their launchers live."""
        self._wait_for_all("finished", timeout_s)

    def linger(self) -> None:
        """Stay, if this launcher serves the store, until the others have ended, too."""
        if self._heartbeat is None:
            return
        try:
            self._wait_for_all("left", _LINGER_S if self.node.rank == 0 else 0.0)
        except DistError:
            pass
        finally:
            self._heartbeat.stop()

    def close(self) -> None:
        """Serve no longer, after `linger`."""
        if self._server is not None:
            self._server.close()

    def _wait_for_all(self, what: str, timeout_s: float) -> None:
        """Say `what`, and wait until every other launcher has said so, has left, or has fallen silent."""
        self._agents.set(f"{what}/{self.node.rank}", "")
        num_told, listener = self._num_told, HeartbeatMonitor()

        def done() -> bool:
            awaited = [
                rank
                for rank in self._others
                if rank not in self.silent and not any(self._agents.check([f"{key}/{rank}"]) for key in (what, "left"))
            ]
            for rank in listener.silent(beats(self._agents, awaited)):
                self.silent[rank] = self._agent(self.rounds - 1, rank).host if self.rounds else "its machine"
                awaited.remove(rank)
            return not awaited or self._num_told > num_told

        poll(done, timeout_s)

    def _key(self, round_number: int, rank: int) -> str:
        return f"agent/{round_number}/{rank}"

    def _agent(self, round_number: int, rank: int) -> Agent:
        return Agent(**json.loads(self._agents.get(self._key(round_number, rank))))

    def get_backend(self) -> str:
        return "paceline"

    @property
    def use_agent_store(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """Do nothing: the machines of a job are fixed, none leaves a rendezvous by itself."""

    def get_run_id(self) -> str:
        return OWN_RUN_ID

    def shutdown(self) -> bool:
        return True
