"""A run as the report reads it: what it is, and what is refused."""

from __future__ import annotations

import fcntl
import socket
from pathlib import Path

import pytest

from paceline.core.errors import Unreadable
from paceline.observe.report.runs import EmptyRun, NoRun, read_run, short_names
from tests.observe.report.made import usual, write_run


def test_a_line_that_a_crash_cut_short_is_left_out(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", usual(), status="running")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "step", "st')
    run = read_run(folder)
    assert [record.step for record in run.steps] == [0, 1, 2, 3]
    assert run.standing == "not finished: running or died, which cannot be told from here"
    assert run.num_unread == 0, "a line may be cut short at the end"
    (folder / ".lock").write_text(f"pid 1 on {socket.gethostname()}\n")
    assert read_run(folder).standing.startswith("died without a word")
    with (folder / ".lock").open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert read_run(folder).standing == "not finished: still running"


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NoRun, match="there is no folder"):
        read_run(tmp_path / "absent")
    with pytest.raises(NoRun, match="holds no run"):
        read_run(tmp_path)
    with pytest.raises(EmptyRun, match="no steps yet"):
        read_run(write_run(tmp_path / "empty", [], status="running"))
    with pytest.raises(EmptyRun) as failed:
        read_run(write_run(tmp_path / "failed", [], status="failed"))
    assert "failed before its first steps" in failed.value.hint
    died = write_run(tmp_path / "died", [], status="running")
    (died / ".lock").write_text(f"pid 1 on {socket.gethostname()}\n")
    with pytest.raises(EmptyRun, match=r"no steps yet \(status: died\)") as failed:
        read_run(died)
    assert "died before its first steps" in failed.value.hint
    for status in ("finished", "early", "stopped"):
        over = write_run(tmp_path / status, [], status=status)
        with pytest.raises(EmptyRun, match=rf"metrics.jsonl holds no steps, and the run is over \(status: {status}\)"):
            read_run(over)
        (over / "metrics.jsonl").unlink()
        with pytest.raises(EmptyRun, match=r"metrics.jsonl is missing") as lost:
            read_run(over)
        assert "wait" not in lost.value.hint
    (tmp_path / "broken").mkdir()
    for text, why in (("{", "Expecting"), ('{"task": "a", "settings": {}}', "no 'status'"), ("[]", "no 'settings'")):
        (tmp_path / "broken" / "run.json").write_text(text)
        with pytest.raises(Unreadable, match=why):
            read_run(tmp_path / "broken")


def test_names_are_short_and_different() -> None:
    assert short_names([Path("/a/x"), Path("/a/y")]) == ["x", "y"]
    assert short_names([Path("/a/x"), Path("/b/x")]) == ["a/x", "b/x"]
    assert short_names([Path("/a/x"), Path("/a/x")]) == ["x (1)", "x (2)"]
