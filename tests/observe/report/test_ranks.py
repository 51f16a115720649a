from __future__ import annotations

from pathlib import Path
from typing import Any

from paceline.observe.report import texts
from paceline.observe.report.ranks import losses, time_lines
from tests.observe.report.made import made, step


def change(at: int, ranks: int, **more: Any) -> dict[str, Any]:
    return {"kind": "ranks", "step": at, "epoch": 0, "ranks": ranks, "time": 1.0, "hosts": ["node1"] * ranks, **more}


LOST = {"lost": [{"rank": 3, "host": "node2", "why": "ended by SIGKILL"}], "seconds": 0.5, "repeated": 2}
JOINED = {"joined": [{"rank": 3, "host": "node2"}]}


def test_time_line_of_ranks(tmp_path: Path) -> None:
    lines = [*(step(number, 1.0) for number in range(10)), change(0, 4), change(4, 3, **LOST), change(7, 4, **JOINED)]
    (figure,) = time_lines([made(tmp_path, lines)])
    (trace,) = figure.traces
    assert (trace["x"], trace["y"]) == ([0, 4, 7, 9], [4, 3, 4, 4])
    assert trace["text"] == ["", "rank 3 on node2 was lost", "rank 3 on node2 joined", ""]


def test_lost_ranks_are_named_with_how_often(tmp_path: Path) -> None:
    run = made(tmp_path, [step(0, 1.0), change(0, 4), *(change(at, 3, **LOST) for at in (2, 4, 6, 8))])
    (held,) = losses(run)
    assert held.text == "rank 3 on node2 was lost 4 times"
    assert "4 deaths cost 2.0 s and 8 repeated steps" in held.advice
    assert "Rank 3 on node2 was lost 4 times" in texts.verdicts([run])


def test_run_whose_ranks_never_changed_says_nothing_of_them(tmp_path: Path) -> None:
    run = made(tmp_path, [step(0, 1.0), change(0, 4)])
    assert time_lines([run]) == []
    assert losses(run) == []
