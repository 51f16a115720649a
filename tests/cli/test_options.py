"""`paceline train` with a task's own settings, files, names and what is written down, through the real command."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from paceline.cli.main import main

TOWER = f"{Path(__file__).parent / 'own_settings.py'}:Tower"
QUICK = ["--device", "cpu", "--threads", "1", "--global-batch", "8", "--loggers", "none", "--progress", "none"]


@pytest.fixture(autouse=True)
def _own_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)


def record(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "run.json").read_text())
    return found


def test_a_task_has_settings_and_defaults_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--depth", "3", TOWER, "--widths", "4", "5", "--print-config"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert {"lr: 0.25", "epochs: 1", "depth: 3"} <= set(lines)
    assert lines[lines.index("widths:") :][:3] == ["widths:", "- 4", "- 5"]
    assert "# What the tower is built of." in lines
    assert main(["train", TOWER, "--depth", "0", "--widht", "3", "--lr", "-1"]) == 2
    assert capsys.readouterr().err.splitlines()[1:-1] == [
        "  --depth 0: must be above 0",
        "  --widht 3: there is no such option",
        "    did you mean --widths?",
        "  --lr -1: must be above 0",
    ]
    assert main(["train", TOWER, "--widths", "1", "2", "3"]) == 2
    assert "--widths has more entries than --depth has layers" in capsys.readouterr().err


def test_help_of_a_task_shows_its_own_section(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", TOWER, "--help"]) == 0
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "tower options" in shown
    assert "What the tower is built of." in shown
    assert "Layers of the tower. (default: 2)" in shown
    assert "(default: 0.25)" in shown
    assert shown.index("train options") < shown.index("run options") < shown.index("optim options")
    assert "--config PATH" in shown


def test_printed_settings_are_read_back(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = ["--steps", "3", "--groups", "match=*.bias,lr_scale=2", "--resume", "no", "--schedule", "cosine", "-O0"]
    assert main(["train", TOWER, *words, "--print-config"]) == 0
    printed = capsys.readouterr().out
    (tmp_path / "a.yaml").write_text(printed)
    assert main(["train", TOWER, "--config", "a.yaml", "--print-config"]) == 0
    assert capsys.readouterr().out == printed
    assert list(tmp_path.iterdir()) == [tmp_path / "a.yaml"]


def test_a_name_is_never_used_twice_but_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["train", TOWER, *QUICK, "--exp-name", "a", "--runs-dir", "all"]
    monkeypatch.setattr(sys, "argv", ["/usr/bin/paceline", *words])
    assert main(words) == main(words) == 0
    assert sorted(path.name for path in (tmp_path / "all").iterdir()) == ["a", "a-2"]
    first = record(tmp_path / "all" / "a")
    assert first["task"] == TOWER
    assert first["settings"]["depth"] == 2
    assert first["status"] == "finished"
    assert [start["command"] for start in first["starts"]] == [" ".join(["paceline", *words])]
    assert first["starts"][0]["versions"].keys() == {"python", "torch", "numpy", "paceline"}
    assert first["starts"][0]["git"] is None

    assert main([*words, "--log-every", "3", "--resume", "auto"]) == 0
    assert sorted(path.name for path in (tmp_path / "all").iterdir()) == ["a", "a-2"]
    resumed = record(tmp_path / "all" / "a")
    assert len(resumed["starts"]) == 2
    assert len(record(tmp_path / "all" / "a-2")["starts"]) == 1


def test_without_a_name_the_task_and_the_time_name_it(tmp_path: Path) -> None:
    assert main(["train", TOWER, *QUICK]) == 0
    (run,) = (tmp_path / "runs").iterdir()
    assert run.name.startswith("Tower-20")


def test_a_task_that_cannot_be_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "t.py").write_text(
        "import paceline\nclass T(paceline.Task):\n    def __init__(self):\n        raise OSError('no disk')\n"
    )
    assert main(["train", "t.py:T", "--steps", "1", *QUICK]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("error: t.py fails while T() is made\n\nTraceback")
    assert shown.rstrip().endswith("OSError: no disk")
    assert "paceline/cli" not in shown
    (tmp_path / "t.py").write_text("def f(:\n")
    assert main(["train", "t.py:T", "--steps", "1", *QUICK]) == 2
    shown = capsys.readouterr().err
    assert "line 1" in shown
    assert shown.rstrip().endswith("SyntaxError: invalid syntax")
    assert "paceline/cli" not in shown


def test_one_rank_that_is_restarted_needs_a_folder(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", TOWER, *QUICK, "--max-restarts", "1"]) == 2
    assert "add `--out FOLDER`" in capsys.readouterr().err


def test_what_is_typed_goes_before_the_settings_of_the_demo(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--lr", "0.5", "--procs", "1", "--print-config"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "# paceline train asr --config THIS_FILE"
    assert {"lr: 0.5", "device: cpu", "schedule: cosine"} <= set(lines)
