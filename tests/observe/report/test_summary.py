"""The summary has the numbers of the journal."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.observe.report.runs import read_run
from paceline.observe.report.section import RecipeReport
from paceline.observe.report.summary import best, computing, facts, training_s
from tests.observe.report.made import made, usual, write_run


class ErrorRates(RecipeReport):
    goals, percent = ("wer",), ("wer",)


def test_the_summary_has_the_numbers_of_the_journal(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "a", usual()), recipes=[ErrorRates()])
    assert run.monitor == "dev/wer"
    assert best(run) == (0.25, 3)
    assert best(made(tmp_path, name="up", monitor="dev/wer", monitor_mode="max")) == (0.5, 1)
    assert computing(run) == pytest.approx(1 - 4 / 40)
    assert training_s(run) == 20.0
    shown = {fact.name: fact.value for fact in facts(run)}
    assert shown["best dev/wer"] == "25.00 %"
    assert shown["training loss, last step"] == "1"
    assert shown["steps"] == "4"
    assert shown["computing time"] == "90.0 %"
    assert shown["padding"] == "12.5 %"
    assert shown["ranks"] == "2"
