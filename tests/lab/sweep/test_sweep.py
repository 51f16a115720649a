"""Sweeps through a real optuna: the known best is found, bad trials are pruned, an interrupted sweep goes on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import paceline
from paceline import PacelineError
from tests.commands import run_command
from tests.lab.sweep.tasks import Bowl

pytest.importorskip("optuna", reason="the package optuna is not installed")

COMMON: dict[str, Any] = {"epochs": 3, "global_batch": 8, "progress": "none", "loggers": (), "device": "cpu"}
TASK = f"{Path(__file__).with_name('tasks.py')}:Bowl"
WORDS = ["--epochs", "2", "--global-batch", "8", "--loggers", "none", "--device", "cpu"]


def test_the_best_is_found_and_the_worse_are_pruned(tmp_path: Path) -> None:
    out = tmp_path / "sweep"
    result = paceline.sweep(Bowl, {"at": "-10:10"}, trials=14, out=out, **COMMON)
    statuses = [trial.status for trial in result.trials]
    assert len(statuses) == 14
    assert "pruned" in statuses[4:]
    assert set(statuses[:4]) == {"finished"}
    best = result.best
    assert best is not None
    assert best.score == min(trial.score for trial in result.trials if trial.status == "finished")
    for trial in result.trials:
        at = trial.settings["at"]
        assert isinstance(at, float)
        assert trial.score == pytest.approx((at - 3.0) ** 2, rel=1e-5)
        record = json.loads((trial.folder / "run.json").read_text())
        assert record["settings"]["at"] == at
        assert record["status"] == ("stopped" if trial.status == "pruned" else "finished")
    # Each was worse than the median of those before it, at the same validation.
    pruned = [trial for trial in result.trials if trial.status == "pruned"]
    for trial in pruned:
        before = sorted(each.score or 0.0 for each in result.trials[: trial.number] if each.status == "finished")
        assert (trial.score or 0.0) > before[0]
    assert result.report is not None
    page = result.report.read_text(encoding="utf-8")
    assert "Scores of the trials" in page
    assert "https:" not in page.split("<script")[0]  # nothing is asked of the net
    assert f"at: {best.settings['at']}" in (out / "best.yaml").read_text()


def test_a_sweep_goes_on_as_if_it_had_not_been_interrupted(tmp_path: Path) -> None:
    whole = paceline.sweep(Bowl, {"at": "-10:10", "lr": [0.1, 0.01]}, trials=6, out=tmp_path / "whole", **COMMON)
    halves = {"search": {"at": "-10:10", "lr": [0.1, 0.01]}, "out": tmp_path / "halves", **COMMON}
    paceline.sweep(Bowl, trials=3, **halves)
    with pytest.raises(PacelineError, match="holds a sweep already"):
        paceline.sweep(Bowl, trials=6, **halves)
    changed = {**halves, "search": {"at": "-10:10", "lr": [0.1, 0.02]}}
    with pytest.raises(PacelineError, match="lr was 0.1,0.01, is 0.1,0.02"):
        paceline.sweep(Bowl, trials=6, resume="auto", **changed)
    resumed = paceline.sweep(Bowl, trials=6, resume="auto", **halves)
    assert [trial.settings for trial in resumed.trials] == [trial.settings for trial in whole.trials]
    assert [trial.score for trial in resumed.trials] == [trial.score for trial in whole.trials]


def test_a_trial_that_fails_is_one_of_many(tmp_path: Path) -> None:
    search = {"fails": [True, False], "at": [1.0, 2.0]}
    result = paceline.sweep(Bowl, search, trials=10, sampler="grid", out=tmp_path / "some", **COMMON)
    assert len(result.trials) == 4  # a grid has no more
    failed = [trial for trial in result.trials if trial.status == "failed"]
    assert len(failed) == 2
    assert all("this value does not fit" in trial.why for trial in failed)
    assert result.best is not None
    assert result.best.settings == {"fails": False, "at": 2.0}
    with pytest.raises(PacelineError, match="the first 3 trials failed, the last one with: .*does not fit"):
        paceline.sweep(Bowl, {"at": [1.0, 2.0]}, fails=True, trials=5, out=tmp_path / "none", **COMMON)  # type: ignore[call-arg]


class Buggy(Bowl):
    """Fails with an error of its own, or has no number, where `at` is below 0."""

    def metrics(self, model: Any, grain: paceline.Grain) -> dict[str, tuple[float, int]]:
        if self.settings.at < -5:
            raise ValueError("a bug")
        return super().metrics(model, grain) if self.settings.at > 0 else {"distance": (float("nan"), 1)}


def test_an_error_or_a_nan_in_a_trial_is_one_of_many(tmp_path: Path) -> None:
    """Before, an error of the task's ended the sweep, and of a nan it was said that there is no score."""
    search = {"at": [-9.0, -1.0, 1.0]}
    result = paceline.sweep(Buggy, search, sampler="grid", out=tmp_path / "sweep", **COMMON)
    assert [trial.status for trial in result.trials] == ["failed", "failed", "finished"]
    assert [trial.why for trial in result.trials[:2]] == ["ValueError: a bug", "its score was never a finite number"]


def test_two_sweeps_cannot_share_a_folder(tmp_path: Path) -> None:
    """Before, the second took the running trial of the first for its own, and marked it as failed."""
    said: list[str] = []
    search = {"at": [1.0, 2.0]}

    class Second(Bowl):
        def after_stage(self, model: Any, stage: int) -> None:
            try:
                paceline.sweep(
                    Bowl, {"at": [1.0, 2.0]}, sampler="grid", resume="auto", out=tmp_path / "sweep", **COMMON
                )
            except PacelineError as error:
                said.append(str(error))

    result = paceline.sweep(Second, search, sampler="grid", out=tmp_path / "sweep", **COMMON)
    assert [trial.status for trial in result.trials] == ["finished", "finished"]
    assert said == [f"a sweep is under way in {tmp_path / 'sweep'} already"] * 2


def test_mistakes_in_the_call(tmp_path: Path) -> None:
    with pytest.raises(PacelineError, match="`sampler` grid tries all values, and at is a range"):
        paceline.sweep(Bowl, {"at": "0:1"}, sampler="grid", out=tmp_path / "a", **COMMON)
    with pytest.raises(PacelineError, match="needs processes of their own, which must find the task"):
        paceline.sweep(Bowl, {"at": "0:1"}, jobs=2, out=tmp_path / "b", **COMMON)
    with pytest.raises(PacelineError, match="trials 0: must be a whole number above 0"):
        paceline.sweep(Bowl, {"at": "0:1"}, trials=0, out=tmp_path / "c", **COMMON)


def test_trials_in_processes_of_their_own(tmp_path: Path) -> None:
    out = tmp_path / "sweep"
    words = ["sweep", TASK, "--search", "at=1,3", "--sampler", "grid", "--jobs", "2", "--out", str(out), *WORDS]
    done = run_command(words)
    assert done.code == 0, done.err + done.out
    assert "at" in done.out
    assert "best: trial" in done.out
    assert "trial 0 finished, distance 4 (at 1)" in done.out
    assert "trial 1 finished, distance 0 (at 3)" in done.out
    assert (out / "report.html").exists()
    again = run_command([*words, "--resume", "auto"])
    assert again.code == 0, again.err
    assert "trial 0" not in again.out.split("status")[0]  # nothing is run again


def test_more_at_once_than_there_is_room_for(tmp_path: Path) -> None:
    words = ["sweep", TASK, "--search", "at=1,2", "--jobs", "4096", "--out", str(tmp_path / "sweep"), *WORDS]
    refused = run_command(words)
    assert refused.code == 2
    assert "with 1 rank each need 4096 cores" in refused.err
    assert not (tmp_path / "sweep").exists()
