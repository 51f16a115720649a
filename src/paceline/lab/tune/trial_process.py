"""`python -m paceline.lab.tune.trial_process FOLDER`: one trial of `paceline tune`, on one rank or several."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from paceline.lab.tune.process import LEAVE_S, die_with_parent, read_spec, write_end, write_facts, write_speed
from paceline.lab.tune.race import FilePace
from paceline.lab.tune.trial import trial
from paceline.train.find_task import find_task, make_task
from paceline.world.discover.environment import World, discover
from paceline.world.failure.together import fail_together
from paceline.world.launch.launcher import launch
from paceline.world.start import from_settings


def main(folder: Path) -> int:
    spec, world = read_spec(folder), discover(os.environ)
    die_with_parent()
    if world.launcher == "plain" and spec.procs > 1:
        command = [sys.executable, "-m", "paceline.lab.tune.trial_process", str(folder)]
        return launch(spec.procs, command, device=spec.settings.get("device", "auto"), grace_s=LEAVE_S)
    return fail_together(world, lambda: _measure(world, folder))


def _measure(world: World, folder: Path) -> int:
    spec = read_spec(folder)
    try:
        task_type = find_task(spec.task)
        config = task_type.Settings(**spec.settings)
        link = from_settings(config, world)
        die_with_parent()  # `start` has asked for SIGTERM, on which ranks save and leave: here is nothing to save
        with link:
            speed = trial(
                make_task(task_type, spec.task),
                config,
                link,
                spec.measure_s,
                tell=lambda facts: write_facts(folder, facts),
                pace=FilePace(folder) if spec.is_paced else None,
            )
            if link.is_first:
                write_speed(folder, speed)
    except BaseException as error:
        write_end(folder, world.rank, error)
        raise
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
