"""Trials of a sweep: one after the other in this process, or several at once in processes of their own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from paceline.core.disk import replacing
from paceline.core.errors import Failed, PacelineError, first_line
from paceline.core.language import ENGLISH, speaking
from paceline.core.units import counted
from paceline.lab.sweep.outcome import SweepResult, SweepTrial, TrialEnd, shown
from paceline.lab.sweep.plan import Plan, result_of
from paceline.lab.sweep.pruning import Pruning, Report
from paceline.lab.sweep.study import Study, StudyTrial
from paceline.train.result import Result
from paceline.world.parent_process import bound

POLL_S = 0.1
HOPELESS = 3
"""So many failures without a trial that finished end a sweep."""
INSIDE = "PACELINE_SWEEP_TRIAL"
"""Set in the processes of trials, by which a script that calls `sweep` unguarded is noticed."""
COMMAND = (sys.executable, "-m", "paceline.lab.sweep.trial")
Say = Callable[[str], None]
Train = Callable[[dict[str, Any], Pruning], Result]
"""Trains with these settings; the callback follows the run."""


def run_here(plan: Plan, study: Study, train: Train, say: Say) -> SweepResult:
    """Run all trials that are left, one after the other, in this process."""
    for trial in _left(plan, study):
        end = train_trial(plan, trial, study.report_of(trial.number), train)
        end.write(plan.file(trial.number, "end"))
        if end.status == "stopped":
            break  # a signal: the trial goes on when the sweep is resumed
        _ended(plan, study, trial.number, end, say)
    return result_of(plan, study)


def train_trial(plan: Plan, trial: StudyTrial, report: Report, train: Train) -> TrialEnd:
    """Train one trial, and return how it ended; an error in it is no reason to end the sweep."""
    began = time.monotonic()
    pruning = Pruning(report, plan.monitor, plan.task_monitor)
    try:
        result = train(plan.trial_settings(trial.number, trial.params), pruning)
    except PacelineError as error:
        with speaking(ENGLISH):
            return TrialEnd("failed", None, 0, time.monotonic() - began, str(error))
    except Exception as error:  # values that do not fit the model or the memory, or a bug of the task's
        traceback.print_exc()
        return TrialEnd("failed", None, 0, time.monotonic() - began, first_line(error))
    return end_of(result, pruning, time.monotonic() - began)


def end_of(result: Result, pruning: Pruning, seconds: float) -> TrialEnd:
    """Return how a run ended, as a trial."""
    if pruning.is_pruned and result.status == "stopped":
        return TrialEnd("pruned", None, result.num_steps, seconds)
    if result.status == "stopped":
        return TrialEnd("stopped", None, result.num_steps, seconds)
    if result.status == "diverged":
        return TrialEnd("failed", None, result.num_steps, seconds, "the loss diverged")
    if result.best_score is None and pruning.has_monitored(result.metrics):
        return TrialEnd("failed", None, result.num_steps, seconds, "its score was never a finite number")
    if result.best_score is None:
        why = f"no validation gave a score to compare: set `--monitor` to one of {', '.join(result.metrics) or 'none'}"
        return TrialEnd("failed", None, result.num_steps, seconds, why)
    return TrialEnd("finished", result.best_score, result.num_steps, seconds)


def run_in_processes(plan: Plan, study: Study, say: Say, gpus: int) -> SweepResult:
    """Run all trials that are left, as many at once as the plan says.

    Those that are running when this is left are asked to save and leave: they go on when the sweep is resumed.
    """
    active: dict[int, _Running] = {}
    left = _left(plan, study)
    try:
        while True:
            while len(active) < plan.jobs and (trial := next(left, None)) is not None:
                place = min(set(range(plan.jobs)) - {running.place for running in active.values()})
                active[trial.number] = _Running(place, _start(plan, trial, _environment(plan, place, gpus)))
            if not active:
                return result_of(plan, study)
            time.sleep(POLL_S)
            for number in [number for number, running in active.items() if running.process.poll() is not None]:
                code = active.pop(number).process.returncode
                end = TrialEnd.read(plan.file(number, "end")) or _silent(plan, number, code)
                if end.status != "stopped":
                    _ended(plan, study, number, end, say)
    finally:
        for running in active.values():
            running.process.terminate()
        for running in active.values():
            running.process.wait()


@dataclass(frozen=True)
class _Running:
    """A trial that is running, and which part of the machine it has."""

    place: int
    process: subprocess.Popen[bytes]


def _left(plan: Plan, study: Study) -> Iterator[StudyTrial]:
    """Yield the trials that are to be run: those that were interrupted, then new ones."""
    yield from [trial for trial in study.trials() if trial.status == "running"]
    while len(study.trials()) < plan.trials:
        yield study.ask()


def _start(plan: Plan, trial: StudyTrial, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start the process of a trial; it ends with this one, after it has saved."""
    plan.file(trial.number, "end").unlink(missing_ok=True)
    values = {
        "folder": str(plan.folder),
        "number": trial.number,
        "params": dict(trial.params),
        "task": plan.task,
        "settings": dict(plan.settings),
        "monitor": plan.monitor,
        "task_monitor": plan.task_monitor,
        "mode": plan.mode,
        "procs": plan.procs,
        "pruner": plan.pruner,
    }
    with replacing(plan.file(trial.number, "spec")) as file:
        json.dump(values, file, indent=1)
    with plan.file(trial.number, "output").open("ab") as output:
        return subprocess.Popen(
            bound([*COMMAND, str(plan.file(trial.number, "spec"))], signal.SIGTERM),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            env=dict(environment),
        )


def _environment(plan: Plan, place: int, gpus: int) -> dict[str, str]:
    """Return the variables of a trial: it sees GPUs of its own where several trials share a machine."""
    variables = {**os.environ, INSIDE: "1"}
    if gpus and plan.jobs > 1:
        seen = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if os.environ.get("CUDA_VISIBLE_DEVICES") else []
        names = seen or [str(number) for number in range(gpus)]
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(names[place * plan.procs : (place + 1) * plan.procs])
    return variables


def _silent(plan: Plan, number: int, code: int) -> TrialEnd:
    """Return the end of a trial whose process left no word."""
    how = f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
    try:
        text = plan.file(number, "output").read_text(encoding="utf-8", errors="replace").rstrip()
    except OSError:
        text = ""
    last = text.splitlines()[-1] if text else ""
    return TrialEnd("failed", why=f"{how}{': ' if last else ''}{last}")


def _ended(plan: Plan, study: Study, number: int, end: TrialEnd, say: Say) -> None:
    """Record how a trial ended and say so; give up where nothing but failures came of the first ones."""
    assert end.status != "stopped"
    study.tell(number, end.status, end.score)
    trials = {trial.number: trial for trial in result_of(plan, study).trials}
    say(_line(trials[number], plan))
    statuses = [trial.status for trial in trials.values()]
    if statuses.count("failed") >= HOPELESS and not {"finished", "pruned"} & set(statuses):
        raise Failed(
            f"the first {counted(statuses.count('failed'), 'trial')} failed, the last one with: {end.why}",
            hint=f"mend that, or try one by `paceline train`; what it printed is in {plan.file(number, 'output')}",
        )


def _line(trial: SweepTrial, plan: Plan) -> str:
    values = ", ".join(f"{name} {shown(value)}" for name, value in trial.settings.items())
    score = "" if trial.score is None else f", {plan.monitor_name} {trial.score:.6g}"
    return f"trial {trial.number} {trial.status}{score} ({values}){f': {trial.why}' if trial.why else ''}\n"
