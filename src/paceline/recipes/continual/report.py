"""Continual learning in reports: accuracy, forgetting and transfer, and the matrices as heat maps."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from paceline.core.language import translate
from paceline.observe.report.figure import Figure, axis
from paceline.observe.report.runs import ReportedRun
from paceline.observe.report.section import Fact, RecipeReport, Section
from paceline.observe.report.series import short
from paceline.observe.report.texts import table

RESULTS = "continual.json"
"""File of the run folder with matrices and numbers, in percent."""
MATRICES = {"class_il_matrix": "class-IL", "task_il_matrix": "task-IL"}
CELL_PIXELS = 44
"""Height of a cell, and its least width where it has its number in it."""
WRITTEN_UP_TO = 12
"""Tasks up to which each cell has its number in it."""


class ContinualReport(RecipeReport):
    """Reads `continual.json` of a run."""

    def facts(self, run: ReportedRun) -> list[Fact]:
        """Return the mean accuracy over the tasks at the end, in percent, and how much of it was forgotten."""
        results = read_results(run)
        facts = []
        for kind, name in (("class_il", "class-IL accuracy"), ("task_il", "task-IL accuracy")):
            forgotten = results.get(f"{kind}_forgetting")
            if isinstance(results.get(kind), int | float):
                note = "" if forgotten is None else translate("{share:.1f} % forgotten").format(share=forgotten)
                facts.append(Fact(translate(name), f"{results[kind]:.2f} %", note))
        return facts

    def sections(self, runs: Sequence[ReportedRun]) -> list[Section]:
        results = [read_results(run) for run in runs]
        text, figures = _numbers(runs, results), _heat_maps(runs, results)
        return [Section("continual", "Continual learning", text, figures)]


def read_results(run: ReportedRun) -> dict[str, Any]:
    """Return the content of `continual.json`; nothing for a run without it."""
    try:
        results = json.loads((run.folder / RESULTS).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return results if isinstance(results, dict) else {}


def _numbers(runs: Sequence[ReportedRun], results: Sequence[dict[str, Any]]) -> str:
    columns = {
        run.name: {name: value for name, value in result.items() if isinstance(value, float)}
        for run, result in zip(runs, results, strict=True)
        if result
    }
    names = list(dict.fromkeys(name for numbers in columns.values() for name in numbers))
    rows = [
        [_title(name), *(f"{numbers[name]:.2f} %" if name in numbers else "" for numbers in columns.values())]
        for name in names
    ]
    return table(["", *columns], rows, first_is_head=True) if rows else ""


def _title(name: str) -> str:
    """Return `class_il_forgetting` as `class-IL forgetting`; `class_il` alone is the accuracy at the end."""
    kind, _, what = name.replace("_il", "-IL", 1).partition("_")
    return f"{kind} {what or 'accuracy'}".replace("forward", "forward transfer").replace(
        "backward", "backward transfer"
    )


def _heat_maps(runs: Sequence[ReportedRun], results: Sequence[dict[str, Any]]) -> list[Figure]:
    figures = []
    for number, (run, result) in enumerate(zip(runs, results, strict=True)):
        for name, title in MATRICES.items():
            if result.get(name):
                of_run = f": {run.name}" if len(runs) > 1 else ""
                tasks = [str(task) for task in result.get("tasks") or range(1, len(result[name]) + 1)]
                heading = translate(f"{title} accuracy") + of_run
                traces, layout, about = _heat_map(result[name], tasks)
                min_width = 170 + CELL_PIXELS * len(tasks) if len(tasks) <= WRITTEN_UP_TO else 0
                named = f"matrix-{number}-{name}"
                figures.append(Figure(named, heading, traces, layout, about, min_width=min_width))
    return figures


def _heat_map(rows: list[list[float | None]], tasks: list[str]) -> tuple[list[dict[str, Any]], dict[str, Any], str]:
    percent = [[short(None if value is None else 100 * value) for value in row] for row in rows]
    trace: dict[str, Any] = {
        "type": "heatmap",
        "z": percent,
        "x": tasks,
        "y": [translate("after {task}").format(task=task) for task in tasks],
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
        "height": 160 + CELL_PIXELS * len(tasks),
    }
    return [trace], layout, "How much of each task (column) is known after each (row). Empty: not measured."
