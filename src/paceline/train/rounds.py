"""Survivors of a lost rank continue: training in rounds, each with the ranks that exist then.

A round that breaks, or that another process waits to join, is left as a whole: its run, task, model and process group
are given up, and the remaining ranks open the next one, as a run is resumed. It resumes from the replica in memory
(`checkpoint/memory.py`), or from the newest checkpoint where there is no replica.
"""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Callable, Mapping
from types import FrameType

from torch.distributed import DistError

from paceline.config.compared import shared_settings
from paceline.config.settings import TrainConfig
from paceline.core.run_folder import RunFolder
from paceline.core.terminal import warn
from paceline.train.checkpoint.memory import Copies, MemoryState, save_alone
from paceline.train.checkpoint.mirror import MirroredState
from paceline.train.due import Outcome
from paceline.train.loop import train
from paceline.train.result import Result
from paceline.train.run import Run
from paceline.train.scaling import for_ranks
from paceline.train.survival import Survival, copy_kind, is_cut_loose, needs_all
from paceline.world.consistency import installation
from paceline.world.discover.environment import World
from paceline.world.failure.board import EXIT_CRASH
from paceline.world.failure.together import is_broken_link
from paceline.world.failure.watchdog import exit_now
from paceline.world.link import Link
from paceline.world.rounds import Round, Rounds
from paceline.world.signals import STOP_SIGNALS, handled
from paceline.world.start import from_settings, leave_group
from paceline.world.store import is_refusal


def train_in_rounds(
    config: TrainConfig,
    rounds: Rounds,
    open_round: Callable[[TrainConfig, Link, Survival], Run],
    code: Mapping[str, str],
) -> Result:
    """Train to the end, in as many rounds as it takes. `open_round` makes a new task each time.

    `code` are digests of the task's files: a process that joins with other code, settings or versions is refused.
    """
    facts = shared_settings(config.model_copy(update={"resume": "auto"})) | installation()
    rounds.compare(facts | {f"code of {name}": digest for name, digest in code.items()})
    job = _Job(config, rounds, open_round)
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
        self, config: TrainConfig, rounds: Rounds, open_round: Callable[[TrainConfig, Link, Survival], Run]
    ) -> None:
        self._config, self._rounds, self._open_round = config, rounds, open_round
        self._memory: Copies = MirroredState() if copy_kind(config) == "pieces" else MemoryState()
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
            if result.status != Outcome.REGROUP.status:
                link.close()
                return result
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
        run = self._open_round(config, link, survival)
        if not survival.is_renewed:
            memory.forget()
        self._rounds.follow(run)
        if self._is_asked or round_.stops:
            run.ask_to_stop()
        try:
            return train(run)
        finally:
            self._rounds.follow(None)
            self._is_asked = self._is_asked or run.is_asked_to_stop
            self._newest_step = run.stepper.num_steps

    def _of_round(self, round_: Round) -> TrainConfig:
        """Return the settings that the run began with, whatever the number of ranks is now."""
        config, _ = for_ranks(self._config, round_.first_size)
        is_begun = config.out is not None and RunFolder(config.out).is_run
        if round_.number > 0 and (is_begun or config.resume == "no"):
            config = config.model_copy(update={"resume": "auto"})
        return config
