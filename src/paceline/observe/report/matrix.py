"""What a continual learner knows of each task after each: its matrices as heat maps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paceline.observe.report.figure import Figure, axis
from paceline.observe.report.runs import RunRecord
from paceline.observe.report.series import short

NAMES = {"class_il_matrix": "class-IL", "task_il_matrix": "task-IL"}
WRITTEN_UP_TO = 12
"""Tasks up to which each cell has its number in it."""


def matrices(runs: Sequence[RunRecord]) -> list[Figure]:
    figures = []
    for number, run in enumerate(runs):
        found = run.continual or {}
        for name, title in NAMES.items():
            if found.get(name):
                whose = f": {run.name}" if len(runs) > 1 else ""
                tasks = [str(task) for task in found.get("tasks") or range(1, len(found[name]) + 1)]
                heading = f"{title} accuracy{whose}"
                figures.append(Figure(f"matrix-{number}-{name}", heading, *_heat_map(found[name], tasks)))
    return figures


def _heat_map(rows: list[list[float | None]], tasks: list[str]) -> tuple[list[dict[str, Any]], dict[str, Any], str]:
    percent = [[short(None if value is None else 100 * value) for value in row] for row in rows]
    trace: dict[str, Any] = {
        "type": "heatmap",
        "z": percent,
        "x": tasks,
        "y": [f"after {task}" for task in tasks],
        "zmin": 0,
        "zmax": 100,
        "colorscale": [[0, "#e9f0fb"], [1, "#123e82"]],
        "xgap": 2,
        "ygap": 2,
        "colorbar": {"title": {"text": "%"}, "thickness": 10},
        "hovertemplate": "%{y}: %{x} %{z:.1f} %<extra></extra>",
    }
    if len(tasks) <= WRITTEN_UP_TO:
        trace |= {"texttemplate": "%{z:.1f}"}
    layout = {
        "xaxis": axis("", type="category", side="top"),
        "yaxis": axis("", type="category", autorange="reversed", automargin=True),
        "height": 160 + 44 * len(tasks),
    }
    return [trace], layout, "How much of each task (column) is known after each (row). Empty: not measured."
