"""Findings of epochs, joined over a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paceline.core.units import ranges
from paceline.observe.report import texts
from paceline.observe.report.findings import held_back
from tests.observe.report.made import epoch, made, step


def test_what_held_back_is_joined_over_epochs(tmp_path: Path) -> None:
    def finding(share: float) -> dict[str, Any]:
        return {"kind": "data", "rank": 1, "text": f"data wait {share}", "advice": "`--workers 8`", "share": share}

    ranks = [{"compute": 1.0}, {"compute": 1.0}]
    found = [[finding(0.4)], [], [finding(0.2)], [finding(0.3)]]
    records = [step(0, 1.0), *(epoch(number, ranks, findings=each) for number, each in enumerate(found))]
    (held,) = held_back(made(tmp_path, records))
    assert (held.text, held.share, held.when) == ("data wait 0.3", 0.4, "in 3 of 4 epochs (1, 3-4)")
    assert ranges([1, 2, 3, 7, 9, 10]) == "1-3, 7, 9-10"
    assert "<code>--workers 8</code>" in texts.verdicts([made(tmp_path, records, "again")])


def test_nothing_found_is_good_only_where_something_was_looked_at(tmp_path: Path) -> None:
    long, short, few = [{"compute": 9.0}], [{"compute": 0.9}], {"steps": 9}
    for name, epochs, is_good, said in (
        ("none", [], False, "No epoch has ended"),
        ("one", [epoch(0, short, steps=100)], False, "The one epoch was shorter than 10 steps or 1 second"),
        ("two", [epoch(0, short, steps=100), epoch(1, long, **few)], False, "All 2 epochs were shorter than"),
        ("some", [epoch(0, long, steps=100), epoch(1, long, **few)], True, "was seen in 1 of 2 epochs; the others"),
        ("all", [epoch(0, long, steps=100)], True, "hold runs back was seen."),
    ):
        page = texts.verdicts([made(tmp_path, [step(0, 1.0), *epochs], name)])
        assert said in page
        assert ('class="good"' in page) == is_good


def test_a_run_older_than_verdicts_gets_one(tmp_path: Path) -> None:
    ranks = [{"data": 1.0, "compute": 9.0}, {"data": 5.0, "compute": 5.0}]
    record = epoch(0, ranks) | {"steps": 100}
    (held,) = held_back(made(tmp_path, [step(0, 1.0), record]))
    assert held.kind == "data"
    assert "50 %" in held.text
