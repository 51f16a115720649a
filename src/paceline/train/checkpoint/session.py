"""Session of a training process in its run folder: what is there is read, then the folder is locked and recorded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext, suppress
from pathlib import Path
from typing import Any

from paceline.config.settings import TrainConfig
from paceline.core.cloud.run_copy import RunCopy, bring_run
from paceline.core.cloud.uploader import Uploader
from paceline.core.disk import CannotWrite
from paceline.core.errors import PacelineError
from paceline.core.plugins import Plugin
from paceline.core.provenance import start_record
from paceline.core.run_folder import RunFolder, RunListener, RunRecord
from paceline.core.secrets import masked_values
from paceline.train.checkpoint.checkpoints import read_checkpoint
from paceline.train.resume import Stored, decide
from paceline.world.consistency import check_same
from paceline.world.link import Link
from paceline.world.machines import machines_of


class RunSession:
    """One start of a run: its folder, lock, record and status. Without `out` nothing is written.

    Construction reads what is there and decides how to resume it (`resume`); it writes nothing. Then `open`, and in the
    end `close` and `deliver`, or `suspend`, or `fail`. All ranks call all of it; the first one writes. A run at an
    address is trained in its copy on this machine, which the first rank's listener uploads.
    """

    def __init__(
        self,
        config: TrainConfig,
        link: Link,
        say: Callable[[str], None],
        task: str,
        *,
        plugins: Sequence[Plugin] = (),
        is_reopened: bool = False,
    ) -> None:
        """`is_reopened`: an earlier session of this launch, in this process or a lost one, has opened the folder."""
        self._link, self._task, self._plugins, self._is_reopened = link, task, plugins, is_reopened
        self._run = RunFolder(config.out) if config.out is not None else None
        copy = RunCopy.of(config.out)
        self.address = None if copy is None else copy.address
        """Address of the run, if its folder is the copy of one."""
        if not (is_reopened and link.world.nodes == 1):
            _bring_copies(config, link, copy, say)
        self._listener: RunListener = Uploader(copy, say) if copy is not None and link.is_first else RunListener()
        self._stored = _read_stored(config, self._run, is_first=link.is_first)
        machines = [list(range(link.world.size))] if link.has_group else None
        if link.has_group and config.shard == "node":
            machines = machines_of(link)
        self.resume = decide(self._stored, config, link.world, machines=machines, plugins=plugins)
        check_same(link, self.resume.facts)
        for line in self.resume.remarks:
            say(line)
        self.choice = self.resume.choice
        """Choice of the autotuner, as recorded."""
        self._starts = list(self.resume.starts)
        self._is_open = False

    @property
    def metrics_file(self) -> Path | None:
        """Journal of the run, on the rank that writes it."""
        return self._run.metrics if self._run is not None and self._link.is_first else None

    @property
    def rank_log_file(self) -> Path | None:
        """Log of this rank; None where there is only one."""
        if self._run is None or self._link.world.size == 1 or not self.resume.config.rank_logs:
            return None
        return self._run.logs / f"rank-{self._link.world.rank}.log"

    def open(self) -> None:
        """Make the folder a run, or leave nothing behind. Called when everything is built, so that a mistake before
        leaves nothing behind, either."""
        # Every rank has read the folder before the first one writes to it.
        self._link.barrier()
        if self._run is not None and self._link.is_first:
            self._lock_and_record(self._run)
        self._is_open = self._run is not None

    def _lock_and_record(self, run: RunFolder) -> None:
        with ExitStack() as undo:
            run.lock()
            undo.callback(run.unlock)
            run.check_unchanged(self._stored.own, may_exist=self.resume.config.resume != "no")
            with nullcontext() if self._is_reopened else self._listener.starting():
                if not self._is_reopened or not self._starts:
                    self._starts.append(start_record(self._plugins))
                self._write("running")
                undo.callback(self._write_failed)
            undo.pop_all()

    def on_written(self) -> None:
        """Tell the listener that a checkpoint is on disk; any thread may call it."""
        self._listener.on_written()

    def keep_choice(self, choice: dict[str, Any] | None) -> None:
        """Record the choice of the autotuner at once: a resumed run takes the same."""
        if choice != self.choice:
            self.choice = choice
            self._write("running")

    def suspend(self) -> None:
        """Unlock the folder for the first rank of the next round."""
        if self._is_open:
            self._is_open = False
            self._listener.abandon()
            self._unlock()

    def fail(self, status: str = "failed") -> None:
        """Record that the run ended with an error, or diverged, and unlock its folder. Checkpoints stay as they are."""
        if self._is_open:
            self._is_open = False
            self._write_failed(status)
            self._listener.close(is_patient=False)
            self._unlock()

    def close(self, status: str) -> None:
        """Record how the run ended, and unlock its folder."""
        self._write(status)
        self._unlock()
        self._is_open = False

    def deliver(self) -> bool:
        """Send what is left to the run's address, when everything is written; return False if that failed.

        All ranks must call it.
        """
        return self.address is None or bool(self._link.broadcast_object(self._listener.close()))

    def _write_failed(self, status: str = "failed") -> None:
        with suppress(CannotWrite):  # what made the run fail matters more, and may be the same
            self._write(status)

    def _write(self, status: str) -> None:
        if self._run is not None and self._link.is_first:
            settings = masked_values(self.resume.config.model_dump(mode="json"))
            self._run.write(RunRecord(settings, self._task, status, self.resume.grains, self.choice, self._starts))

    def _unlock(self) -> None:
        if self._run is not None:
            self._run.unlock()


def _read_stored(config: TrainConfig, run: RunFolder | None, *, is_first: bool) -> Stored:
    """Read the record of the run to resume, and where it has none, the state of the checkpoint that `resume` names."""
    if run is not None:
        if is_first:
            run.check_free()
        own = run.check(may_exist=config.resume != "no")
        if own is not None:
            return Stored(own)
    if not isinstance(config.resume, Path):
        return Stored()
    around = RunFolder(config.resume.resolve().parent.parent)  # <another run>/checkpoints/<checkpoint>
    other = around.check(may_exist=True) if around.is_run else None
    return Stored(other=other, checkpoint=read_checkpoint(config.resume, []).state if other is None else None)


def _bring_copies(config: TrainConfig, link: Link, copy: RunCopy | None, say: Callable[[str], None]) -> None:
    """Bring runs at addresses to every machine: first the first rank, which also sends what an earlier start could not,
    then one rank of each other machine, as ranks of a machine share its copy. All ranks must call it."""
    others = [config.resume.parent.parent] if isinstance(config.resume, Path) else []
    runs = [config.out, *others] if config.out is not None else others
    if not any(RunCopy.of(run) for run in runs):
        return
    problem: PacelineError | None = None
    if link.is_first:
        try:
            for run in runs:
                if copy is None or run != copy.folder:
                    bring_run(run)
            if copy is not None:
                for line in copy.pull():
                    say(line)
                if config.resume != "no" and RunFolder(copy.folder).is_run:
                    copy.send()
        except PacelineError as error:
            problem = error
    problem = link.broadcast_object(problem)
    if problem is not None:
        raise problem
    if link.world.node_rank > 0 and link.world.local_rank == 0:
        for run in runs:
            bring_run(run)
    link.barrier()
