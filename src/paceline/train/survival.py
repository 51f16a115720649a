"""Survivors of a lost rank go on: training in rounds, each with the ranks that are there.

A round that breaks, or that somebody waits to join, is left as a whole: its trainer, task, model and process group are
given up, and the next one is built by the ranks that are there, as a resumed run is. What it resumes from is the copy
in memory (`checkpoint/memory.py`), or the newest checkpoint where a copy cannot be had.
"""

from __future__ import annotations

import gc
import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Literal

from torch.distributed import DistError

from paceline.config.compared import shared_settings
from paceline.config.settings import TrainConfig
from paceline.core.run_folder import RunFolder
from paceline.core.terminal import warn
from paceline.core.units import counted
from paceline.observe.records import RanksRecord
from paceline.train.checkpoint.memory import Copies, MemoryState, save_alone, steps_between
from paceline.train.checkpoint.mirror import MirroredState
from paceline.train.scaling import for_ranks
from paceline.world.consistency import installation
from paceline.world.discover.environment import World
from paceline.world.failure.board import EXIT_CRASH
from paceline.world.failure.together import is_broken_link
from paceline.world.failure.watchdog import exit_now
from paceline.world.parent_process import is_orphan
from paceline.world.rounds import Round, Rounds
from paceline.world.signals import STOP_SIGNALS, handled
from paceline.world.start import from_settings, leave_group
from paceline.world.store import is_refusal, poll

if TYPE_CHECKING:
    from paceline.train.trainer import Result, Trainer
    from paceline.world.link import Link

# How long a process that was asked to stop looks whether it is an orphan.
_ORPHAN_S = 0.2
_FIRST_COPY = 1
"""Steps before the first copy, which measures what one costs."""


class Regroup(Exception):
    """All ranks leave the round after the same step, because somebody waits to join."""


CopyKind = Literal["whole", "pieces", "averages", "none"]
"""What of the run's state is kept in memory, for survivors to go on from."""


def copy_kind(config: TrainConfig) -> CopyKind:
    """Return what is copied: the whole state on every rank, or where a rank has what no other has, if that is mirrored,
    its pieces on two ranks; with `reduce: param` the state after an average, when it is the same on all.
    """
    if needs_all(config):
        return "none"
    if config.shard != "none":
        return "pieces" if config.mirror else "none"
    if config.reduce == "param":  # while an average is under way ranks are never the same
        return "averages" if config.mirror and config.sync_overlap == 0 else "none"
    return "whole"


def needs_all(config: TrainConfig) -> bool:
    """Return True if a run cannot go on with another number of ranks than it began with."""
    keeps = config.reduce == "param" and config.sync_state == "keep"
    return keeps or config.dataset_distribution != "shard" or config.sync_batchnorm != "no"


def price(config: TrainConfig) -> str:
    """Return a line on what the death of a rank costs."""
    if needs_all(config):
        return (
            "if a rank dies, the others wait for its replacement (`--max-restarts`): these settings depend on the "
            "number of ranks; then all go on from the newest checkpoint"
        )
    kind = copy_kind(config)
    if kind == "whole":
        return "if a rank dies, the others go on from a copy in memory, which is renewed every few steps"
    if kind == "pieces":
        return (
            "if a rank dies, the others go on from copies in memory, of which each rank has its own and another's; if "
            "both are gone, from the newest checkpoint"
        )
    if kind == "averages":
        return "if a rank dies, the others go on from a copy in memory, of one of the last averages"
    why = "weights are in pieces (`--shard`)" if config.shard != "none" else "ranks step apart (`--reduce param`)"
    how = _how_to_mirror(config)
    return f"if a rank dies, the others go back to the newest checkpoint: {why}{how}"


def _how_to_mirror(config: TrainConfig) -> str:
    if config.reduce == "param" and config.sync_overlap > 0:
        return "; `--mirror` needs `--sync-overlap 0`" if config.mirror else ""
    return "; `--mirror` keeps copies in memory"


def _room_for(config: TrainConfig) -> Copies:
    return MirroredState() if copy_kind(config) == "pieces" else MemoryState()


def is_cut_loose(node: int) -> bool:
    """Return True if the launcher of this process is dead, and is not that of node 0.

    The system's signal comes when the launcher's first thread has ended; its process is gone when the others have, too.
    """
    return node > 0 and poll(is_orphan, _ORPHAN_S)


@dataclass
class Survival:
    """A round as its trainer sees it."""

    rounds: Rounds
    round: Round
    memory: Copies
    has_copies: bool
    newest_step: int = 0
    """Steps that this process had done in the round before."""
    due_at: int = 0
    """Number of steps at which the next copy is due."""
    _copied_at: tuple[int, float] = (0, 0.0)
    _agree_s: float = 0.0
    """Seconds that it took the last time to agree on the next copy."""

    @property
    def is_renewed(self) -> bool:
        """True if copies are taken from time to time: a rank that is alone takes one when somebody waits to join."""
        return self.has_copies and len(self.round.members) > 1

    def begin(self, num_steps: int) -> None:
        """Begin to train after `num_steps` steps."""
        self.due_at = num_steps + _FIRST_COPY if self.is_renewed else -1
        self._copied_at = (num_steps, time.monotonic())

    def is_due(self, num_steps: int) -> bool:
        return self.is_renewed and num_steps >= self.due_at

    def next_due(self, others: int) -> int:
        """Return the number of steps at which something is due, the copy or what is due otherwise."""
        return min(others, self.due_at) if self.is_renewed else others

    def agree(self, num_steps: int, copy_s: float, link: Link) -> None:
        """Agree on when the next copy is due, from the time that this one and the steps before it took."""
        steps, began = self._copied_at
        now = time.monotonic()
        copy_s += self._agree_s
        step_s = max(now - began - copy_s, 0.0) / max(num_steps - steps, 1)
        self.due_at = num_steps + int(link.broadcast_object(steps_between(copy_s, step_s)))
        self._copied_at = (num_steps, now)
        self._agree_s = time.monotonic() - now

    def lines(self, num_steps: int) -> list[str]:
        """Return what to tell the user when a round begins."""
        round_, ranks = self.round, len(self.round.members)
        if round_.number == 0:
            return []
        lines = [
            f"rank {rank} on {round_.members[rank].host} joined: {counted(ranks, 'rank')} from step {num_steps} on"
            for rank in round_.joined
        ]
        if round_.lost:
            repeated = max(0, self.newest_step - num_steps)
            again = f", {counted(repeated, 'step')} repeated" if repeated else ""
            lines.append(
                f"going on with {counted(ranks, 'rank')} after step {num_steps}: {self.seconds:.1f} s lost{again}"
            )
        if round_.stops:
            lines.append(f"{counted(ranks, 'rank')} left, fewer than `--min-ranks`: the run is saved and ends")
        return lines

    def is_cut_loose(self) -> bool:
        """Return True if the launcher of this process is dead, and the run goes on: it is not that of node 0.

        All that its death means is that its ranks are lost.
        """
        return is_cut_loose(self.rounds.node)

    @property
    def seconds(self) -> float:
        """Seconds from the end of the round before until now."""
        return max(0.0, time.time() - self.round.since)

    def record(self, num_steps: int, epoch: int) -> RanksRecord:
        """Return the line of the journal with which a round begins."""
        return RanksRecord(
            step=max(0, num_steps - 1),
            epoch=epoch,
            ranks=len(self.round.members),
            time=round(time.time(), 3),
            hosts=[member.host for member in self.round.members],
            lost=[{"rank": lost.rank, "host": lost.host, "why": lost.why} for lost in self.round.lost],
            joined=[{"rank": rank, "host": self.round.members[rank].host} for rank in self.round.joined],
            seconds=round(self.seconds, 3) if self.round.number else 0.0,
            repeated=max(0, self.newest_step - num_steps) if self.round.number else 0,
        )


def train_in_rounds(
    config: TrainConfig,
    rounds: Rounds,
    make_trainer: Callable[[TrainConfig, Link, Survival], Trainer],
    code: Mapping[str, str],
) -> Result:
    """Train to the end, in as many rounds as it takes. `make_trainer` builds a new task each time.

    `code` are digests of the task's files: a process that joins with other code, settings or versions is refused.
    """
    facts = shared_settings(config.model_copy(update={"resume": "auto"})) | installation()
    rounds.compare(facts | {f"code of {name}": digest for name, digest in code.items()})
    job = _Job(config, rounds, make_trainer)
    gc.freeze()  # modules, which are many: the collections between rounds need not look at them
    result: Result | None = None
    with rounds, handled(STOP_SIGNALS, job.note_stop, lambda: result is not None and result.status == "stopped"):
        while True:
            result = job.train_round()
            if result is not None:
                return result
            gc.collect()  # models and optimizers of the round before, before the next ones are made


class _Job:
    """This process, from round to round."""

    def __init__(
        self, config: TrainConfig, rounds: Rounds, make_trainer: Callable[[TrainConfig, Link, Survival], Trainer]
    ) -> None:
        self._config, self._rounds, self._make_trainer = config, rounds, make_trainer
        self._memory = _room_for(config)
        self._newest_step = 0
        self._is_asked = False

    def note_stop(self, number: int, frame: FrameType | None) -> None:
        """Remember a stop signal that comes between rounds."""
        if is_cut_loose(self._rounds.node):
            os._exit(EXIT_CRASH)  # see `Survival.is_cut_loose`
        self._is_asked = self._rounds.is_leaving = True
        if number == signal.SIGINT and self._rounds.round is None:
            raise KeyboardInterrupt

    def train_round(self) -> Result | None:
        """Train in the next round; return the result, or None if the round ended before the run."""
        round_, world = self._next()
        link: Link | None = None
        try:
            config = self._of_round(round_)
            link = from_settings(config, world, self._rounds.check)
            result = self._train(config, round_, link)
            link.close()
            return result
        except Regroup:
            pass
        except Exception as error:
            if not is_broken_link(error):
                raise
        if link is not None:
            link.abandon()
        else:
            leave_group()
        return None

    def _next(self) -> tuple[Round, World]:
        """Leave the round and wait for the next one. Without the launcher of node 0 there is none: save, and end."""
        holds = None if needs_all(self._config) else self._memory.step
        try:
            return self._rounds.next(holds, needs_all=needs_all(self._config))
        except DistError as error:
            if self._rounds.round is None:
                warn("the launcher of node 0 is gone, before this process had joined\n")
                exit_now(EXIT_CRASH)
            saved = save_alone(self._memory, self._config, is_certain=is_refusal(error))
            if saved is not None:
                warn(f"the launcher of node 0 is gone: saved after step {saved}; `--resume auto` goes on\n")
            exit_now(EXIT_CRASH)

    def _train(self, config: TrainConfig, round_: Round, link: Link) -> Result:
        memory = self._memory
        copies = copy_kind(config) != "none"
        if not (copies and round_.holders):
            memory.forget()
        memory.share(link, round_.holders if copies else ())
        survival = Survival(self._rounds, round_, memory, copies, self._newest_step)
        trainer = self._make_trainer(config, link, survival)
        if not survival.is_renewed:
            memory.forget()
        self._rounds.follow(trainer)
        if self._is_asked or round_.stops:
            trainer.ask_to_stop()
        try:
            return trainer.fit()
        finally:
            self._rounds.follow(None)
            self._is_asked = self._is_asked or trainer.is_asked_to_stop
            self._newest_step = trainer.stepper.num_steps

    def _of_round(self, round_: Round) -> TrainConfig:
        """Return the settings that the run began with, whatever the number of ranks is now."""
        config, _ = for_ranks(self._config, round_.first_size)
        is_begun = config.out is not None and RunFolder(config.out).is_run
        if round_.number > 0 and (is_begun or config.resume == "no"):
            config = config.model_copy(update={"resume": "auto"})
        return config
