"""Checkpoint manager: the run folder of a trainer, opened once, resumed if asked, saved as training goes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from paceline.config.settings import TrainConfig
from paceline.core.cloud.run_copy import RunCopy, bring_run
from paceline.core.cloud.uploader import Uploader
from paceline.core.disk import CannotWrite
from paceline.core.errors import PacelineError
from paceline.core.language import said
from paceline.core.plugins import Plugin, changes
from paceline.core.provenance import start_record
from paceline.core.run_folder import RunFolder, RunRecord
from paceline.core.secrets import masked_values
from paceline.core.units import counted
from paceline.observe.progress import Progress
from paceline.parallel.gather import gather_tensors
from paceline.train.checkpoint import pieces, reader, state
from paceline.train.checkpoint.format import DIGESTS, STATE, CheckpointBroken, by_score, listed, step_of
from paceline.train.checkpoint.memory import Copies, same_on_all
from paceline.train.checkpoint.writer import Checkpointer
from paceline.train.position import Position, SettingsChanged, check_batch, choose_grains, settings_changed
from paceline.train.stepper import Stepper
from paceline.train.task import Describes, Task, state_of
from paceline.world.consistency import check_same
from paceline.world.link import Link
from paceline.world.machines import machines_of


class NotACheckpoint(PacelineError):
    """A `resume` that names something else than a checkpoint."""

    path: Path
    sentence = "{path} is {kind}"
    hint = "{advice}"

    @property
    def kind(self) -> str:
        return said("a run, not a checkpoint") if RunFolder(self.path).is_run else said("not a checkpoint")

    @property
    def advice(self) -> str:
        if RunFolder(self.path).is_run:
            return said("add `--out {path} --resume auto` to go on with it").format(path=self.path)
        return said("checkpoints are folders like <run>/checkpoints/step-00000120")


class NoSoundCheckpoint(PacelineError):
    """A run all of whose checkpoints are broken: beginning anew in its folder would discard what it has written."""

    folder: Path
    broken: list[CheckpointBroken]
    sentence = "{folder} cannot be resumed, no checkpoint of it is sound:\n{reasons}"
    hint = "bring one back from a copy, or choose another `--out`"

    @property
    def reasons(self) -> str:
        return "\n".join(f"  {error}" for error in self.broken)


class CopyNotShared(PacelineError):
    """Ranks on several machines that each write pieces of one checkpoint, into copies of their own."""

    address: str
    copy: Path
    sentence = "{address}: every rank writes its pieces of a checkpoint, and the machines have each a copy of their own"
    hint = (
        "set PACELINE_COPIES to a folder on a disk that all machines share, or write whole checkpoints with "
        "`--checkpoint-form whole`"
    )


class CheckpointManager:
    """Keeps a run: its record, its lock and its checkpoints. Without `out` nothing is written.

    In this order: `find` the checkpoint to resume from, `open` the folder, `save` along the way, and `close` and
    `deliver`, or `mark_failed`. All ranks call all of it; all read, the first one writes. A run at an address is
    trained in its copy, which the first rank sends there.
    """

    def __init__(
        self,
        config: TrainConfig,
        link: Link,
        progress: Progress,
        task: str,
        *,
        goes_on: bool = False,
        plugins: Sequence[Plugin] = (),
    ) -> None:
        """`goes_on`: this process, or one that it goes on for, has opened the folder already."""
        self._config, self._link, self._progress, self._task = config, link, progress, task
        self._asked_for_sums = config.sums is not None
        self._goes_on, self._plugins = goes_on, plugins
        self._run = RunFolder(config.out) if config.out is not None else None
        self._copy = RunCopy.of(config.out)
        self._uploader: Uploader | None = None
        self._writer: Checkpointer | None = None
        self._is_open = False
        self._bring_copy()
        self._saved: dict[str, Any] | None = None
        self._before: RunRecord | None = None  # the run in the folder, when this start began
        stored = self._check()
        is_own = self._before is not None
        self._starts: list[dict[str, Any]] = [] if self._before is None else list(self._before.starts)
        # Kept in the record of a resumed run from its first moment on: it may end before the autotuner is asked.
        may_choose = config.level in ("auto", 4)
        self._choice = stored.choice if stored is not None and is_own and may_choose else None
        before = stored.grains if stored is not None else None
        may_regrain = config.regrain or (config.allow_change and config.grains is not None)
        if stored is None:
            check_batch(config, link.world.size)
        self.grains = choose_grains(config.grains, before, link.world.size, may_regrain)
        self._check_ranks(stored)
        self._settle_sums(None if stored is None else stored.settings)
        self._is_in_pieces = link.has_group and config.shard != "none" and config.checkpoint_form == "sharded"
        self._writers = self._choose_writers()
        """Ranks that write a checkpoint."""
        self._say_what_differs(stored)
        self._may_resume = stored is not None

    def _choose_writers(self) -> list[int]:
        """Return the first rank; of shards, those of one machine, which has all pieces: each writes what it has."""
        if not self._is_in_pieces:
            return [0]
        world = range(self._link.world.size)
        return list(machines_of(self._link)[0] if self._config.shard == "node" else world)

    def _say_what_differs(self, stored: RunRecord | None) -> None:
        """Say what is not as it was when the run in the folder was begun, or ended."""
        for line in changes([] if stored is None else stored.plugins, self._plugins):
            self._progress.say(line)
        if stored is None:
            return
        if stored.status == "diverged":
            self._progress.say(
                "this run had diverged: it goes on from what it saved before, if anything; the same settings diverge "
                "again, others need `--allow-change`"
            )
        if stored.grains not in (None, self.grains):
            self._progress.say(
                f"{counted(self.grains, 'grain')} instead of {stored.grains}: numerics change from here on"
            )

    def _settle_sums(self, before: Mapping[str, Any] | None) -> None:
        """Decide how sums are added: as asked, else as the run began (fast before there was a choice), else exact."""
        if self._config.sums is None:
            began: Any = "exact" if before is None else before.get("sums") or "fast"
            self._config = self._config.model_copy(update={"sums": began})

    @property
    def sums(self) -> Literal["exact", "fast"]:
        """How this run adds."""
        return self._config.sums or "exact"

    def _bring_copy(self) -> None:
        """Bring what is at addresses to every machine: the first rank decides and sends what was left, then the others.

        Ranks of one machine share its copy.
        """
        config, link = self._config, self._link
        runs = [config.out] if config.out is not None else []
        runs += [config.resume.parent.parent] if isinstance(config.resume, Path) else []
        if not any(RunCopy.of(run) for run in runs) or (self._goes_on and link.world.nodes == 1):
            return
        problem: PacelineError | None = None
        if link.is_first:
            try:
                self._bring_and_catch_up(runs)
            except PacelineError as error:
                problem = error
        problem = link.broadcast_object(problem)
        if problem is not None:
            raise problem
        if link.world.node_rank > 0 and link.world.local_rank == 0:
            for run in runs:
                bring_run(run)
        link.barrier()

    def _bring_and_catch_up(self, runs: list[Path]) -> None:
        for run in runs:
            bring_run(run) if self._copy is None or run != self._copy.folder else None
        if self._copy is not None:
            for line in self._copy.pull():
                self._progress.say(line)
            if self._config.resume != "no" and self._run is not None and self._run.is_run:
                self._copy.send()  # what an earlier start could not send

    @property
    def address(self) -> str | None:
        """Address of the run, if its folder is the copy of one."""
        return None if self._copy is None else self._copy.address

    @property
    def metrics_file(self) -> Path | None:
        return self._run.metrics if self._run is not None and self._link.is_first else None

    @property
    def rank_log_file(self) -> Path | None:
        """Log of this rank; None where there is only one."""
        if self._run is None or self._link.world.size == 1 or not self._config.rank_logs:
            return None
        return self._run.logs / f"rank-{self._link.world.rank}.log"

    def open(self) -> None:
        """Make the folder a run. Called when everything is set up, so that a mistake before leaves nothing behind."""
        # Every rank has looked at the folder before the first one writes to it.
        self._link.barrier()
        if self._run is None:
            return
        with ExitStack() as undo:
            if self._link.is_first:
                self._run.lock()
                undo.callback(self._unlock)
                self._run.check_unchanged(self._before, may_exist=self._config.resume != "no")
                # A store that cannot be written to ends a start, but no run.
                begins = self._copy is not None and not self._goes_on
                with self._copy.starting() if self._copy is not None and begins else nullcontext():
                    if not self._goes_on or not self._starts:
                        self._starts.append(start_record(self._plugins))
                    self._write("running")
                    undo.callback(self._write_failed)
                    if self._copy is not None and begins:
                        self._copy.send_record()
                if self._copy is not None:
                    self._uploader = Uploader(self._copy, self._progress.say)
            if self._is_in_pieces:
                self._link.barrier()  # the first rank has found the folder as it was: now the others may write there
                if self._copy is not None and not self._run.is_run:
                    raise CopyNotShared(self._copy.address, self._copy.folder)
            if self._link.world.rank in self._writers:
                self._writer = self._checkpointer(self._run)
            undo.pop_all()
        self._is_open = True

    def _checkpointer(self, run: RunFolder) -> Checkpointer:
        return Checkpointer(
            run.checkpoints,
            keep_last=self._config.keep_last,
            keep_best=self._config.keep_best,
            mode=self._config.monitor_mode,
            rank=self._writers.index(self._link.world.rank),
            num_writers=len(self._writers),
            timeout_s=self._config.timeout_s,
            on_written=self._ask_to_send,
        )

    def _ask_to_send(self) -> None:
        if self._uploader is not None:
            self._uploader.ask()

    def keep_choice(self, choice: dict[str, Any] | None) -> None:
        """Record what the autotuner has chosen: a resumed run takes the same. Written at once."""
        if choice != self._choice:
            self._choice = choice
            self._write("running")

    def save(
        self,
        engine: Stepper,
        position: Position,
        task: Task,
        score: float | None,
        so_far: Callable[[], dict[str, Any] | None],
        *,
        few_shapes: bool = False,
        more: Callable[[], Mapping[str, Mapping[str, Tensor]]] = dict,
    ) -> None:
        """Save everything, unless this very moment has been saved already. All ranks must call it.

        `so_far` returns the sums of the epoch, as plain values; `few_shapes` says how batches are padded; `more`
        returns further parts, on all ranks.
        """
        moment = position.state()
        if self._run is None or moment == self._saved:
            return
        self._saved = moment
        engine.sync()
        engine.prepared.statistics.total()
        own_tensors = state.collect_own(engine)  # of ranks that step apart
        ranks = gather_tensors(self._link, own_tensors) if own_tensors else []
        own_shares = engine.prepared.statistics.state()
        shares = gather_tensors(self._link, own_shares) if own_shares else []
        sums = so_far()
        further = more()
        task_state = state_of(task)  # on all ranks: what a task has may be spread over them
        takes_part = self._writer is not None or engine.prepared.shards is not None
        collected = state.collect(engine, self._is_in_pieces) if takes_part else None
        if self._is_in_pieces:
            if self._writer is not None:
                self._writer.wait()
            self._link.barrier()  # the folder of the save before has its name
        if self._writer is not None and collected is not None:
            whole, values = collected
            parts: dict[str, Mapping[str, Tensor]] = dict(whole)
            parts |= {f"{state.RANK}{number}": tensors for number, tensors in enumerate(ranks)}
            if shares:
                parts[state.STATISTICS] = state.pack_shares(shares)
            if task_state:
                parts["task"] = task_state
            parts |= further
            record = self._record(engine, values, moment, sums, few_shapes)
            record["about"] = task.about() if isinstance(task, Describes) else {}
            if self._is_in_pieces:
                place = self._writers.index(self._link.world.rank), len(self._writers)
                parts = pieces.share_of_rank(parts, *place, partial(state.is_piece, engine))
            self._writer.save(engine.num_steps, parts, record, score)
        engine.prepared.statistics.share()

    @property
    def write_s(self) -> float:
        """Seconds until the last checkpoint that is whole was on disk; 0 on a rank that writes none."""
        return 0.0 if self._writer is None else self._writer.write_s

    def _record(
        self, engine: Stepper, values: dict[str, Any], moment: dict[str, Any], sums: Any, few_shapes: bool
    ) -> dict[str, Any]:
        return {
            "engine": values | {"batches": [moment["epoch"], moment["step"], 0]},
            "position": moment,
            "so_far": sums,
            "precision": engine.precision.name,
            "world_size": self._link.world.size,
            "choice": self._choice,
            "few_shapes": few_shapes,
            "sums": self.sums,
        }

    def remember(
        self,
        memory: Copies,
        engine: Stepper,
        position: Position,
        task: Task,
        so_far: Callable[[], dict[str, Any] | None],
        *,
        few_shapes: bool = False,
        more: Callable[[], Mapping[str, Mapping[str, Tensor]]] = dict,
    ) -> None:
        """Copy everything into the memory of the ranks: of every rank, where each has it whole. All must call it.

        What waits for other ranks comes first: a rank that is lost leaves the others the new copy, or the one before.
        """
        engine.prepared.statistics.total()
        try:
            sums = so_far()
            task_state = same_on_all(self._link, state_of(task))
            own_tensors = state.collect_own(engine)  # of ranks that step apart, and are together now
            gathered = gather_tensors(self._link, own_tensors) if own_tensors else []
            numbers = range(self._link.world.size if own_tensors else 0)
            ranks = [same_on_all(self._link, gathered[number] if gathered else {}) for number in numbers]
            collected, values = state.collect(engine, in_pieces=memory.in_pieces)
            parts: dict[str, Mapping[str, Tensor]] = dict(collected)
            parts |= {f"{state.RANK}{number}": tensors for number, tensors in enumerate(ranks)}
            if task_state:
                parts["task"] = task_state
            further = more()
            for part in self._link.broadcast_object(list(further)):
                parts[part] = same_on_all(self._link, further.get(part, {}))
            record = self._record(engine, values, position.state(), sums, few_shapes)
            record["about"] = task.about() if isinstance(task, Describes) else {}
            if memory.in_pieces:
                parts = pieces.share_of_rank(parts, *self._place_of_pieces(), partial(state.is_piece, engine))
            memory.take(self._link, engine.num_steps, parts, record)
        finally:
            engine.prepared.statistics.share()

    def _place_of_pieces(self) -> tuple[int, int]:
        """Return which pieces this rank has: its place among the ranks that share a model, and their number."""
        rank, size = self._link.world.rank, self._link.world.size
        per_machine = self._config.shard == "node" and self._link.has_group
        group = next(ranks for ranks in machines_of(self._link) if rank in ranks) if per_machine else list(range(size))
        return group.index(rank), len(group)

    def suspend(self) -> None:
        """Let the folder go, for the first rank of the next round; a checkpoint that is being written is completed."""
        if not self._is_open:
            return
        self._is_open = False
        if self._writer is not None and self._is_in_pieces:
            self._writer.abandon()  # other ranks, which it waits for, may be gone
        elif self._writer is not None:
            self._writer.close()
        if self._uploader is not None:
            self._uploader.abandon()  # the next round sends the rest
        self._unlock()

    def mark_failed(self, status: str = "failed") -> None:
        """Record that the run ended with an error, or diverged, and let others train in its folder.

        Checkpoints stay as they are; one that is being written is completed.
        """
        if not self._is_open:
            return
        self._is_open = False
        if self._writer is not None and self._is_in_pieces:
            self._writer.abandon()  # other ranks, which it waits for, may be gone
        elif self._writer is not None:
            with suppress(PacelineError):  # what made the run fail matters more
                self._writer.close()
        self._write_failed(status)
        if self._uploader is not None:
            self._uploader.close(is_patient=False)
        self._unlock()

    def _write_failed(self, status: str = "failed") -> None:
        with suppress(CannotWrite):  # what made the run fail matters more, and may be the same
            self._write(status)

    def close(self, status: str) -> None:
        """Finish the last save, record how the run ended, and let others train in its folder."""
        if self._writer is not None:
            self._writer.close()
        self._write(status)
        self._unlock()
        self._is_open = False

    def deliver(self) -> bool:
        """Send what is left to the run's address, when everything is written; return False if that failed.

        All ranks must call it.
        """
        if self._copy is None:
            return True
        return bool(self._link.broadcast_object(self._uploader.close() if self._uploader is not None else True))

    def ends(self) -> tuple[Path | None, Path | None]:
        """Return the newest and the best checkpoint, as they are on disk."""
        paths = [] if self._run is None else listed(self._run.checkpoints)
        scored = by_score(paths, self._config.monitor_mode)
        return next(iter(paths), None), next(iter(scored), None)

    def _unlock(self) -> None:
        if self._run is not None:
            self._run.unlock()

    def _check(self) -> RunRecord | None:
        """Return the record of the run to resume, None for a new one; refuses settings that change its result."""
        resume = self._config.resume
        stored = None
        if self._run is not None:
            if self._link.is_first:
                self._run.check_free()
            self._before = stored = self._run.check(may_exist=resume != "no")
        if stored is None and isinstance(resume, Path):
            # From <another run>/checkpoints/<checkpoint>: what that run was made with counts.
            other = resume.resolve().parent.parent
            stored = RunFolder(other).check(may_exist=True) if RunFolder(other).is_run else None
        if stored is not None and not self._config.allow_change:
            changes = settings_changed({**stored.settings, "grains": stored.grains}, self._config)
            if changes:
                raise SettingsChanged(changes)
        return stored

    def _check_ranks(self, stored: RunRecord | None) -> None:
        """Check that all ranks see the same run: a folder on a disk of each machine's own is found by one of them."""
        found = (
            "none"
            if stored is None
            else (f"one with {counted(stored.grains or 0, 'grain')}, {counted(len(stored.starts), 'start')} so far")
        )
        versions = {plugin.title.partition(" of ")[0]: plugin.origin for plugin in self._plugins}
        check_same(self._link, {f"run to resume in {self._config.out}": found, "grains": self.grains, **versions})

    def check_precision(self, checkpoint: reader.Checkpoint, precision: str) -> None:
        """Refuse another precision than that of the run: `level: auto` may mean something else on another device."""
        before = checkpoint.state.get("precision")
        if before not in (None, precision) and not self._config.allow_change:
            raise SettingsChanged({"precision on this device": (before, precision)})

    def find_newest(self, copied: reader.Checkpoint | None) -> reader.Checkpoint | None:
        """Return what to go on from: the copy in memory, or a checkpoint that is newer. All ranks must call it.

        A rank may be lost after a checkpoint was written and before that moment was copied. To go back behind a
        checkpoint would drop lines of the journal that it counts on, if all ranks are lost before they are there again.
        """
        if copied is None:
            return self.find()
        paths = [] if self._run is None or not self._link.is_first else listed(self._run.checkpoints)
        has_newer = any(step_of(path) > copied.step for path in paths)
        if not self._link.broadcast_object(has_newer):
            return copied
        found = self.find()
        return found if found is not None and found.step > copied.step else copied

    def find(self) -> reader.Checkpoint | None:
        """Return the checkpoint to resume from, None for a new run. All ranks must call it."""
        checkpoint = self._find()
        if checkpoint is not None:
            _check_complete(checkpoint)
        if checkpoint is not None and not self._may_resume and not self._asked_for_sums:
            # A checkpoint without its run, which alone says how it was made.
            self._config = self._config.model_copy(update={"sums": checkpoint.state.get("sums") or "fast"})
        config, ranks = self._config, self._link.world.size
        if checkpoint is None or config.allow_change or config.dataset_distribution == "shard":
            return checkpoint
        # With `random_seed_offset` the ranks themselves decide which sample comes when.
        if checkpoint.state["world_size"] != ranks:
            raise SettingsChanged({"ranks (with random_seed_offset)": (checkpoint.state["world_size"], ranks)})
        return checkpoint

    def _find(self) -> reader.Checkpoint | None:
        resume = self._config.resume
        if isinstance(resume, Path):
            if not (resume / DIGESTS).exists():
                raise NotACheckpoint(resume)
            return reader.load(resume)
        if resume == "no" or not self._may_resume or self._run is None:
            return None
        chosen: Path | None = None
        if self._link.is_first:  # one rank looks and verifies, so that all take the same
            looked = reader.newest(self._run.checkpoints)
            for broken in looked.broken:
                self._progress.say(f"skipped a broken checkpoint: {broken}")
            if looked.checkpoint is None and looked.broken:
                raise NoSoundCheckpoint(self._run.folder, looked.broken)
            chosen = None if looked.checkpoint is None else looked.checkpoint.path
        chosen = self._link.broadcast_object(chosen)
        return None if chosen is None else reader.load(chosen, verify=False)

    def _write(self, status: str) -> None:
        if self._run is not None and self._link.is_first:
            settings = masked_values(self._config.model_dump(mode="json"))
            self._run.write(RunRecord(settings, self._task, status, self.grains, self._choice, self._starts))


_PARTS = frozenset({"model", "optimizer", "scale"})
_VALUES = frozenset({"engine", "position", "world_size"})


def _check_complete(checkpoint: reader.Checkpoint) -> None:
    """Raise `CheckpointBroken` for a sound checkpoint that is not one of a training run, such as one of an own loop."""
    missing = sorted(_PARTS - checkpoint.parts.keys()) + sorted(_VALUES - checkpoint.state.keys())
    if missing:
        raise CheckpointBroken(checkpoint.path, STATE, f"is not of a training run: it has no {', '.join(missing)}")
