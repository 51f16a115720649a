"""`paceline train`: a recipe or `file.py:Task`, as one process, as one of many, or as `--procs` of them."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import tyro
from pydantic import Field

from paceline.config.errors import PacelineError
from paceline.config.settings import TrainConfig


class TrainOptions(TrainConfig):
    """Train a task. `TASK` is a recipe's name or `path/to/file.py:ClassName`."""

    task: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="TASK")]
    procs: Annotated[int, Field(gt=0)] | Literal["auto"] = 1
    """Ranks to start on this machine, no launcher needed; `auto` is one per GPU, one without."""
    distributed: Literal["no", "dp"] = "no"
    """`dp` splits the batch over all devices of this machine: the same as `--procs auto`."""

    def config(self) -> TrainConfig:
        return TrainConfig(**{name: getattr(self, name) for name in TrainConfig.model_fields})


class WhichRun(PacelineError):
    """A run is to go on, but not said which."""

    hint = "add `--out FOLDER`, the run's folder"

    def __init__(self) -> None:
        super().__init__("`--resume auto` needs to know the run")


def run(argv: Sequence[str]) -> int:
    options = tyro.cli(TrainOptions, prog="paceline train", args=spell_levels(argv))
    if options.out is None:
        try:
            argv = [*argv, "--out", str(_folder(options))]
        except WhichRun as error:
            sys.stderr.write(f"error: {error}\n  {error.hint}\n")
            return 2
        options = options.model_copy(update={"out": Path(argv[-1])})
    return train(options, ["train", *argv])


def train(options: TrainOptions, argv: Sequence[str]) -> int:
    """Train here, or start the ranks that will; `argv` is the command that does the same in another process."""
    from paceline.world.discover import discover
    from paceline.world.failure import fail_together
    from paceline.world.launch import launch

    world = discover(os.environ)
    procs = "auto" if options.distributed == "dp" else options.procs
    if world.size == 1 and world.launcher == "plain" and procs != 1:
        command = [sys.executable, "-m", "paceline", *argv]
        return fail_together(world, lambda: launch(procs, command, device=options.device))
    return fail_together(world, lambda: _train_here(options))


def _train_here(options: TrainOptions) -> int:
    from paceline.cli.tasks import load_task
    from paceline.train.fit import fit

    fit(load_task(options.task), options.config())
    return 0


def spell_levels(argv: Sequence[str]) -> list[str]:
    """`-O2` and `-O 2` as `--level 2`."""
    words: list[str] = []
    for word in argv:
        match = re.fullmatch(r"-O(\w*)", word)
        words += ["--level", *([match[1]] if match[1] else [])] if match else [word]
    return words


def _folder(options: TrainOptions) -> Path:
    """The run of the checkpoint to go on from, else one that no run has had: named for the task and the time."""
    if options.resume == "auto":
        raise WhichRun
    if isinstance(options.resume, Path) and (options.resume.resolve().parent.parent / "run.json").exists():
        return options.resume.resolve().parent.parent
    name = re.sub(r"\W+", "-", options.task.rpartition(":")[2] or options.task).strip("-")
    return Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
