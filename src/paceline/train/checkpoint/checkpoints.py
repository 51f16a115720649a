"""Checkpoints of a training run: the one to resume from is found, others are saved as training proceeds."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from paceline.core.cloud.address import address_of
from paceline.core.errors import Conflict, PacelineError
from paceline.core.run_folder import RunFolder
from paceline.train.checkpoint import pieces, reader, state
from paceline.train.checkpoint.contents import RunState, RunValues, collect_run
from paceline.train.checkpoint.format import DIGESTS, CheckpointBroken, by_score, listed, step_of
from paceline.train.checkpoint.memory import Copies
from paceline.train.checkpoint.writer import Checkpointer
from paceline.train.resume import Resume
from paceline.world.link import Link


class NotACheckpoint(PacelineError):
    """A `resume` that names something else than a checkpoint."""

    path: Path
    sentence = "{path} is {kind}"
    hint = "{advice}"

    @property
    def kind(self) -> str:
        return "a run, not a checkpoint" if RunFolder(self.path).is_run else "not a checkpoint"

    @property
    def advice(self) -> str:
        if RunFolder(self.path).is_run:
            return f"add `--out {self.path} --resume auto` to go on with it"
        return "checkpoints are folders like <run>/checkpoints/step-00000120"


class NoSoundCheckpoint(PacelineError):
    """A run all of whose checkpoints are broken: beginning anew in its folder would discard what it has written."""

    folder: Path
    broken: list[CheckpointBroken]
    sentence = "{folder} cannot be resumed, no checkpoint of it is sound:\n{reasons}"
    hint = "bring one back from a copy, or choose another `--out`"

    @property
    def reasons(self) -> str:
        return "\n".join(f"  {error}" for error in self.broken)


class Checkpoints:
    """Checkpoints of one run. Without a run folder nothing is written.

    In this order: `find` the one to resume from, `open` for writing when the run folder is, `save`, and `close`,
    `suspend` or `fail`. All ranks call all of it; all read, and those of `Resume.writers` write.
    """

    def __init__(
        self,
        resume: Resume,
        link: Link,
        say: Callable[[str], None],
        on_written: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_written` is called on the first rank, in the thread that writes, when a checkpoint is on disk."""
        self._resume, self._link, self._say, self._on_written = resume, link, say, on_written
        self._run = RunFolder(resume.config.out) if resume.config.out is not None else None
        self._writer: Checkpointer | None = None
        self._saved: dict[str, Any] | None = None

    # -- the one to resume from --------------------------------------------------------------------------------------

    def find_newest(self, copied: reader.Checkpoint | None) -> reader.Checkpoint | None:
        """Return what to resume from: the replica in memory, or a checkpoint that is newer. All ranks must call it.

        A rank may be lost after a checkpoint was written and before that moment was replicated. Resuming behind a
        checkpoint would drop lines of the journal that it counts on, if all ranks are lost before they reach it again.
        """
        if copied is None:
            return self.find()
        paths = [] if self._run is None or not self._link.is_first else listed(self._run.checkpoints)
        has_newer = any(step_of(path) > copied.step for path in paths)
        if not self._link.broadcast_object(has_newer):
            return copied
        newest = self.find()
        return newest if newest is not None and newest.step > copied.step else copied

    def find(self) -> reader.Checkpoint | None:
        """Return the checkpoint to resume from, None for a new run. All ranks must call it."""
        source = self._resume.source
        checkpoint = read_checkpoint(source) if isinstance(source, Path) else self._newest_sound()
        if checkpoint is not None:
            self._resume.check_ranks(RunValues.of(checkpoint).world_size, self._link.world.size)
        return checkpoint

    def _newest_sound(self) -> reader.Checkpoint | None:
        if self._resume.source is None or self._run is None:
            return None
        newest: Path | None = None
        if self._link.is_first:  # one rank verifies, so that all take the same
            looked = reader.newest(self._run.checkpoints)
            for broken in looked.broken:
                self._say(f"skipped a broken checkpoint: {broken}")
            if looked.checkpoint is None and looked.broken:
                raise NoSoundCheckpoint(self._run.folder, looked.broken)
            newest = None if looked.checkpoint is None else looked.checkpoint.path
        newest = self._link.broadcast_object(newest)
        return None if newest is None else reader.load(newest, verify=False)

    # -- saving ------------------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Prepare to write, when the first rank has made the folder a run."""
        if self._run is None:
            return
        config, rank, writers = self._resume.config, self._link.world.rank, self._resume.writers
        if self._resume.is_in_pieces:
            self._link.barrier()  # the first rank has found the folder as it was: now the others may write there
            address = address_of(self._run.folder)
            if address is not None and not self._run.is_run:
                raise Conflict(
                    f"{address}: every rank writes its pieces of a checkpoint, and each machine has a copy of its own",
                    hint="set PACELINE_COPIES to a folder on a disk that all machines share, or write whole "
                    "checkpoints with `--checkpoint-form full`",
                )
        if rank in writers:
            self._writer = Checkpointer(
                self._run.checkpoints,
                keep_last=config.keep_last,
                keep_best=config.keep_best,
                mode=config.monitor_mode,
                rank=writers.index(rank),
                num_writers=len(writers),
                timeout_s=config.timeout_s,
                on_written=self._on_written,
            )

    def save(self, run: RunState, score: float | None) -> None:
        """Save everything, unless this very moment has been saved already. All ranks must call it."""
        moment = run.position.state()
        if self._run is None or moment == self._saved:
            return
        self._saved = moment
        engine, in_pieces = run.engine, self._resume.is_in_pieces
        takes_part = self._writer is not None or engine.prepared.shards is not None
        with engine.whole_statistics():
            collected = collect_run(run, self._link, in_pieces=in_pieces, takes_part=takes_part)
            if in_pieces:
                if self._writer is not None:
                    self._writer.wait()
                self._link.barrier()  # the folder of the save before has its name
            if self._writer is not None and collected is not None:
                parts, values = collected
                self._writer.save(
                    engine.num_steps, self._own_share(parts, run) if in_pieces else parts, vars(values), score
                )

    def remember(self, run: RunState, memory: Copies) -> None:
        """Replicate everything in the memory of the ranks: of every rank, where each has it whole. All must call it.

        What waits for other ranks comes first: if a rank is lost, the others have the new replica or the one before.
        """
        with run.engine.whole_statistics():
            collected = collect_run(run, self._link, in_pieces=memory.in_pieces, is_replicated=True)
            assert collected is not None, "every rank takes part"
            parts, values = collected
            share = self._own_share(parts, run) if memory.in_pieces else parts
            memory.take(self._link, run.engine.num_steps, share, vars(values))

    def _own_share(self, parts: pieces.Parts, run: RunState) -> pieces.Parts:
        """Return the pieces of this rank, and on the first one of a replica what is not cut into pieces."""
        place = self._resume.place(self._link.world.rank)
        return pieces.share_of_rank(parts, *place, partial(state.is_piece, run.engine))

    @property
    def write_s(self) -> float:
        """Seconds until the last complete checkpoint was on disk; 0 on a rank that writes none."""
        return 0.0 if self._writer is None else self._writer.write_s

    def close(self) -> None:
        """Finish the last save."""
        if self._writer is not None:
            self._writer.close()

    def suspend(self) -> None:
        """Stop writing, for the writers of the next round; a checkpoint that is being written is completed."""
        if self._writer is not None and self._resume.is_in_pieces:
            self._writer.abandon()  # other ranks, which it waits for, may be gone
        else:
            self.close()

    def fail(self) -> None:
        """Stop writing after an error of the run, which matters more than one of the last save."""
        with suppress(PacelineError):
            self.suspend()

    def ends(self) -> tuple[Path | None, Path | None]:
        """Return the newest and the best checkpoint, as they are on disk."""
        paths = [] if self._run is None else listed(self._run.checkpoints)
        scored = by_score(paths, self._resume.config.monitor_mode)
        return next(iter(paths), None), next(iter(scored), None)


def read_checkpoint(path: Path, parts: list[str] | None = None) -> reader.Checkpoint:
    """Read the checkpoint that `resume` names, all parts or some. Raises `NotACheckpoint`."""
    if not (path / DIGESTS).exists():
        raise NotACheckpoint(path)
    return reader.load(path, parts)
