"""`paceline submit slurm|sge|lsf|pbs|k8s -- train ...`: write a batch script, keep it with the run, and queue it."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from paceline.cli.launch import RANKED, trains
from paceline.config.command_line import asks_for_help, dashed, resolve
from paceline.config.load import load
from paceline.config.problems import Problem, SettingsInvalid
from paceline.config.run_path import run_folder
from paceline.config.settings import TrainConfig
from paceline.config.train_command import POSITIONAL as OF_TRAIN
from paceline.config.train_command import TRAIN_OPTIONS, take_task, task_settings, train_options
from paceline.core.cloud.address import address_of, shown
from paceline.core.cloud.file_copy import exists
from paceline.core.cloud.run_copy import bring_run
from paceline.core.errors import AlreadyExists, Conflict, InvalidSetting
from paceline.core.run_folder import BATCH, RunFolder
from paceline.core.terminal import emit, tell
from paceline.world.launch.schedulers.submission import Command, SubmitOptions, keep, option_problems, queue, script

PROG = "paceline submit"
OPTIONS, POSITIONAL = SubmitOptions, ("scheduler",)


def run(argv: Sequence[str]) -> int:
    words = list(argv)
    at = words.index("--") if "--" in words else len(words)
    options = _load(words[:at], words[at + 1 :])
    command = _prepare(words[at + 1 :], options)
    moment = time.strftime("%Y%m%d-%H%M%S")
    ending = "yaml" if options.scheduler == "k8s" else "sh"
    path = options.script or command.folder / f"{options.scheduler}-{moment}.{ending}"
    text = script(options, command, Path.cwd(), path)
    if options.dry_run:
        emit(text)
        return 0
    keep(text, path)
    answer = queue(options.scheduler, path)
    tell(f"{answer.strip()}\nscript {path}\n")
    return 0


def _load(option_words: list[str], command: list[str]) -> SubmitOptions:
    wrong = []
    if not command and not asks_for_help(option_words):
        wrong = [Problem("COMMAND", "is missing", f"put it behind two dashes: `{PROG} slurm --nodes 2 -- train ...`")]
    elif command and command[0] not in RANKED:
        wrong = [Problem(command[0], "does not run on ranks", f"commands that do: {', '.join(RANKED)}")]
    try:
        options = load(SubmitOptions, option_words, prog=PROG, positional=POSITIONAL)
    except SettingsInvalid as invalid:
        raise SettingsInvalid([*map(_with_place, invalid.problems), *wrong], PROG) from None
    wrong += option_problems(options)
    if wrong:
        raise SettingsInvalid(wrong, PROG)
    return options


def _with_place(problem: Problem) -> Problem:
    """Return a problem with the right hint where an option of the training stands before the two dashes."""
    name = problem.where.lstrip("-")
    if not problem.is_unknown or name == "procs" or resolve(TRAIN_OPTIONS, name.removeprefix("no-")) is None:
        return problem  # `--procs` is `--procs-per-node` here
    option = " ".join(filter(None, [problem.where, problem.given]))
    hint = f"it is one of `paceline train`, and belongs behind the two dashes: `{PROG} ... -- train TASK {option}`"
    return replace(problem, what="is no option of submit", hint=hint)


def _prepare(words: list[str], options: SubmitOptions) -> Command:
    """Check the command as it will be run, so that mistakes do not wait in the queue; a training gets its folder."""
    if words[0] != "train":
        return Command(tuple(words), words[0], Path(), trains(words))
    settings, task = _read_training(words[1:])
    if settings.benchmark:
        return Command(tuple(words), task, Path(), trains(words))
    folder = run_folder(settings, task=task, moment=time.strftime("%Y%m%d-%H%M%S"), exists=exists)
    bring_run(folder)
    if options.scheduler == "k8s":
        _check_outlives_pod(folder, options)
    if settings.resume == "no" and RunFolder(folder).is_run:
        # A queued job resumes its run by itself.
        raise AlreadyExists(
            f"{folder} holds a run already", hint="add `--resume auto` to go on with it, or choose another `--out`"
        )
    if isinstance(settings.resume, Path) and options.requeue:
        # A job that is put back would start from the same checkpoint again.
        raise Conflict(
            "`--resume CHECKPOINT` in a job that may be put back into the queue",
            hint="add `--no-requeue`, or use `--init-from` for weights to begin with",
        )
    more = _option("--out", shown(folder)) if settings.out is None else []
    if settings.resume == "no":
        more += ["--resume", "auto"]
    if settings.progress == "auto":
        more += ["--progress", "lines"]  # what Open MPI's ranks write to looks like a terminal, but is a log
    return Command((*words, *more), folder.name, folder / BATCH, trains(words))


def _check_outlives_pod(folder: Path, options: SubmitOptions) -> None:
    """Refuse a run folder inside of a container, which is gone when its pod is."""
    mounted = (options.volume or "").partition(":")[2]
    if address_of(folder) is None and not (mounted and Path(mounted) in (folder, *folder.parents)):
        raise InvalidSetting(
            f"the run folder {folder} would be inside of the pods, and lost with them",
            hint="give the run an address (`--out s3://bucket/run`), or a volume (`--volume CLAIM:/runs`, "
            "`--out /runs/NAME`)",
        )


def _option(name: str, value: str) -> list[str]:
    """Return an option with its value, attached where it could be taken for an option itself."""
    return [f"{name}={value}"] if value.startswith("-") else [name, value]


def _read_training(words: list[str]) -> tuple[TrainConfig, str]:
    """Return the settings that `paceline train` would read from these words, and a short name of the task."""
    from paceline.train import command as train
    from paceline.train.find_task import find_task

    name, rest = take_task(words)
    if name is None:
        load(TRAIN_OPTIONS, words, prog=train.PROG, positional=OF_TRAIN)  # says what is missing
    assert name is not None
    task_class = find_task(name)
    options = load(train_options(task_class.Settings), [name, *rest], prog=train.PROG, positional=OF_TRAIN)
    if options.procs != 1:
        hint = f"`{PROG} {dashed('procs_per_node')} N` says how many"
        raise SettingsInvalid([Problem("--procs", "the scheduler starts the ranks", hint, str(options.procs))], PROG)
    return task_settings(options, task_class.Settings), re.sub(r"\W+", "-", name.rpartition(":")[2] or name).strip("-")
