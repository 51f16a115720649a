"""Every step once, whatever happened to the file."""

from __future__ import annotations

import json
from pathlib import Path

from paceline.observe.clock import PHASES, Clock, computing_share, elapsed
from paceline.observe.journal import Journal, read


def fill(path: Path, first: int, last: int) -> None:
    journal = Journal(path, next_step=first)
    journal.steps((step, 0, 1.5, 0.1) for step in range(first, last))
    journal.close()


def test_a_resumed_run_drops_what_it_will_do_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    fill(path, 0, 7)
    with path.open("a") as file:
        file.write('{"kind": "step", "st')  # killed while writing
    fill(path, 4, 9)
    assert [record["step"] for record in read(path)] == list(range(9))


def test_what_is_no_number_is_null(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    journal = Journal(path)
    journal.steps([(0, 2, float("nan"), None)])
    journal.write([{"kind": "validation", "step": 0, "dev/loss": float("inf"), "dev/wer": 0.25}])
    journal.close()
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"kind": "step", "step": 0, "epoch": 2, "loss": None, "lr": None},
        {"kind": "validation", "step": 0, "dev/loss": None, "dev/wer": 0.25},
    ]


def test_other_ranks_write_nothing(tmp_path: Path) -> None:
    journal = Journal(None)
    journal.steps([(0, 0, 1.0, 0.1)])
    journal.write([{"kind": "validation", "step": 0}])
    journal.close()
    assert not list(tmp_path.iterdir())


def test_the_clock_has_a_name_for_every_moment() -> None:
    clock = Clock()
    before = clock.read()
    for phase in PHASES:
        clock.lap(phase)
    after = clock.read()
    assert all(seconds > 0 for seconds in elapsed(before, after).values())
    began, ended = clock._last, clock._ns.copy()
    clock.lap("data")
    assert sum(clock._ns.values()) - sum(ended.values()) == clock._last - began


def test_computing_time_is_what_is_not_waiting_for_data() -> None:
    assert computing_share({"data": 1.0, "compute": 8.0, "communication": 1.0}) == 0.9
    assert computing_share(dict.fromkeys(PHASES, 0.0)) == 1.0
