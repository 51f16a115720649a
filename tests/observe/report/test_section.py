"""A recipe adds its words, facts and sections to the page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from paceline.observe.report.curves import metrics
from paceline.observe.report.page import sections
from paceline.observe.report.runs import ReportedRun, read_run
from paceline.observe.report.section import Fact, RecipeReport, Section
from paceline.observe.report.summary import facts
from tests.observe.report.made import usual, write_run


class Own(RecipeReport):
    """A recipe whose runs have a file of its own."""

    goals, percent = ("wer",), ("wer",)

    def facts(self, run: ReportedRun) -> list[Fact]:
        return [Fact("own", "1", run.name)]

    def sections(self, runs: Sequence[ReportedRun]) -> list[Section]:
        return [Section("own", "Of its own", "<p>here</p>"), Section("empty", "Nothing")]


def test_a_recipe_adds_goals_facts_and_sections(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", usual())
    plain, run = read_run(folder), read_run(folder, recipes=[Own()])
    assert (plain.monitor, run.monitor) == ("dev/loss", "dev/wer")
    assert [figure.layout["yaxis"].get("tickformat") for figure in metrics([plain])] == [None, None]
    assert [figure.layout["yaxis"].get("tickformat") for figure in metrics([run])] == [".3~%", None]
    assert Fact("own", "1", "a") in facts(run)
    names = [section.name for section in sections([run])]
    assert names == ["summary", "verdict", "learning", "own", "empty", "samples", "time", "settings"]
