"""A command: `paceline points` prints the points of the recipe `rings`."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.plugins import Command, read_options
from paceline.settings import Positive, Section

COMMAND = Command("print points of the recipe rings", "paceline_example.points")


class PointsOptions(Section):
    """Print points of the recipe rings as lines of x, y and label."""

    count: Positive
    """Number of points."""
    seed: int = 1
    """Seed of the points."""


OPTIONS, POSITIONAL = PointsOptions, ("count",)


def run(argv: Sequence[str]) -> int:
    """Print the points and return the exit code."""
    options = read_options(PointsOptions, argv, prog="paceline points", positional=POSITIONAL)
    from paceline_example.rings import rings  # imports torch, which `paceline --help` does not need

    for (x, y), label in rings(options.count, options.seed):
        print(f"{x:.4f},{y:.4f},{label}")
    return 0
