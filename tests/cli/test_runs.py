"""`paceline runs` and `paceline diff` on runs made by the real command."""

from __future__ import annotations

import fcntl
import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.cli.diff import differences
from paceline.cli.main import main
from paceline.core.run_folder import RunRecord
from paceline.observe.journal import read

TOWER = f"{Path(__file__).parent / 'own_settings.py'}:Tower"
QUICK = ["--device", "cpu", "--threads", "1", "--global-batch", "4", "--loggers", "none", "--progress", "none"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Two finished runs and one that cannot be read."""
    folder = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", list(sys.path))
        patch.setattr(sys, "argv", ["paceline", "train", "tower"])
        for name, words in {"a": [], "sub/b": ["--lr", "0.01", "--epochs", "3"]}.items():
            assert main(["train", TOWER, *QUICK, "--out", str(folder / name), *words]) == 0
        (folder / "broken").mkdir()
        (folder / "broken" / "run.json").write_text("{")
        yield folder


def test_runs_are_listed(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert main(["runs", str(runs), "--json"]) == 0
    listed = {line["name"]: line for line in json.loads(capsys.readouterr().out)}
    assert listed.keys() == {"a", "sub/b", "broken"}
    assert listed["broken"]["status"] == "run.json is broken"
    for name, steps in {"a": 2, "sub/b": 6}.items():
        line, metrics = listed[name], runs / name / "metrics.jsonl"
        scores = [entry["dev/loss"] for entry in read(metrics, "validation")]
        assert (line["task"], line["status"], line["steps"]) == ("own_settings.py:Tower", "finished", steps)
        assert line["loss"] == read(metrics)[-1]["loss"]
        assert (line["metric"], line["last"], line["best"]) == ("dev/loss", scores[-1], min(scores))
        assert line["when"].startswith("20")


def test_a_run_that_was_killed_is_not_running(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As SIGKILL leaves it: `running` in run.json, and a lock that nobody has."""
    shutil.copytree(runs / "a", tmp_path / "a")
    record = json.loads((tmp_path / "a" / "run.json").read_text())
    (tmp_path / "a" / "run.json").write_text(json.dumps({**record, "status": "running"}))

    def status() -> str:
        capsys.readouterr()
        assert main(["runs", str(tmp_path), "--json"]) == 0
        (line,) = json.loads(capsys.readouterr().out)
        return str(line["status"])

    assert status() == "died"
    with (tmp_path / "a" / ".lock").open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert status() == "running"
    (tmp_path / "a" / ".lock").write_text("pid 5 on node7\n")
    assert status() == "running or died on node7"


def test_the_table_has_a_line_per_run(
    runs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    capsys.readouterr()
    assert main(["runs", str(runs)]) == 0
    shown = capsys.readouterr().out
    assert [line.split()[0] for line in shown.splitlines() if "finished" in line] == ["a", "sub/b"]
    assert main(["runs", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"no runs in {tmp_path}\n"
    assert main(["runs", str(tmp_path / "absent")]) == 2
    assert "there is no folder" in capsys.readouterr().err


def test_a_difference_is_shown_and_is_the_exit_code(
    runs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    capsys.readouterr()
    assert main(["diff", str(runs / "a"), str(runs / "a")]) == 0
    assert capsys.readouterr().out == "no difference\n"
    assert main(["diff", str(runs / "a"), str(runs / "sub" / "b")]) == 1
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["lr", "0.25", "0.01"] in rows
    assert ["epochs", "1", "3"] in rows
    assert not any("out" in row for row in rows)
    assert main(["diff", str(runs / "a"), str(runs)]) == 2
    assert "holds no run" in capsys.readouterr().err
    assert main(["diff", str(runs / "a"), str(runs / "broken")]) == 2
    assert "run.json is not JSON" in capsys.readouterr().err
    assert main(["diff", str(runs / "a")]) == 2
    assert "RIGHT: is missing" in capsys.readouterr().err


def test_versions_code_and_command_lines_are_compared() -> None:
    def record(**start: Any) -> RunRecord:
        return RunRecord({"lr": 1, "out": str(start)}, task="t", grains=1, starts=[{}, start])

    ours = record(command="paceline a", versions={"torch": "1"}, git={"commit": "c", "dirty": False})
    theirs = record(command="paceline b", versions={"torch": "2"}, git=None)
    assert differences(ours, ours) == {}
    assert differences(ours, theirs) == {
        "start": {
            "command": ("paceline a", "paceline b"),
            "torch": ("1", "2"),
            "git commit": ("c", "(none)"),
            "git dirty": ("False", "(none)"),
        }
    }
