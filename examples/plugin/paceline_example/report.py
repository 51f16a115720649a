"""A report section: the size of the network and the circles that it tells apart."""

from __future__ import annotations

import math
from collections.abc import Sequence

from paceline.plugins import Fact, Figure, RecipeReport, ReportedRun, Section


class RingsReport(RecipeReport):
    """Report the accuracy of the recipe `rings` in percent, and show its two circles."""

    goals = ("accuracy",)
    percent = ("accuracy",)

    def facts(self, run: ReportedRun) -> Sequence[Fact]:
        return [Fact("width of the network", str(run.settings["hidden"]))] if _is_of_rings(run) else []

    def sections(self, runs: Sequence[ReportedRun]) -> Sequence[Section]:
        if not any(map(_is_of_rings, runs)):
            return []
        angles = [math.tau * number / 100 for number in range(101)]
        circles = [
            {"x": [radius * math.cos(a) for a in angles], "y": [radius * math.sin(a) for a in angles], "name": name}
            for radius, name in ((1, "inner ring"), (2, "outer ring"))
        ]
        return [Section("rings", "Rings", figures=[Figure("rings", "The two circles", circles)])]


def _is_of_rings(run: ReportedRun) -> bool:
    return run.task == "rings"
