"""What is written down with a run, against git itself."""

from __future__ import annotations

import platform
import subprocess
from pathlib import Path

import numpy
import pytest
import torch

from paceline.core.provenance import command_line, git_state, versions


def git(folder: Path, *words: str) -> str:
    who = ["-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false"]
    return subprocess.run(["git", *who, *words], cwd=folder, check=True, capture_output=True, text=True).stdout.strip()


def test_git_state_is_what_git_says(tmp_path: Path) -> None:
    assert git_state(tmp_path) is None
    git(tmp_path, "init", "-q")
    assert git_state(tmp_path) is None  # nothing is committed yet
    (tmp_path / "a.py").write_text("a = 1\n")
    git(tmp_path, "add", "a.py")
    git(tmp_path, "commit", "-qm", "first")
    assert git_state(tmp_path) == {"commit": git(tmp_path, "rev-parse", "HEAD"), "dirty": False}
    (tmp_path / "notes.txt").write_text("not tracked")
    assert git_state(tmp_path) == {"commit": git(tmp_path, "rev-parse", "HEAD"), "dirty": False}
    (tmp_path / "a.py").write_text("a = 2\n")
    assert git_state(tmp_path) == {"commit": git(tmp_path, "rev-parse", "HEAD"), "dirty": True}


def test_a_machine_without_git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert git_state(tmp_path) is None


def test_versions_are_those_in_use() -> None:
    found = versions()
    assert found["python"] == platform.python_version()
    assert found["numpy"] == numpy.__version__
    assert found["torch"].partition("+")[0] == torch.__version__.partition("+")[0]


def test_a_command_line_can_be_typed_again() -> None:
    assert command_line(["/x/bin/paceline", "train", "a b.py:T"]) == "paceline train 'a b.py:T'"
    assert command_line(["/x/paceline/__main__.py", "train"]) == "paceline train"
    assert command_line(["/x/mine/__main__.py"]) == "__main__.py"
