"""`paceline doctor` as typed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.cli import doctor
from paceline.cli.main import main
from paceline.world.doctor import findings
from paceline.world.doctor.findings import Finding


def test_json_and_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    code = main(["doctor", "--device", "cpu", "--json"])
    found = [Finding(**entry) for entry in json.loads(capsys.readouterr().out)]
    assert {each.what for each in found} >= {"ranks", "torch", "levels", "cores", "interfaces", "run folder", "disk"}
    assert code == int(any(each.verdict == "problem" for each in found))
    assert list(tmp_path.iterdir()) == []
    wrong = Finding("disk", "problem", "0.0 GiB free", "make room")
    monkeypatch.setattr(findings, "space", lambda roll: [wrong])
    assert main(["doctor", "--device", "cpu"]) == 1
    shown = capsys.readouterr().out
    assert "-> make room" in shown
    assert "1 problem" in shown.splitlines()[-1]


def test_the_table_ends_with_a_count(capsys: pytest.CaptureFixture[str]) -> None:
    doctor.show([Finding("a", "warning", "b"), Finding("c", "warning", "d"), Finding("e", "ok", "f")])
    assert capsys.readouterr().out.endswith("0 problems, 2 warnings\n")
