"""`paceline.sweep`: search settings of a task with optuna, from Python."""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from paceline.config.problems import Problem
from paceline.config.python_call import CallInvalid, kind_of, settings_of_call
from paceline.config.run_path import run_folder
from paceline.config.settings import TrainConfig
from paceline.core.disk import replacing
from paceline.core.errors import Conflict, PacelineError, WrongType
from paceline.core.paths import absolute
from paceline.core.terminal import tell
from paceline.core.units import counted
from paceline.core.user_file import refuse_on_import
from paceline.lab.sweep import report as sweep_report
from paceline.lab.sweep.outcome import SweepResult, rows, text_table
from paceline.lab.sweep.plan import WITHOUT, Plan, PrunerName, SamplerName, only_sweep, open_folder
from paceline.lab.sweep.report import BEST
from paceline.lab.sweep.runner import INSIDE, run_here, run_in_processes
from paceline.lab.sweep.space import Asked, Choices, Space, space_of
from paceline.lab.sweep.study import Study, require_optuna
from paceline.observe.report.page import PlotlyMissing

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from paceline.config.arguments import TrainArguments
    from paceline.train.task import Task

REPORT = "report.html"
CALL = "paceline.sweep"


def sweep(
    task: str | Callable[[], Task],
    search: Asked,
    *,
    trials: int = 20,
    jobs: int = 1,
    procs: int = 1,
    prune: PrunerName = "median",
    sampler: SamplerName = "tpe",
    **settings: Unpack[TrainArguments],
) -> SweepResult:
    """Train `task` again and again with other settings, and return how each trial went; see docs/sweep.md.

    `task` is a task's class (trials then run in this process, one after the other), or its name, as `paceline train`
    takes it. `search` has the values by setting: `{"lr": "1e-5:1e-1:log", "optimizer": ["adamw", "lamb"]}`. Trials are
    compared by `monitor`; one that is worse than the median of the others at the same point is ended early. The
    settings are those of `fit`; `out` is the folder of the sweep, and `resume="auto"` goes on with it.
    """
    if os.environ.get(INSIDE):
        raise Conflict(
            "`paceline.sweep` was called while a trial imported the script that calls it",
            hint='write `if __name__ == "__main__":` above that call',
        )
    refuse_on_import("paceline.sweep")
    problems = [
        Problem(name, "must be a whole number above 0", given=repr(value))
        for name, value in (("trials", trials), ("jobs", jobs), ("procs", procs))
        if not isinstance(value, int) or value < 1
    ]
    if problems:
        raise CallInvalid(problems, CALL)
    if not isinstance(search, Mapping):
        raise CallInvalid([Problem("search", "must be a mapping", 'write {"lr": "1e-4:1e-1:log"}', repr(search))], CALL)
    make: Callable[[], Task]
    if isinstance(task, str):
        from paceline.train.find_task import load_task

        name, make = task, partial(load_task, task)
    elif not callable(task):
        raise WrongType(
            f"`task` of paceline.sweep is {kind_of(task)}, and every trial must make a task of its own",
            hint="give the class itself, not an object of it, or a name as `paceline train` takes it",
        )
    else:
        name, make = getattr(task, "__name__", type(task).__name__), task
        if jobs > 1 or procs > 1:
            what = "more than one trial at once" if jobs > 1 else "more than one rank"
            raise Conflict(
                f"{what} needs processes of their own, which must find the task",
                hint="give the task as text: a recipe's name, or `path/to/file.py:ClassName`",
            )
    example = make()
    given = {key: value for key, value in settings.items() if key not in WITHOUT}
    space = space_of(example.Settings, search, given, CALL)
    config = settings_of_call(example.Settings, {**settings, **first_values(space)}, CALL)
    plan = make_plan(
        config, name, example.monitor, space, trials=trials, jobs=jobs, procs=procs, pruner=prune, sampler=sampler
    )
    return run_sweep(plan, None if isinstance(task, str) else make, may_resume=config.resume == "auto")


def first_values(space: Space) -> dict[str, Any]:
    """Return one value of each searched setting, for settings that must be whole."""
    return {name: dimension.ends[0] for name, dimension in space.items()}


def make_plan(
    config: TrainConfig,
    task: str,
    task_monitor: str,
    space: Space,
    *,
    trials: int,
    jobs: int,
    procs: int,
    pruner: PrunerName,
    sampler: SamplerName,
) -> Plan:
    """Return the plan of a sweep, with its folder, and the cores shared out to the trials."""
    values = config.model_dump(mode="json", exclude_unset=True)
    shared = {key: value for key, value in values.items() if key not in (*WITHOUT, *space)}
    short = re.sub(r"\W+", "-", task.rpartition(":")[2] or task).strip("-")
    moment = f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    folder = run_folder(config, task=f"sweep-{short}", moment=moment, exists=os.path.exists)
    if jobs * procs > 1 and config.threads is None:
        shared["threads"] = max(1, len(os.sched_getaffinity(0)) // (jobs * procs))
    if sampler == "grid":
        ranges = [name for name, dimension in space.items() if not isinstance(dimension, Choices)]
        if ranges:
            raise Conflict(
                f"`sampler` grid tries all values, and {ranges[0]} is a range",
                hint=f"name its values, as `--search {ranges[0]}=A,B,C`, or take another `--sampler`",
            )
        trials = min(trials, math.prod(len(dimension.ends) for dimension in space.values()))
    path = Path(task.rpartition(":")[0])
    if task.endswith(".py") or path.suffix == ".py":  # trials may be started from elsewhere
        task = f"{absolute(path)}:{task.rpartition(':')[2]}"
    return Plan(
        folder=absolute(folder),
        task=task,
        space=space,
        settings=shared,
        trials=trials,
        mode=config.monitor_mode,
        monitor=config.monitor or task_monitor,
        jobs=jobs,
        procs=procs,
        pruner=pruner,
        sampler=sampler,
        seed=config.seed,
    )


def run_sweep(plan: Plan, make: Callable[[], Task] | None, *, may_resume: bool) -> SweepResult:
    """Run the remaining trials, in this process where only it can `make` the task; write table, page and settings."""
    import torch

    gpus = 0 if plan.settings.get("device") == "cpu" else torch.cuda.device_count()
    _check_room(plan.jobs, plan.procs, cores=len(os.sched_getaffinity(0)), gpus=gpus)
    require_optuna()
    with only_sweep(plan.folder):
        open_folder(plan, may_resume=may_resume)
        study = Study(plan.folder, plan.pruner, plan.mode)
        searched = ", ".join(f"{name} {dimension}" for name, dimension in plan.space.items())
        tell(f"sweep of {plan.task} in {plan.folder}: {counted(plan.trials, 'trial')} over {searched}\n")
        try:
            if make is None:
                run_in_processes(plan, study, gpus)
            else:
                run_here(plan, study, make)
        except (KeyboardInterrupt, PacelineError):
            _show(plan, study, is_typed=make is None)
            raise
        return _show(plan, study, is_typed=make is None)


def _check_room(jobs: int, procs: int, *, cores: int, gpus: int) -> None:
    """Refuse more trials at once than there is room for; `gpus` is 0 where trials compute on the CPU."""
    if jobs > 1 and jobs * procs > (gpus or cores):
        available, kind = gpus or cores, "GPUs" if gpus else "cores"
        raise Conflict(
            f"{counted(jobs, 'trial')} at once with {counted(procs, 'rank')} each need {jobs * procs} {kind}, and "
            f"there are {available}",
            hint=f"set `--jobs {max(1, available // procs)}`, or fewer `--procs`",
        )


def _show(plan: Plan, study: Study, *, is_typed: bool) -> SweepResult:
    """Print the table, and write the page and the settings of the best trial."""
    result = SweepResult(plan.folder, study.trials(), plan.mode, plan.monitor)
    tell("\n".join([*text_table(*rows(result)), ""]))
    best = result.best
    if best is not None:
        with replacing(plan.folder / BEST) as file:
            file.write(f"# Best of {len(result.trials)} trials: {result.monitor} {best.score:.6g}\n")
            yaml.safe_dump({**plan.settings, **best.settings}, file, sort_keys=False)
        tell(f"best: trial {best.number}, {result.monitor} {best.score:.6g}; its run is {best.folder}\n")
        command = f": `paceline train {plan.task} --config {plan.folder / BEST}`" if is_typed else ""
        tell(f"its settings are in {plan.folder / BEST}{command}\n")
    try:
        page = sweep_report.page(result, study, plan.task, is_typed=is_typed)
    except PlotlyMissing as error:
        tell(f"no report is written: {error} ({error.hint})\n")
        return result
    with replacing(plan.folder / REPORT) as file:
        file.write(page)
    tell(f"report: {plan.folder / REPORT}\n")
    return replace(result, report=plan.folder / REPORT)
