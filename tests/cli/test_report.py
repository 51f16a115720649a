"""`paceline report` as it is typed: where the page goes, and what is said of mistakes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.cli.main import main
from tests.observe.report.made import usual, write_run
from tests.train.checkpoint.test_writer import small_disk

pytest.importorskip("plotly", reason="plotly is not installed")


def test_a_page_for_one_run_lies_in_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "a", usual())
    assert main(["report", str(run)]) == 0
    assert "<h1>a</h1>" in (run / "report.html").read_text(encoding="utf-8")
    assert f"report in {run / 'report.html'}" in capsys.readouterr().out
    assert [path.name for path in run.iterdir() if path.name.startswith(".")] == []


def test_a_page_for_several_runs_lies_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [write_run(tmp_path / "a", usual()), write_run(tmp_path / "b", usual(), status="running", lr=0.5)]
    monkeypatch.chdir(tmp_path)
    assert main(["report", *map(str, runs)]) == 0
    assert "b: not finished, shown as far as it came" in capsys.readouterr().out
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "<h1>2 runs</h1>" in page
    assert "Settings that differ" in page
    assert main(["report", *map(str, runs), "--out", "other.html"]) == 0
    assert (tmp_path / "other.html").exists()


def test_a_full_disk_keeps_no_half_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, disk = write_run(tmp_path / "a", usual()), tmp_path / "disk"
    disk.mkdir()
    with small_disk(disk, 64 * 1024):
        assert main(["report", str(run), "--out", str(disk / "page.html")]) == 2
        assert list(disk.iterdir()) == []
        errors = capsys.readouterr().err
    assert "page.html cannot be written: No space left on device" in errors
    assert "are needed there" in errors
    assert "make room" in errors


def test_lines_that_cannot_be_read_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "a", usual())
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(b'garbage\n\xff\xfe\n{"kind": "step"}\n[1, 2]\n{"kind": "step", "st')
    assert main(["report", str(run)]) == 0
    assert f"; left out, because they cannot be read: 4 lines of {run / 'metrics.jsonl'}" in capsys.readouterr().out
    assert "4 lines of metrics.jsonl cannot be read" in (run / "report.html").read_text(encoding="utf-8")
    assert main(["runs", str(tmp_path), "--json"]) == 0
    (line,) = json.loads(capsys.readouterr().out)
    assert (line["steps"], line["loss"]) == (4, 1.0)


def test_mistakes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "a", usual())
    empty = write_run(tmp_path / "empty", [], status="running")
    for words, said in (
        ([], "RUNS: is missing"),
        ([tmp_path / "absent"], "there is no folder"),
        ([tmp_path], "holds no run"),
        ([empty], "has no steps yet (status: running or died)"),
        ([run, "--out", tmp_path / "no" / "such" / "place.html"], "cannot be written: No such file or directory"),
        ([run, "--out", tmp_path], "cannot be written"),
        ([run, "--output", "x.html"], "--out"),
    ):
        assert main(["report", *map(str, words)]) == 2
        errors = capsys.readouterr().err
        assert said in errors
        assert "Traceback" not in errors


def test_recipes_in_reports_do_not_wait_for_torch() -> None:
    code = (
        "import sys; from paceline.observe.report.section import recipe_reports; "
        "recipe_reports(); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
