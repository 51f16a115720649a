"""`--procs N`, `paceline launch`: start ranks through torch's elastic agent, with no launcher to install or to learn.

The agent watches and restarts; this file adds what it lacks: signals reach the ranks and leave them time to save,
one exit code, and silence, because the rank that failed has already said why.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, Literal

import torch
from torch.distributed import DistError
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, SignalException

from paceline.core.errors import PacelineError
from paceline.core.units import counted
from paceline.world.failure.board import EXIT_CRASH, EXIT_DIVERGED, EXIT_INTERRUPT, EXIT_USER_ERROR, FailureBoard, Seen
from paceline.world.failure.watchdog import exit_now
from paceline.world.launch.agents import AgentRendezvous, Node
from paceline.world.parent_process import bound
from paceline.world.rendezvous.secret import VARIABLE, Secret
from paceline.world.resources import DeviceChoice, MoreRanksThanDevices, threads_per_rank
from paceline.world.signals import hand_back
from paceline.world.store import attempt_store

ALONE = Node()
# How long ranks that are saving are left alone at a time, after their grace.
_SAVING_S = 5.0
# How long ranks of other machines may take to end after those of this one have.
_FINISH_S = 300.0
_FINAL = (EXIT_USER_ERROR, EXIT_DIVERGED)
"""Exit codes of ranks that would end in the same way if they were started again."""


class LauncherGone(PacelineError):
    """The launcher that served the store ended."""

    node: Node
    sentence = "node {node.rank}: the launcher of node 0 at {node.meeting} is gone"
    hint = "look for its own message on that machine"


def count_procs(asked: int | Literal["auto"], device: DeviceChoice, num_devices: int) -> int:
    """Return the number of ranks to start: `auto` is one per GPU, and one without GPUs."""
    if device == "cpu":
        num_devices = 0
    if asked == "auto":
        return max(1, num_devices)
    if num_devices and asked > num_devices:
        raise MoreRanksThanDevices(asked, num_devices)
    return asked


def launch(
    procs: int | Literal["auto"],
    command: Sequence[str],
    *,
    device: DeviceChoice = "auto",
    max_restarts: int = 0,
    grace_s: float = 60.0,
    node: Node = ALONE,
) -> int:
    """Run `command` as so many ranks on this machine, one of `node.count` that do so; the exit code for the user.

    Stop signals go to the ranks, which save and leave; after SIGTERM or Ctrl-C they have `grace_s` seconds until they
    write their checkpoint, which nothing but SIGKILL interrupts. To be called from the main thread, as signals are.
    """
    num_procs = count_procs(procs, device, torch.cuda.device_count())
    meeting = AgentRendezvous(node, num_procs, max_restarts)
    command = bound(command, signal.SIGTERM)  # a launcher that is killed leaves no rank behind, not even a fresh one
    spec = WorkerSpec(
        role="rank",
        local_world_size=num_procs,
        entrypoint=command[0],
        # The agent fills in ${local_rank} like a template; a user's dollar signs must stay what they are.
        args=tuple(argument.replace("$", "$$") for argument in command[1:]),
        rdzv_handler=meeting,
        max_restarts=max_restarts,
    )
    agent = _Agent(spec, meeting, _Console(), grace_s)
    with _quiet_agent(), ranks_environment(num_procs, meeting.secret), agent.signals_forwarded():
        try:
            code = _judge(agent, meeting, agent.run())
        except SignalException as stopped:
            # Signals that stay the agent's own, such as SIGHUP: it has passed them on and waited.
            code = 128 + int(stopped.sigval)
        except DistError:
            raise LauncherGone(node) from None
        finally:
            meeting.linger()
            meeting.close()
    for rank, host in meeting.silent.items():
        sys.stderr.write(f"error: the launcher of node {rank} on {host} ended without a word (killed?)\n")
    if meeting.silent:
        # Taking down a store whose clients were killed lasts up to ten seconds, in which nothing happens.
        exit_now(code or EXIT_CRASH)
    return code


def _judge(agent: _Agent, meeting: AgentRendezvous, result: RunResult) -> int:
    """Return the exit code; print what no rank could report."""
    if agent.interrupted:
        return EXIT_INTERRUPT
    if not result.is_failed():
        return 0
    codes = {rank: failure.exitcode for rank, failure in result.failures.items()}
    ended_by = agent.asked_before_start(codes.values())
    if ended_by is not None:
        sys.stderr.write(f"{ended_by.name}: asked to stop before the ranks had begun, so nothing was done\n")
        return 128 + ended_by
    if agent.overdue:
        sys.stderr.write(f"error: the ranks did not leave within {agent.grace_s:g} s and were ended\n")
    else:
        is_reported, places = _read_board(meeting, agent.attempt, list(codes))
        if not is_reported:
            _name_silent_dead(codes, places)
    return next((code for code in _FINAL if code in codes.values()), EXIT_CRASH)


def _read_board(meeting: AgentRendezvous, attempt: int, ranks: list[int]) -> tuple[bool, dict[int, Seen | None]]:
    """Return True if a rank has reported a failure, and the last known places of these ranks."""
    try:
        board = FailureBoard(attempt_store(meeting.store, attempt))
        return board.read() is not None, {rank: board.last_seen(rank) for rank in ranks}
    except DistError:
        return False, {}  # the store is gone with the launcher of node 0


_CAUSES: dict[int, str] = {
    signal.SIGKILL: " (out of memory? see `dmesg`)",
    signal.SIGBUS: " (a file that it had mapped was cut short, or /dev/shm is full)",
}


def causes(number: int) -> str:
    """Return what a signal that ended a rank often means, in brackets; nothing for most."""
    return _CAUSES.get(number, "")


def _name_silent_dead(codes: Mapping[int, int], places: Mapping[int, Seen | None]) -> None:
    """Say which ranks were ended by a signal, where no rank could report anything itself."""
    # The agent ends the remaining ranks with SIGTERM; these are consequences, not causes.
    dead = {rank: -code for rank, code in codes.items() if code < 0 and -code != signal.SIGTERM}
    for rank, number in sorted(dead.items()):
        cause = causes(number)
        seen = places.get(rank)
        name = f"rank {rank}" + (f" on {seen.host}" if seen is not None else "")
        where = f"\n  last seen {seen.where}" if seen is not None else ""
        sys.stderr.write(f"error: {name} was ended by {signal.Signals(number).name}{cause}{where}\n")


class _Agent(LocalElasticAgent):
    """The elastic agent, with signals that reach its ranks."""

    def __init__(self, spec: WorkerSpec, meeting: AgentRendezvous, console: LogsSpecs, grace_s: float) -> None:
        super().__init__(spec, console)
        self._meeting = meeting
        self.interrupted = False
        self.overdue = False
        """True if ranks had to be killed, because they did not leave in time."""
        self.grace_s = grace_s
        self._pids: list[int] = []
        self._pending: list[signal.Signals] = []
        self._deadline: threading.Timer | None = None
        self._saving: dict[int, int] = {}  # heartbeat by rank, of those that were saving at the last look

    def asked_before_start(self, codes: Collection[int]) -> signal.Signals | None:
        """Return the stop signal that ended the ranks before they could handle it; None if that is not why they ended.

        Ranks that have begun save and leave with 0.
        """
        for number in self._pending:
            if codes and all(code == -number for code in codes):
                return number
        return None

    @property
    def attempt(self) -> int:
        return int(self._worker_group.spec.max_restarts - self._remaining_restarts)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        pids: dict[int, Any] = super()._start_workers(worker_group)
        # Starting processes installs the agent's own handlers, which would end all ranks at once.
        self._install()
        self._pids = list(pids.values())
        assert self._pcontext is not None
        end = self._pcontext.close

        def wake_and_end(*args: Any, **named: Any) -> None:
            # A rank that somebody has stopped goes on, and ends as the others do, with its stacks in its log.
            self._send(signal.SIGCONT)
            self._tell_ended(worker_group)
            end(*args, **named)

        setattr(self._pcontext, "close", wake_and_end)  # noqa: B010  the context closes itself when a rank has ended
        for number in self._pending:
            self._send(number)
        return pids

    def _tell_ended(self, worker_group: WorkerGroup) -> None:
        """Tell the ranks that are left which have ended, so that they need not wait for a word from these."""
        ended = [int(worker.global_rank) for worker in worker_group.workers if _has_ended(worker.id)]
        if 0 < len(ended) < len(worker_group.workers):
            with suppress(DistError):
                FailureBoard(attempt_store(self._meeting.store, self.attempt)).tell_ended(ended)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result: RunResult = super()._monitor_workers(worker_group)
        if any(failure.exitcode in _FINAL for failure in result.failures.values()):
            self._no_more_restarts()  # they would end the same way
        return result

    def _exit_barrier(self) -> None:
        # The agent's own waits for five minutes for a launcher that was killed, and listens to no signal.
        self._meeting.finish(_FINISH_S)

    def _no_more_restarts(self) -> None:
        self._worker_group.spec.max_restarts -= self._remaining_restarts
        self._remaining_restarts = 0

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        # Also when it was another machine that had to start again: all agents count the same attempts.
        self._remaining_restarts = worker_group.spec.max_restarts - self._meeting.rounds
        left = self._remaining_restarts
        sys.stderr.write(f"a rank ended early: starting all ranks again ({counted(left, 'more restart')} allowed)\n")
        self._pids = []
        super()._restart_workers(worker_group)

    @contextmanager
    def signals_forwarded(self) -> Iterator[None]:
        numbers = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
        before = {number: signal.getsignal(number) for number in numbers}
        self._install()
        try:
            yield
        finally:
            if self._deadline is not None:
                self._deadline.cancel()
            self._pids = []
            hand_back(before, was_asked=bool(self._pending))

    def _install(self) -> None:
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
            signal.signal(number, self._forward)

    def _forward(self, number: int, frame: FrameType | None) -> None:
        received = signal.Signals(number)
        self._pending.append(received)
        if received != signal.SIGUSR1:
            # Ranks that are told to leave must not be started again.
            self._meeting.leave(received)
            self._no_more_restarts()
            self.interrupted |= received == signal.SIGINT
            if self._deadline is None and self._meeting.size > 1:  # one rank alone cannot say that it is saving
                self._end_after(self.grace_s)
        self._send(received)

    def _end_after(self, seconds: float) -> None:
        self._deadline = threading.Timer(seconds, self._end)
        self._deadline.daemon = True
        self._deadline.start()

    def _end(self) -> None:
        """End the ranks, unless one of them still writes its checkpoint."""
        _, places = _read_board(self._meeting, self.attempt, list(range(self._meeting.size)))
        saving = {rank: seen.beat for rank, seen in places.items() if seen is not None and seen.is_saving}
        if any(beat != self._saving.get(rank) for rank, beat in saving.items()):  # it lives: its number grows
            self._saving = saving
            self._end_after(_SAVING_S)
            return
        self.overdue = True
        self._send(signal.SIGKILL)

    def _send(self, number: signal.Signals) -> None:
        for pid in self._pids:
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue


def _has_ended(pid: int) -> bool:
    """Return True if a process that this one started has ended; its exit code stays for whoever waits for it."""
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return True


class _Console(LogsSpecs):
    """Ranks write to the terminal as they are: no files, no prefixes."""

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        for env in envs.values():
            env["TORCHELASTIC_ERROR_FILE"] = ""
        console = dict.fromkeys(envs, "")
        return LogsDest(stdouts=console, stderrs=console, error_files=dict.fromkeys(envs, os.devnull))

    @property
    def root_log_dir(self) -> str:
        return os.devnull


@contextmanager
def _quiet_agent() -> Iterator[None]:
    """Keep the agent's warnings and its table of failures from the screen: the ranks print the one real message."""
    logger = logging.getLogger("torch.distributed.elastic")
    handler, propagate = logging.NullHandler(), logger.propagate
    logger.addHandler(handler)
    logger.propagate = False
    try:
        yield
    finally:
        logger.propagate = propagate
        logger.removeHandler(handler)


@contextmanager
def ranks_environment(num_procs: int, secret: Secret) -> Iterator[None]:
    """Set the environment of the ranks: the secret, a fair share of threads for all libraries, no C++ warnings."""
    threads = threads_per_rank(len(os.sched_getaffinity(0)), num_procs)
    wanted = {"OMP_NUM_THREADS": str(threads), "TORCH_CPP_LOG_LEVEL": "ERROR"}
    added = {name: value for name, value in wanted.items() if name not in os.environ}
    added[VARIABLE] = secret.value.decode()
    before = os.environ.get(VARIABLE)
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]
        if before is not None:
            os.environ[VARIABLE] = before
