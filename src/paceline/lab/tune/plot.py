"""A loss over a learning rate, drawn with letters: what a terminal can show anywhere."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from paceline.lab.tune.range_test import Point, smooth

COLUMNS, ROWS = 64, 12


def plot(points: Sequence[Point], marks: Mapping[str, float]) -> list[str]:
    """The smoothed loss over the rate, both cut where it went through the roof; a line below marks rates."""
    smoothed = smooth([point.loss for point in points])
    finite = [
        (math.log10(point.rate), loss) for point, loss in zip(points, smoothed, strict=True) if math.isfinite(loss)
    ]
    if len(finite) < 2:
        return []
    left, right = finite[0][0], finite[-1][0]
    first, low = finite[0][1], min(loss for _, loss in finite)
    high = min(max(loss for _, loss in finite), first + 0.5 * max(first - low, abs(first) * 0.1))
    grid = [[" "] * COLUMNS for _ in range(ROWS)]
    for rate, loss in finite:
        share = (min(loss, high) - low) / (high - low) if high > low else 0.0
        grid[ROWS - 1 - round(share * (ROWS - 1))][_column(rate, left, right)] = "o"
    lines = [f"{_axis(row, low, high):>9} |{''.join(cells).rstrip()}" for row, cells in enumerate(grid)]
    below = [" "] * COLUMNS
    for mark, rate in marks.items():
        below[_column(math.log10(rate), left, right)] = mark
    ends = f"{10**left:.1e}", f"{10**right:.1e}"
    gap = " " * (COLUMNS - len(ends[0]) - len(ends[1]))
    return [*lines, f"{'':9} +{'-' * COLUMNS}", f"{'':11}{''.join(below).rstrip()}", f"{'':11}{ends[0]}{gap}{ends[1]}"]


def _column(rate: float, left: float, right: float) -> int:
    return round(min(1.0, max(0.0, (rate - left) / (right - left))) * (COLUMNS - 1)) if right > left else 0


def _axis(row: int, low: float, high: float) -> str:
    return f"{high - (high - low) * row / (ROWS - 1):.4g}" if row % 3 == 0 or row == ROWS - 1 else ""
