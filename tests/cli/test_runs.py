"""`paceline runs` and `paceline diff` on runs made by the real command."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len

from paceline.cli.diff import differences
from paceline.cli.main import main
from paceline.core.run_folder import RunRecord
from paceline.observe import run_table
from paceline.observe.journal import read
from paceline.observe.run_table import RunLine, table

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
    (tmp_path / "file").touch()
    assert main(["runs", str(tmp_path / "file")]) == 2
    assert f"{tmp_path / 'file'} is a file, not a folder of runs" in capsys.readouterr().err


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


def made(name: str, **more: Any) -> RunLine:
    plain = RunLine(name, "asr", "finished", 1234, 0.123456, "dev-clean/wer", 0.25, 0.125, "2026-01-02 03:04:05")
    return replace(plain, **more)


LONG = "experiments/quartznet15x5-novograd-lr0.015-8gpu/seed-7"
CHINESE = "实验/语音识别-第一次-学习率0.01-批量256-四块显卡"


@pytest.mark.parametrize("width", [20, 40, 60, 80, 100, 120, 200])
def test_a_table_fits_and_no_name_is_broken(width: int) -> None:
    """On ce01e4b it was 132 columns wide, and names were folded over lines."""
    lines = [made("a"), made(LONG, status="running", done=0.5, left_s=3600.0), made(CHINESE)]
    shown = table(lines, width).splitlines()
    assert len(shown) == 2 + len(lines), "a line each"
    assert max(cell_len(line) for line in shown) <= width
    assert shown[2].split()[0] == "a"
    assert shown[3].startswith("exp")
    assert ("..." if width < 130 else LONG) in shown[3]


def test_columns_go_by_importance_and_names_stay_different() -> None:
    lines = [made(f"{LONG}-{seed}", status="running", done=0.123, left_s=5025.0) for seed in (1, 2)]
    wide, usual = table(lines, 10_000), table(lines, 80)
    assert " ".join(wide.split("\n")[0].split()) == "run status steps done loss metric last best task when"
    assert LONG in wide
    assert "12%, 1:23:45 left" in usual
    assert {"task", "when"}.isdisjoint(usual.split("\n")[0].split())
    first, second = usual.splitlines()[2:]
    assert first.split()[0].endswith("-1")
    assert second.split()[0].endswith("-2")


def test_a_run_that_goes_on_says_how_far_it_is(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(runs / "a", tmp_path / "a")
    record = json.loads((tmp_path / "a" / "run.json").read_text())
    (tmp_path / "a" / "run.json").write_text(json.dumps({**record, "status": "running"}))
    look = {"kind": "progress", "step": 1, "epoch": 2, "epochs": 400, "done": 0.005, "left_s": 7200.0, "time": 1000.0}
    with (tmp_path / "a" / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(look) + "\n")
    monkeypatch.setattr(run_table.time, "time", lambda: 1060.0)
    capsys.readouterr()
    with (tmp_path / "a" / ".lock").open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert main(["runs", str(tmp_path), "--json"]) == 0
        (line,) = json.loads(capsys.readouterr().out)
        assert (line["epoch"], line["epochs"], line["done"], line["left_s"]) == (2, 400, 0.005, 7140.0)
        assert main(["runs", str(tmp_path)]) == 0
        assert "0%, 1:59:00 left" in capsys.readouterr().out
    assert main(["runs", str(tmp_path), "--json"]) == 0
    (line,) = json.loads(capsys.readouterr().out)
    assert (line["status"], line["left_s"], line["done"]) == ("died", None, 0.005)
    (tmp_path / "a" / "run.json").write_text(json.dumps({**record, "status": "finished"}))
    assert main(["runs", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["done"] == 1.0, "whenever its progress was looked at last"


def test_a_journal_of_nonsense_gives_a_line(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(runs / "a", tmp_path / "a")
    nonsense = [
        {
            "kind": "progress",
            "step": "x",
            "epoch": [],
            "epochs": "many",
            "done": float("nan"),
            "left_s": {},
            "time": "",
        },
        {"kind": "validation", "step": 1, "dev/loss": "low"},
    ]
    with (tmp_path / "a" / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in nonsense)
        file.write('{"kind": "step", "step": "x", "loss": "y"}\n')
    record = json.loads((tmp_path / "a" / "run.json").read_text())
    (tmp_path / "a" / "run.json").write_text(json.dumps({**record, "starts": ["then"]}))
    capsys.readouterr()
    assert main(["runs", str(tmp_path)]) == 0
    assert "finished" in capsys.readouterr().out


ESC = "\x1b[2J\x1b]0;owned\x07\u202e"


def hostile_run(folder: Path, *, record: object = None, lines: list[dict[str, Any]] | None = None) -> Path:
    """A run folder as a stranger may send it."""
    folder.mkdir(parents=True)
    start = {"time": f"2026-01-01{ESC}", "command": f"paceline {ESC}", "host": ESC, "versions": {ESC: ESC}, "git": None}
    plain = {"settings": {"lr": ESC, ESC: 1, "monitor": f"dev/{ESC}"}, "task": ESC, "status": f"x{ESC}", "grains": 1}
    (folder / "run.json").write_text(json.dumps({**plain, "starts": [start]} if record is None else record))
    step = {"kind": "step", "step": 0, "epoch": 0, "loss": 1.0, "lr": 0.1}
    lines = [{"kind": "validation", "step": 0, "epoch": 0, f"dev/{ESC}": 1.0}] if lines is None else lines
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in [step, *lines]))
    return folder


def test_text_of_a_run_does_not_command_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On ce01e4b `runs` and `diff` wrote ESC characters of run.json, and of names of folders, as they are."""
    hostile_run(tmp_path / f"a{ESC}")
    other = hostile_run(tmp_path / "b", record={"settings": {}, "task": "t", "status": "finished", "grains": 1})
    (tmp_path / "b" / ".lock").write_text(f"pid 1 on {ESC}")
    for words in (
        ["runs", str(tmp_path)],
        ["diff", str(tmp_path / f"a{ESC}"), str(other)],
        ["runs", f"{tmp_path}{ESC}"],
    ):
        main(words)
        shown = capsys.readouterr()
        assert "x1b" in shown.out + shown.err
        assert not set("\x1b\x07\u202e") & set(shown.out + shown.err)


FINDING = {"kind": "data", "text": "t", "advice": "a"}


@pytest.mark.parametrize(
    "epoch",
    [
        {"findings": [{"text": "t", "advice": "a"}, {}, 3, None, FINDING]},
        {"findings": {"a": 1}},
        {"memory": {"host_bytes": 1}, "meetings": [], "way": 3, "device": {"ms": 3}, "seconds": [{"data": None}]},
        {"loss": "low", "rates": {"a": "b"}, "hosts": 3, "steps": [], "padding": 10**400, "more": 1},
    ],
)
def test_records_of_another_form_are_as_if_missing(
    epoch: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On ce01e4b a finding without a kind was a traceback of `report`."""
    lines = [{"kind": "epoch", "step": 0, "epoch": 0, **epoch}, {"kind": "validation", "step": 0, "dev/loss": []}]
    run = hostile_run(tmp_path / "a", lines=lines)
    assert main(["report", str(run), "--out", str(tmp_path / "a.html")]) == 0, capsys.readouterr().err
    assert main(["runs", str(tmp_path)]) == 0


@pytest.mark.parametrize("name", ["run.json", "metrics.jsonl", ".lock", "checkpoints"])
@pytest.mark.parametrize("kind", ["folder", "pipe", "deep"])
def test_something_else_in_place_of_a_file(
    name: str, kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No traceback, and no waiting for a pipe."""
    run = hostile_run(tmp_path / "runs" / "a")
    record = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps({**record, "status": "running"}))
    (run / name).unlink(missing_ok=True)
    if kind == "folder" and name != "checkpoints":
        (run / name).mkdir()
    elif kind == "pipe":
        os.mkfifo(run / name)
    else:
        (run / name).write_text("[" * 100_000)
    assert main(["runs", str(tmp_path / "runs")]) == 0
    train = ["train", TOWER, *QUICK, "--resume", "auto", "--out", str(run)]
    for words in (["diff", str(run), str(run)], ["report", str(run), "--out", str(tmp_path / "a.html")], train):
        assert main(words) in (0, 2)
    capsys.readouterr()
