"""Trials of a sweep: one after the other in this process, or several at once in processes of their own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from paceline.core.disk import replacing
from paceline.core.errors import Failed
from paceline.core.terminal import tell
from paceline.core.units import counted
from paceline.lab.sweep.outcome import SweepTrial, shown
from paceline.lab.sweep.plan import Plan
from paceline.lab.sweep.study import Study, TrialEnd
from paceline.lab.sweep.trial import train_trial
from paceline.train.task import Task
from paceline.world.parent_process import bound

POLL_S = 0.1
HOPELESS = 3
"""Number of failures, without a trial that finished, that end a sweep."""
INSIDE = "PACELINE_SWEEP_TRIAL"
"""Variable set in the processes of trials, by which a script that calls `sweep` unguarded is noticed."""
COMMAND = (sys.executable, "-m", "paceline.lab.sweep.trial")


def run_here(plan: Plan, study: Study, make: Callable[[], Task[Any]]) -> None:
    """Run all remaining trials, one after the other, in this process."""
    for trial in _remaining(plan, study):
        settings = plan.trial_settings(trial.number, trial.settings)
        end = train_trial(make, settings, study.report_of(trial.number))
        if end.status == "stopped":
            return  # a signal: the trial continues when the sweep is resumed
        _close(plan, study, trial.number, end)


def run_in_processes(plan: Plan, study: Study, gpus: int) -> None:
    """Run all remaining trials, as many at once as the plan says.

    Those that are running when this is left are asked to save and leave: they continue when the sweep is resumed.
    """
    slots: dict[int, tuple[int, subprocess.Popen[bytes]]] = {}
    remaining = _remaining(plan, study)
    try:
        while True:
            for slot in sorted(set(range(plan.jobs)) - slots.keys()):
                if (trial := next(remaining, None)) is not None:
                    study.note(trial.number, None)
                    slots[slot] = trial.number, _start(plan, trial, _environment(plan, slot, gpus))
            if not slots:
                return
            time.sleep(POLL_S)
            for slot, (number, process) in list(slots.items()):
                if process.poll() is not None:
                    del slots[slot]
                    end = study.noted(number) or _silent(plan, number, process.returncode)
                    if end.status != "stopped":
                        _close(plan, study, number, end)
    finally:
        for _, process in slots.values():
            process.terminate()
        for _, process in slots.values():
            process.wait()


def _remaining(plan: Plan, study: Study) -> Iterator[SweepTrial]:
    """Yield the trials to run: those that were interrupted, then new ones."""
    yield from [trial for trial in study.trials() if trial.status == "running"]
    while len(study.trials()) < plan.trials:
        yield study.ask(plan)


def _start(plan: Plan, trial: SweepTrial, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    """Start the process of a trial; it ends with this one, after it has saved."""
    spec = {
        "folder": str(plan.folder),
        "number": trial.number,
        "task": plan.task,
        "settings": plan.trial_settings(trial.number, trial.settings),
        "procs": plan.procs,
        "pruner": plan.pruner,
    }
    file = plan.file(trial.number, "spec.json")
    with replacing(file) as out:
        json.dump(spec, out, indent=1)
    with plan.file(trial.number, "output.txt").open("ab") as output:
        return subprocess.Popen(
            bound([*COMMAND, str(file)], signal.SIGTERM),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            env=environment,
        )


def _environment(plan: Plan, slot: int, gpus: int) -> dict[str, str]:
    """Return the variables of a trial: it sees GPUs of its own where several trials share a machine."""
    variables = {**os.environ, INSIDE: "1"}
    if gpus and plan.jobs > 1:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        names = visible.split(",") if visible else [str(number) for number in range(gpus)]
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(names[slot * plan.procs : (slot + 1) * plan.procs])
    return variables


def _silent(plan: Plan, number: int, code: int) -> TrialEnd:
    """Return the end of a trial whose process did not note one."""
    how = f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
    lines = plan.file(number, "output.txt").read_text(encoding="utf-8", errors="replace").split("\n")
    last = next((line for line in reversed(lines) if line.strip()), "")
    return TrialEnd("failed", why=f"{how}{': ' if last else ''}{last}")


def _close(plan: Plan, study: Study, number: int, end: TrialEnd) -> None:
    """Record and print how a trial ended; raise `Failed` if only failures came of the first ones."""
    study.close(number, end)
    trials = study.trials()
    values = ", ".join(f"{name} {shown(value)}" for name, value in trials[number].settings.items())
    score = "" if trials[number].score is None else f", {plan.monitor} {trials[number].score:.6g}"
    tell(f"trial {number} {end.status}{score} ({values}){f': {end.why}' if end.why else ''}\n")
    statuses = [trial.status for trial in trials]
    if statuses.count("failed") >= HOPELESS and not {"finished", "pruned"} & set(statuses):
        raise Failed(
            f"the first {counted(statuses.count('failed'), 'trial')} failed, the last one with: {end.why}",
            hint=f"mend that, or try one by `paceline train`; what it printed is in {plan.file(number, 'output.txt')}",
        )
