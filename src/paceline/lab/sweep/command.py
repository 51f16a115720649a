"""`paceline sweep TASK --search lr=1e-5:1e-1:log ...`: the words of `paceline train`, for many trials."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Annotated, Literal

from pydantic import Field

from paceline.config.load import load
from paceline.config.mode import ModeCommand
from paceline.config.settings import TrainConfig
from paceline.config.train_command import POSITIONAL, take_task, task_settings
from paceline.core.terminal import warn
from paceline.lab.trial_options import NO_BENCHMARK, refuse_launcher, with_settings
from paceline.world.discover.environment import discover

PROG = "paceline sweep"
EXIT_INTERRUPT = 130  # as in world/failure/board.py, which needs torch


class SweepCommand(ModeCommand):
    """Which task, what to search, and how many trials."""

    task: str
    """A recipe's name, or `path/to/file.py:ClassName`."""
    search: tuple[str, ...] = ()
    """Settings and their values: `lr=1e-5:1e-1:log` (a range), `hidden=16:256` (whole numbers), `optimizer=adamw,lamb`
    (choices)."""
    trials: Annotated[int, Field(gt=0)] = 20
    """Trials in all, those of a sweep that is resumed included."""
    jobs: Annotated[int, Field(gt=0)] = 1
    """Trials at once; the machine's cores, or GPUs, are shared out to them."""
    procs: Annotated[int, Field(gt=0)] = 1
    """Ranks of each trial, on this machine."""
    prune: Literal["median", "hyperband", "none"] = "median"
    """End a trial early whose score is worse than the median of the others at the same point, by successive halving, or
    never."""
    sampler: Literal["tpe", "random", "grid"] = "tpe"
    """How values are chosen: by what the trials so far suggest, at random, or all choices one by one."""

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        if self.mode != "train_eval":
            yield "`mode` must be train_eval: trials are compared by their validation"
        if self.given_mode is None and not getattr(self, "validation", True):
            yield "`validation` must be on: trials are compared by it"
        if getattr(self, "benchmark", False):
            yield NO_BENCHMARK


def sweep_options(settings: type[TrainConfig]) -> type[SweepCommand]:
    about = "Search settings that train a task best: many trials, the worse ones ended early."
    return with_settings(SweepCommand, settings, about)


OPTIONS = sweep_options(TrainConfig)


def run(argv: Sequence[str]) -> int:
    from paceline.lab.tune.folder import AskedToLeave, leaving_when_asked

    try:
        with leaving_when_asked():
            return _run(argv)
    except KeyboardInterrupt as stopped:
        warn("interrupted: `--resume auto` goes on with this sweep\n")
        return 128 + stopped.number if isinstance(stopped, AskedToLeave) else EXIT_INTERRUPT


def _run(argv: Sequence[str]) -> int:
    name, rest = take_task(list(argv), OPTIONS)
    if name is None:
        load(OPTIONS, list(argv), prog=PROG, positional=POSITIONAL)  # shows help, or says what is missing
    assert name is not None
    from paceline.lab.sweep.api import first_values, make_plan, run_sweep  # from here on torch is needed
    from paceline.lab.sweep.plan import WITHOUT
    from paceline.lab.sweep.space import read_words, space_of
    from paceline.train.find_task import find_task

    task_type = find_task(name)
    options = load(sweep_options(task_type.Settings), [name, *rest], prog=PROG, positional=POSITIONAL)
    world = discover(os.environ)
    refuse_launcher(world, "sweep", " --jobs M` without a launcher, in the job's script")
    settings = task_settings(options, task_type.Settings)
    given = settings.model_dump(exclude_unset=True)
    asked = read_words(options.search, PROG)
    space = space_of(task_type.Settings, asked, {key: given[key] for key in given if key not in WITHOUT}, PROG)
    config = task_type.Settings(**{**given, **first_values(space)})
    plan = make_plan(
        config,
        name,
        task_type.monitor,
        space,
        trials=options.trials,
        jobs=options.jobs,
        procs=options.procs,
        pruner=options.prune,
        sampler=options.sampler,
    )
    result = run_sweep(plan, None, may_resume=settings.resume == "auto")
    return 0 if result.best is not None else 1
