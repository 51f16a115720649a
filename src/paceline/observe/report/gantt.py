"""The steps of a timeline as one plot: which phase each rank was in, on one time axis."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.observe.report.figure import Figure
from paceline.observe.report.runs import RunRecord


def gantts(runs: Sequence[RunRecord]) -> list[Figure]:
    return []
