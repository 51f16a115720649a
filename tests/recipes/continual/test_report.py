"""A continual run in a report: numbers and matrices of its file, and nothing of runs without one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.observe.report.page import sections
from paceline.observe.report.runs import ReportedRun, read_runs
from paceline.observe.report.summary import facts
from paceline.recipes.continual.report import ContinualReport
from tests.observe.report.made import usual, write_run


def runs(tmp_path: Path, *results: dict[str, Any] | str | None) -> list[ReportedRun]:
    folders = []
    for number, result in enumerate(results):
        folders.append(write_run(tmp_path / str(number), usual()))
        if result is not None:
            text = result if isinstance(result, str) else json.dumps(result)
            (folders[-1] / "continual.json").write_text(text)
    return read_runs(folders, [ContinualReport()])


def test_the_summary_has_what_is_known_at_the_end(tmp_path: Path) -> None:
    (run,) = runs(tmp_path, {"class_il": 28.857, "class_il_forgetting": 12.25, "tasks": []})
    shown = {fact.name: (fact.value, fact.note) for fact in facts(run)}
    assert shown["class-IL accuracy"] == ("28.86 %", "12.2 % forgotten")
    assert "task-IL accuracy" not in shown


def test_numbers_and_a_heat_map_for_each_matrix(tmp_path: Path) -> None:
    objects = pytest.importorskip("plotly.graph_objects", reason="plotly is not installed")
    results = {"tasks": ["a", "b"], "class_il": 50.0, "class_il_backward": -1.5}
    found = runs(tmp_path, {**results, "class_il_matrix": [[0.5, None], [0.25, 0.75]]}, None)
    (section,) = [section for section in sections(found) if section.name == "continual"]
    assert "class-IL backward transfer" in section.text
    assert "-1.50 %" in section.text
    (figure,) = section.figures
    assert figure.title == "class-IL accuracy: 0"
    assert figure.traces[0]["z"] == [[50.0, None], [25.0, 75.0]]
    objects.Figure(data=figure.as_json()["data"], layout=figure.as_json()["layout"])


@pytest.mark.parametrize("result", [None, "{", "[1]"])
def test_a_run_without_results_has_no_section(tmp_path: Path, result: str | None) -> None:
    (section,) = [section for section in sections(runs(tmp_path, result)) if section.name == "continual"]
    assert section.is_empty
