"""The command `paceline train`: a recipe or `file.py:Task`, as one process, as one of many, or as `--procs` of them."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.config.load import as_yaml, load
from paceline.config.mode import Mode, purpose_of
from paceline.config.problems import Problem, SettingsInvalid
from paceline.config.run_path import run_folder
from paceline.config.settings import TrainConfig
from paceline.config.train_command import (
    POSITIONAL,
    TRAIN_OPTIONS,
    TrainCommand,
    failure_problems,
    take_task,
    task_settings,
    train_options,
)
from paceline.core.cloud.address import local_path, refuse_memory, shown
from paceline.core.cloud.file_copy import exists
from paceline.core.errors import Conflict
from paceline.core.paths import absolute
from paceline.core.terminal import emit, warn
from paceline.world.discover.environment import World, discover
from paceline.world.discover.procs import check_procs

if TYPE_CHECKING:
    from paceline.train.task import Task

PROG = "paceline train"


def run(argv: Sequence[str]) -> int:
    """Train as the words of the command line say; return the exit code."""
    words = list(argv)
    name, rest = take_task(words)
    if name is None:
        load(TRAIN_OPTIONS, words, prog=PROG, positional=POSITIONAL)  # shows help, or says what is missing
    assert name is not None
    world = discover(os.environ)
    from paceline.world.failure.together import fail_together  # from here on torch is needed

    return fail_together(world, lambda: _run(world, name, rest))


def _run(world: World, name: str, rest: list[str]) -> int:
    task_class = _find(name, rest)
    options = load(train_options(task_class.Settings), [name, *rest], prog=PROG, positional=POSITIONAL)
    settings = task_settings(options, task_class.Settings)
    if options.print_config:
        if world.rank == 0:
            action = "" if options.is_for_training else f" --mode {options.mode}"
            emit(f"# {PROG} {name}{action} --config THIS_FILE\n{as_yaml(settings)}")
        return 0
    wrong = failure_problems(options)
    if wrong:
        raise SettingsInvalid(wrong, PROG)
    procs = "auto" if options.distributed == "dp" else options.procs
    if world.launcher == "plain" and (procs != 1 or options.max_restarts):
        return _launch(options, settings, [name, *rest])
    check_procs(world, procs, PROG)
    mode = options.given_mode
    settings = _with_timeline(world, _with_folder(world, settings, name, mode), os.environ)
    return _train(world, task_class, name, settings, mode)


def _train(world: World, task_class: type[Task], name: str, settings: TrainConfig, mode: Mode | None) -> int:
    """Train as one rank; return the exit code."""
    from paceline.train.find_task import make_task
    from paceline.train.fit import fit, fit_surviving
    from paceline.world.failure.board import EXIT_DIVERGED, EXIT_STOPPED
    from paceline.world.rounds import Rounds

    waits = {"start_timeout_s": settings.start_timeout_s, "timeout_s": settings.timeout_s}
    rounds = Rounds.around(os.environ, world, **waits) if _trains(settings, mode) else None
    if rounds is None:
        result = fit(make_task(task_class, name), settings, mode=mode)
    else:
        from paceline.core.user_file import code_of

        result = fit_surviving(lambda: make_task(task_class, name), settings, rounds, code_of(task_class))
    if not result.is_delivered and world.rank == 0:
        warn(
            f"error: {result.address} does not have all of this run, {result.folder} has it\n"
            "  type the same command with `--resume auto` to send it\n"
        )
    if result.status == "stopped" and rounds is not None and result.is_delivered:
        return EXIT_STOPPED  # for the launcher, which alone knows what the user wants to see
    return EXIT_DIVERGED if result.status == "diverged" else int(not result.is_delivered)


def _trains(settings: TrainConfig, mode: Mode | None) -> bool:
    return purpose_of(mode) == "train" and not settings.benchmark


def _with_timeline(world: World, settings: TrainConfig, environment: Mapping[str, str]) -> TrainConfig:
    """Return the settings with a timeline where Horovod's variable asks for one and they do not."""
    path = environment.get("HOROVOD_TIMELINE")
    if not path or settings.profile_file is not None:
        return settings
    if world.rank == 0:
        emit(f"HOROVOD_TIMELINE: a timeline is written to {path} (steps: `--profile`)\n")
    return settings.model_copy(update={"profile_file": absolute(Path(path))})


def _find(name: str, rest: list[str]) -> type[Task]:
    """Return the task's class. If there is none, mistakes in the settings that all tasks share are reported, too."""
    from paceline.train.find_task import UnknownTask, find_task

    try:
        return find_task(name)
    except UnknownTask as unknown:
        try:
            load(TRAIN_OPTIONS, [name, *rest], prog=PROG, positional=POSITIONAL)
        except SettingsInvalid as invalid:
            # Options that we do not know may have been the task's own.
            others = [problem for problem in invalid.problems if not problem.is_unknown]
            if others:
                first = Problem("TASK", str(unknown), unknown.hint, name)
                raise SettingsInvalid([first, *others], PROG) from None
        raise


def _launch(options: TrainCommand, settings: TrainConfig, words: list[str]) -> int:
    """Start the ranks that do the same in processes of their own; they agree on the folder themselves."""
    import torch

    from paceline.train.resume import check_batch
    from paceline.world.launch.launcher import count_procs, launch

    procs = count_procs(
        "auto" if options.distributed == "dp" else options.procs, settings.device, torch.cuda.device_count()
    )
    if procs == 1 and options.max_restarts and settings.out is None:
        # A single rank that is started again cannot know the folder that the one before it chose.
        raise Conflict("--max-restarts with one rank needs to know the run's folder", hint="add `--out FOLDER`")
    if settings.resume == "no" and not settings.benchmark:
        check_batch(settings, procs)
    refuse_memory(settings.out or settings.runs_dir)
    _folder(settings, words[0], options.given_mode)  # a name that cannot be is said here, once and at once
    command = [sys.executable, "-m", "paceline", "train", *words]
    if options.on_failure == "continue" and procs > 1 and _trains(settings, options.given_mode):
        from paceline.world.launch.decisions import Survival
        from paceline.world.launch.survivors import launch_surviving

        rules = Survival(options.max_restarts, options.min_ranks)
        return launch_surviving(procs, command, rules=rules, device=settings.device)
    return launch(procs, command, device=settings.device, max_restarts=options.max_restarts)


def _with_folder(world: World, settings: TrainConfig, name: str, mode: Mode | None) -> TrainConfig:
    """Return the settings with the run's folder, the same on all ranks and after every restart."""
    changes: dict[str, object] = {}
    if world.size > 1:
        agreed = _agree(world, settings, name, mode)
        changes |= {"out": agreed} if settings.out is None else {}
    elif settings.out is None:
        changes["out"] = _folder(settings, name, mode)
    if world.attempt > 0 and settings.resume == "no":
        changes["resume"] = "auto"  # ranks that are started again go on with what the dead ones have saved
    return settings.model_copy(update=changes)


def _agree(world: World, settings: TrainConfig, name: str, mode: Mode | None) -> Path | None:
    from paceline.world.store import meet

    # The place of the first attempt, so that restarted ranks find what it decided.
    store = meet(replace(world, attempt=0), settings.start_timeout_s)
    if world.rank == 0 and not store.check(["run folder"]):
        # The address, where it is one: copies may lie elsewhere on other machines.
        store.set("run folder", shown(settings.out or _folder(settings, name, mode) or ""))
    agreed = store.get("run folder").decode()
    return local_path(agreed) if agreed else None


def _folder(settings: TrainConfig, name: str, mode: Mode | None) -> Path | None:
    """Return the run's folder; None if nothing is saved and no run is meant."""
    if settings.benchmark and settings.out is None:
        return None
    if purpose_of(mode) != "train":
        if settings.exp_name is None and settings.resume != "auto":
            return settings.out
        settings = settings.model_copy(update={"resume": "auto"})  # an existing run is used, none is made
    task = re.sub(r"\W+", "-", name.rpartition(":")[2] or name).strip("-")
    moment = f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    return run_folder(settings, task=task, moment=moment, exists=exists)
