"""Training that finds how much fits into memory: where a grain does not, the batch is cut finer and the run goes on.

Grains are the unit of numerics, so a cut is a new number of them, and results are those of that number: of a run that
began with it where nothing was saved yet, else of one that was resumed with it (`--regrain`) from the same checkpoint.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from paceline.config.settings import TrainConfig
from paceline.core.errors import PacelineError, TaskContract, first_line
from paceline.core.terminal import tell
from paceline.core.together import Exclusion
from paceline.core.units import counted
from paceline.observe.callback import Callback
from paceline.train.loop import train
from paceline.train.loss import ALLOCATION_FAILURES, OutOfMemory
from paceline.train.result import Result
from paceline.train.run import Run, open_run
from paceline.train.task import Task
from paceline.world.failure.together import is_broken_link
from paceline.world.link import Link


class SplitNeedsOneRank(PacelineError):
    """A rank that runs out of memory in the middle of a step leaves the others waiting in it."""

    ranks: int
    excludes = (
        Exclusion(
            "`--split-on-oom`",
            "several ranks",
            "hardware",
            "A rank that runs out of memory leaves the others waiting in the middle of a step.",
        ),
    )
    sentence = "`split_on_oom` cuts the batch of one rank, and there are {ranks}"
    hint = "find the number of grains with `paceline tune TASK --procs {ranks} --knobs grains`, and set `--grains`"


def next_cut(grains: int, num_samples: int, before: int | None) -> int | None:
    """Return the number of grains to try after one of `num_samples` did not fit; None if no smaller one is to be had.

    `before` is the size of the grain that did not fit the last time: a cut that left it as it was is the last.
    """
    return 2 * grains if num_samples > 1 and (before is None or num_samples < before) else None


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if memory ran out in this process; a CPU has no error of its own for it."""
    if isinstance(error, OutOfMemory | torch.OutOfMemoryError | MemoryError):
        return True
    return not is_broken_link(error) and any(words in str(error) for words in ALLOCATION_FAILURES)


def train_splitting(task: Task, config: TrainConfig, link: Link, watchers: Sequence[Callback]) -> Result:
    """Train, with more grains each time that one does not fit."""
    if link.world.size > 1:
        raise SplitNeedsOneRank(link.world.size)
    untouched = _copied(vars(task))
    too_large: int | None = None
    while True:
        outcome = _attempt(task, config, link, watchers, too_large)
        if isinstance(outcome, Result):
            return outcome
        # Only here, where no frame of the failed attempt is alive, can its memory be given back.
        vars(task).clear()
        vars(task).update(_copied(untouched))
        gc.collect()
        if link.device.type == "cuda":
            torch.cuda.empty_cache()
        tell(outcome.line)
        too_large = outcome.num_samples
        resumed = {"regrain": True, "resume": "auto"} if outcome.is_saved else {}
        config = config.model_copy(update={"grains": outcome.grains, **resumed})


def _copied(attributes: Mapping[str, Any]) -> dict[str, Any]:
    memo: dict[int, Any] = {}  # attributes may be parts of each other
    copies = {}
    for name, value in attributes.items():
        try:
            copies[name] = copy.deepcopy(value, memo)
        except Exception as error:  # whatever an object of the user's raises
            raise TaskContract(
                f"`split_on_oom` begins again with the task as it was, and its attribute `{name}` cannot be copied: "
                f"{first_line(error)}",
                hint="make locks, open files and connections in `train_data` or `model`, not in `__init__`; or set "
                "`--grains`",
            ) from error
    return copies


@dataclass(frozen=True)
class _Cut:
    """An attempt that ran out of memory, and how to go on."""

    grains: int
    num_samples: int
    """Of the grain that did not fit."""
    is_saved: bool
    """There is a checkpoint to go on from."""
    line: str


def _attempt(
    task: Task, config: TrainConfig, link: Link, watchers: Sequence[Callback], too_large: int | None
) -> Result | _Cut:
    run = open_run(task, config, link, watchers)
    try:
        result = train(run)
    except OutOfMemory as error:
        if error.num_grains is None:  # in validation, whose batches have a setting of their own
            raise
        return _cut(run, error, error.num_samples, too_large)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        samples = run.config.max_samples // run.resume.grains
        return _cut(run, error, samples, too_large)
    return replace(result, model=run.give_model())


def _cut(run: Run, error: BaseException, num_samples: int, too_large: int | None) -> _Cut:
    """Return how to go on; raises the error if there is no way."""
    before = run.resume.grains
    after = next_cut(before, num_samples, too_large)
    if after is None:
        raise error
    saved, _ = run.checkpoints.ends()
    where = "from the beginning" if saved is None else f"from {saved.name}"
    meaning = "" if saved is None else " from there on"
    return _Cut(
        after,
        num_samples,
        saved is not None,
        f"out of memory on a grain of {counted(num_samples, 'sample')}: going on {where} with {after} grains per step "
        f"instead of {before}; results are those of `--grains {after}`{meaning}\n",
    )
