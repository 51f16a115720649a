"""`python -m paceline.lab.sweep.trial FILE`: one trial of a sweep, alone or as launcher of several ranks."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from paceline.lab.sweep.plan import Plan
from paceline.lab.sweep.pruning import Pruning
from paceline.lab.sweep.runner import train_trial
from paceline.lab.sweep.study import StudyTrial, report_to
from paceline.train.find_task import find_task, make_task
from paceline.train.fit import fit
from paceline.train.result import Result
from paceline.world.discover.environment import World, discover
from paceline.world.failure.together import fail_together
from paceline.world.launch.launcher import launch
from paceline.world.parent_process import end_with_parent
from paceline.world.signals import process_ends_with_run


def main(file: Path) -> int:
    spec, world = json.loads(file.read_text(encoding="utf-8")), discover(os.environ)
    end_with_parent(signal.SIGTERM)
    process_ends_with_run()
    if world.launcher == "plain" and spec["procs"] > 1:
        command = [sys.executable, "-m", "paceline.lab.sweep.trial", str(file)]
        return launch(spec["procs"], command, device=spec["settings"].get("device", "auto"))
    return fail_together(world, lambda: _train(world, spec))


def _train(world: World, spec: dict[str, Any]) -> int:
    plan = Plan(
        folder=Path(spec["folder"]),
        task=spec["task"],
        space={},
        settings=spec["settings"],
        trials=0,
        mode=spec["mode"],
        monitor=spec["monitor"],
        task_monitor=spec["task_monitor"],
        procs=spec["procs"],
        pruner=spec["pruner"],
    )
    trial = StudyTrial(spec["number"], spec["params"], "running", None, {})
    task_type = find_task(plan.task)

    def train(settings: dict[str, Any], pruning: Pruning) -> Result:
        return fit(make_task(task_type, plan.task), task_type.Settings(**settings), watchers=[pruning])

    # Only the first rank has callbacks.
    report = report_to(plan.folder, trial.number, plan.pruner) if world.rank == 0 else lambda score, number: False
    end = train_trial(plan, trial, report, train)
    if world.rank == 0:
        end.write(plan.file(trial.number, "end"))
    return 1 if end.status == "failed" else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
