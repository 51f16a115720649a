"""Commands that `pyproject.toml` registers for the lab: light, so that `paceline --help` imports nothing else."""

from __future__ import annotations

from paceline.core.plugins import Command

TUNE = Command("measure which settings train a task fastest here, or find a learning rate", "paceline.lab.tune.command")
PREDICT = Command(
    "say how fast a run would be on other numbers of ranks, and what it would cost", "paceline.lab.predict.command"
)
SWEEP = Command("search settings that train a task best, by many trials", "paceline.lab.sweep.command")
COMPARE = Command(
    "compare runs of several seeds: difference of means, p-values, steps to a value", "paceline.lab.compare.command"
)
