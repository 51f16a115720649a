"""What `paceline train` says of the whole run while it goes on: on the console, in the journal."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from paceline.cli.main import main
from paceline.observe import progress
from paceline.observe.journal import read

TOWER = f"{Path(__file__).parent / 'own_settings.py'}:Tower"
QUICK = ["--device", "cpu", "--threads", "1", "--global-batch", "1", "--loggers", "none", "--log-every", "1"]


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(progress, "QUIET_S", 0.0)


@pytest.mark.usefixtures("shown")
def test_epochs_share_and_time_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On ce01e4b: `epoch 2, step 3/8, ... left`, which was of the epoch."""
    assert main(["train", TOWER, *QUICK, "--epochs", "5", "--progress", "lines", "--out", str(tmp_path / "a")]) == 0
    lines = capsys.readouterr().out.splitlines()
    (line,) = [line for line in lines if line.startswith("epoch 2 of 5, step 2/8, ")]
    assert "25.0% of the run, 0:00:0" in line
    (line,) = [line for line in lines if line.startswith("train epoch 4, finished after 8 steps, ")]
    assert "4 of 5 epochs, 80.0% of the run, 0:00:0" in line
    assert "of the run" not in next(line for line in lines if line.startswith("train epoch 5, "))
    looks = read(tmp_path / "a" / "metrics.jsonl", "progress")
    assert (looks[0]["epoch"], looks[0]["epochs"], looks[0]["done"]) == (1, 5, 0.025)
    assert looks[0]["samples_per_s"] > 0
    steps = read(tmp_path / "a" / "metrics.jsonl")
    assert all("gradient_norm" in record for record in steps)  # without clipping, too


@pytest.mark.usefixtures("shown")
def test_steps_end_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On ce01e4b `--steps 11` was ignored: the second epoch was shown as one of 8 steps."""
    words = ["--steps", "11", "--progress", "lines", "--clip-norm", "1.0", "--out", str(tmp_path / "a")]
    assert main(["train", TOWER, *QUICK, "--epochs", "400", *words]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("epoch 1 of 2, step 8/8, ") and "72.7% of the run" in line for line in lines)
    (last,) = [line for line in lines if line.startswith("epoch 2 of 2, step 3/3, ")]
    assert "100.0% of the run, 0:00:00 left" in last
    norms = [record["gradient_norm"] for record in read(tmp_path / "a" / "metrics.jsonl")]
    assert len(norms) == 11
    assert min(norms) > 0
