"""Replica of a run in memory, from which the survivors of a lost rank continue, and what the loss of a rank costs."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from paceline.config.settings import TrainConfig
from paceline.core.units import counted
from paceline.observe.records import RanksRecord
from paceline.train.checkpoint.memory import Copies, steps_between
from paceline.train.due import Outcome
from paceline.train.duties import NEVER, Duty, Moment
from paceline.train.position import Position
from paceline.world.link import Link
from paceline.world.parent_process import is_orphan
from paceline.world.rounds import Round, Rounds
from paceline.world.store import poll

if TYPE_CHECKING:
    from paceline.train.run import Run

# How long a process that was asked to stop looks whether it is an orphan.
_ORPHAN_S = 0.2
_FIRST_COPY = 1
"""Steps before the first replica, which measures what one costs."""

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


def is_cut_loose(node: int) -> bool:
    """Return True if the launcher of this process is dead, and is not that of node 0.

    The system's signal comes when the launcher's first thread has ended; its process is gone when the others have, too.
    """
    return node > 0 and poll(is_orphan, _ORPHAN_S)


@dataclass
class Survival(Duty):
    """A round as its run sees it, and the duty to replicate the state of the run in the memory of every rank."""

    rounds: Rounds
    round: Round
    memory: Copies
    has_copies: bool
    newest_step: int = 0
    """Steps that this process had done in the round before."""
    due_at: int = 0
    """Number of steps at which the next replica is due."""
    _copied_at: tuple[int, float] = (0, 0.0)
    _agree_s: float = 0.0
    """Seconds that it took the last time to agree on the next replica."""

    @property
    def is_renewed(self) -> bool:
        """True if replicas are taken at intervals; a rank that is alone takes one only when another process joins."""
        return self.has_copies and len(self.round.members) > 1

    def open(self, run: Run) -> None:
        """Tell the user and the journal which ranks are in the round."""
        num_steps = run.stepper.num_steps
        for line in self.lines(num_steps):
            run.progress.say(line)
        run.log.ranks(self.record(num_steps, run.position.epoch + 1))
        self.start(num_steps)

    def start(self, num_steps: int) -> None:
        """Begin to train after `num_steps` steps."""
        self.due_at = num_steps + _FIRST_COPY if self.is_renewed else NEVER
        self._copied_at = (num_steps, time.monotonic())

    def next_due(self, position: Position) -> int:
        return self.due_at if self.is_renewed else NEVER

    def is_due(self, position: Position, moment: Moment) -> bool:
        return moment.is_together and (moment.regroups or self.next_due(position) <= position.num_steps)

    def needs_sync(self, moment: Moment) -> bool:
        return False

    def attend(self, run: Run, moment: Moment) -> Outcome | None:
        self.replicate(run)  # after all that is due: a round that continues from here does not come to it again
        return Outcome.REGROUP if moment.regroups else None

    def replicate(self, run: Run) -> None:
        """Copy the state of the run into the memory of every rank, if ranks may be lost and each has all of it."""
        if not self.has_copies:
            return
        run.clock.lap("other")
        began = time.monotonic()
        run.log.flush()
        run.keep_first_loss()
        run.checkpoints.remember(run.state(), self.memory)
        self.agree(run.stepper.num_steps, time.monotonic() - began, run.link)
        run.clock.lap("checkpoint")

    def agree(self, num_steps: int, copy_s: float, link: Link) -> None:
        """Agree on when the next replica is due, from the time that this one and the steps before it took."""
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
