"""`paceline tune` as it is typed: what it prints and writes, what it survives, and what it refuses."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from paceline.cli.main import main
from paceline.config.settings import TrainConfig
from paceline.lab.tune import contest as tune_search
from paceline.lab.tune import range_command as tune_lr
from paceline.lab.tune.command import OPTIONS, TuneCommand, range_test_words, with_length
from paceline.lab.tune.knobs import Facts, LevelFacts
from paceline.lab.tune.process import Spec
from paceline.lab.tune.search import Failure, Speed, Trial, ratios_of
from paceline.speed.autotune.proof import FIRST_LOOK, is_decided

HERE = Path(__file__).parents[2] / "cli"
GOOD = f"{HERE / 'tasks_for_tests.py'}:Good"
LEARNABLE = f"{HERE / 'tasks_to_tune.py'}:Learnable"
HUNGRY = f"{HERE / 'tasks_to_tune.py'}:Hungry"
FACTS = Facts(
    device="cpu",
    device_name="this CPU",
    ranks=1,
    cores=2,
    threads=2,
    grains=1,
    levels=(LevelFacts(0, "fp32", False), LevelFacts(2, "bf16", False)),
    computes="fp32",
    compiles=False,
    num_samples=40,
    has_lengths=False,
    padding=None,
    is_stream=False,
)
Rule = Callable[[dict[str, Any]], float | Failure]


@pytest.fixture(autouse=True)
def _own_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)


def measured_by(monkeypatch: pytest.MonkeyPatch, rule: Rule) -> list[dict[str, Any]]:
    """Trials by a rule instead of processes; the settings that were tried."""
    tried: list[dict[str, Any]] = []

    def run_trial(
        command: Sequence[str], folder: Path, spec: Spec, limit_s: float, tick: Callable[[], None]
    ) -> tuple[Speed | Failure, Facts]:
        tried.append(spec.settings)
        found = rule(spec.settings)
        return (found if isinstance(found, Failure) else Speed(found, 0.01, 1 << 29)), FACTS

    monkeypatch.setattr(tune_search, "run_trial", run_trial)
    return tried


def printed(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    assert main(["tune", *words]) == code
    shown = capsys.readouterr()
    return shown.out if code == 0 else shown.err


# -- the search --------------------------------------------------------------------------------------------------------


def test_the_winner_is_printed_and_written_for_train(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    tried = measured_by(
        monkeypatch,
        lambda settings: (
            100.0 * (1.5 if settings.get("threads") == 1 else 1) * (2 if settings.get("level") == 2 else 1)
        ),
    )
    shown = printed(capsys, GOOD, "--global-batch", "16", "--lr", "0.25", "--groups", "match=*.bias,lr_scale=2")
    assert "level 2, threads 1 *" in shown
    assert "`level 2, threads 1` is 3.00x as fast as the default: ahead in 3 of 3 rounds" in shown
    assert "results change with level" in shown
    assert "tuned.yaml is written: `paceline train" in shown
    assert tried[0] == {"global_batch": 16, "lr": 0.25, "epochs": 1, "groups": tried[0]["groups"]}
    assert {"level": 2, "threads": 1}.items() <= tried[-1].items() or {"level": 2, "threads": 1}.items() <= tried[
        -2
    ].items()

    text = (tmp_path / "tuned.yaml").read_text()
    written = yaml.safe_load(text)
    assert written.keys() == {"global_batch", "lr", "groups", "level", "threads"}
    assert "# as chosen\nlevel: 2\nthreads: 1\n" in text
    assert main(["train", GOOD, "--config", "tuned.yaml", "--epochs", "3", "--print-config"]) == 0
    config = yaml.safe_load(capsys.readouterr().out)
    assert config.pop("groups") == [{"match": "*.bias", "lr_scale": 2.0, "weight_decay": None}]
    assert written.pop("groups") == [{"match": "*.bias", "lr_scale": 2.0}]
    assert {**config, **written, "epochs": 3} == config
    # It may be written again, but no other file is.
    printed(capsys, GOOD, "--epochs", "2", "--knobs", "workers")
    assert yaml.safe_load((tmp_path / "tuned.yaml").read_text()) == {"epochs": 2}
    (tmp_path / "mine.yaml").write_text("lr: 1\n")
    shown = printed(capsys, GOOD, "--write", "mine.yaml", code=2)
    assert "mine.yaml exists and was not written by `paceline tune`" in shown
    assert "--write FILE" in shown
    assert (tmp_path / "mine.yaml").read_text() == "lr: 1\n"


def test_the_default_wins_and_that_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    measured_by(monkeypatch, lambda settings: 50.0 if {"level", "grains", "threads"} & settings.keys() else 100.0)
    shown = printed(capsys, GOOD, "--epochs", "5")
    assert "the default wins: nothing that was tried is faster" in shown
    assert "default *" in shown
    assert "results change" not in shown
    assert yaml.safe_load((tmp_path / "tuned.yaml").read_text()) == {"epochs": 5}


def test_only_what_keeps_numerics_is_tried(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    tried = measured_by(monkeypatch, lambda settings: 100.0)
    shown = printed(capsys, GOOD, "--keep-numerics")
    assert {name for settings in tried for name in settings} == {"epochs", "threads"}
    assert "not tried: level: changes numerics" in shown


def test_a_default_that_does_not_fit_is_cut_finer_or_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def rule(settings: dict[str, Any]) -> float | Failure:
        return (
            10.0 * settings["grains"] if settings.get("grains", 1) >= 4 else Failure("memory", "out of memory: 3 GiB")
        )

    measured_by(monkeypatch, rule)
    shown = printed(capsys, GOOD, "--global-batch", "16", "--knobs", "grains")
    assert "default" in shown
    assert "out of memory" in shown
    assert "as fast as `grains 4`" in shown
    shown = printed(capsys, GOOD, "--global-batch", "16", "--knobs", "workers", code=2)
    assert shown.startswith("error: the settings as given cannot be measured: out of memory: 3 GiB\n")
    assert "--checkpoint-activations" in shown


def test_an_interrupted_search_shows_what_it_has(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def rule(settings: dict[str, Any]) -> float | Failure:
        if "threads" in settings:
            raise KeyboardInterrupt
        return 100.0

    measured_by(monkeypatch, rule)
    assert main(["tune", GOOD]) == 130
    shown = capsys.readouterr().out
    assert "of 120 s: nothing is written" in shown
    assert "*" not in shown
    assert [line.split()[0] for line in shown.splitlines() if "1.00x" in line] == ["default", "level"]
    assert list(tmp_path.iterdir()) == []


def test_a_bug_in_the_task_is_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    measured_by(monkeypatch, lambda settings: Failure("failed", "ValueError('a bug')"))
    assert "cannot be measured: ValueError('a bug')" in printed(capsys, GOOD, code=2)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("goes_on", [False, pytest.param(True, marks=pytest.mark.long)])
def test_memory_is_survived_on_several_ranks(tmp_path: Path, goes_on: bool) -> None:
    """For real, on two processes each: one of them is killed, and the next trial goes on."""
    options = OPTIONS(task=HUNGRY, epochs=1, procs=2, budget=40.0)
    settings = TrainConfig(epochs=1, global_batch=16, device="cpu", threads=1, level=0, workers=0, progress="none")
    tuner = tune_search._Tuner(options, settings, 2, tmp_path)
    killed = tuner.measure({}, 100.0).outcome
    assert isinstance(killed, Failure)
    assert (killed.kind, "rank 1" in killed.what) == ("killed", True), killed
    if not goes_on:
        return
    fits = tuner.measure({"grains": 4}, 100.0).outcome
    assert isinstance(fits, Speed), fits
    assert fits.samples_per_s > 0
    assert fits.memory_bytes > 1 << 24


def test_two_settings_race_where_memory_has_room_for_both() -> None:
    def tried(num_bytes: int) -> Trial:
        return Trial({}, Speed(1.0, memory_bytes=num_bytes), 1.0)

    known = dataclasses.replace(FACTS, memory_bytes=1000)
    assert tune_search.has_room(tried(300), tried(400), known)
    assert not tune_search.has_room(tried(301), tried(400), known)
    assert not tune_search.has_room(Trial({}, Failure("memory"), 1.0), tried(1), known)
    assert not tune_search.has_room(tried(1), tried(1), None)


def test_a_race_for_real(tmp_path: Path) -> None:
    """Two trials stay alive and take turns."""
    options = OPTIONS(task=GOOD, epochs=1, budget=40.0)
    settings = TrainConfig(epochs=1, global_batch=16, device="cpu", threads=1, level=0, workers=0, progress="none")
    tuner = tune_search._Tuner(options, settings, 1, tmp_path)
    tuner._facts = dataclasses.replace(FACTS, memory_bytes=1000)
    one, other = [Trial({"grains": grains}, Speed(1.0, memory_bytes=100), 1.0) for grains in (2, 4)]
    pairs = tuner.race(one, other, 200.0)
    assert is_decided(ratios_of(pairs))
    assert len(pairs) >= FIRST_LOOK
    assert all(first.changes == {"grains": 2} and second.changes == {"grains": 4} for first, second in pairs)
    assert all(trial.samples_per_s > 0 for pair in pairs for trial in pair)


# -- the learning rate -------------------------------------------------------------------------------------------------


SWEEP = ["--global-batch", "16", "--device", "cpu", "--threads", "1", "--optimizer", "sgd", "--lr"]


def test_a_learning_rate_is_suggested(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    shown = printed(capsys, LEARNABLE, *SWEEP, "--lr-to", "1e4", "--csv", "sweep.csv")
    lines = shown.splitlines()
    assert ["learning", "rate", "loss", "smoothed"] in [line.split() for line in lines]
    assert any(line.startswith("steepest descent: ") for line in lines)
    assert any(line.startswith("divergence: ") for line in lines)
    assert any(line.startswith("suggested: `--lr ") for line in lines)
    rows = (tmp_path / "sweep.csv").read_text().splitlines()
    assert rows[0] == "lr,loss,smoothed"
    assert float(rows[1].split(",")[0]) == 1e-6
    assert sorted(path.name for path in tmp_path.iterdir()) == ["sweep.csv"]  # no run, no checkpoint


def test_rates_that_say_nothing_are_no_answer(capsys: pytest.CaptureFixture[str]) -> None:
    shown = printed(capsys, GOOD, *SWEEP, "--lr-from", "1e-12", "--lr-to", "1e-11", "--lr-steps", "60")
    assert "suggested" not in shown
    assert "smaller of the two" not in shown
    assert "no suggestion: the loss neither fell nor rose" in shown
    assert "try `--lr-from 1e-11 --lr-to 10`" in shown
    shown = printed(capsys, GOOD, *SWEEP, "--lr-from", "1e3", "--lr-to", "1e4", "--lr-steps", "60")
    assert "no suggestion: the loss rose" in shown


def test_an_interrupted_sweep_says_so(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A real Ctrl-C, in the middle of the first steps of many."""
    task = tmp_path / "own.py"
    task.write_text(
        f"""import os, signal, sys
sys.path.insert(0, {str(HERE)!r})
from tasks_for_tests import Good
class Stopped(Good):
    steps = 0
    def loss(self, model, grain):
        self.steps += 1
        if self.steps == 30:
            os.kill(os.getpid(), signal.SIGINT)
        return super().loss(model, grain)
"""
    )
    words = [*SWEEP, "--lr-steps", "20000", "--csv", "sweep.csv"]
    assert main(["tune", f"{task}:Stopped", *words]) == 130
    shown = capsys.readouterr().out
    assert "interrupted after 30 of 20000 steps" in shown
    assert "suggested" not in shown
    assert "no suggestion: the loss had not yet risen again" in shown
    assert len((tmp_path / "sweep.csv").read_text().splitlines()) == 31


def test_lr_is_a_flag_or_a_number() -> None:
    assert range_test_words(["digits", "--lr"]) == ["digits", "--range-test"]
    assert range_test_words(["--lr", "digits"]) == ["--range-test", "digits"]
    assert range_test_words(["--lr", "--epochs", "3"]) == ["--range-test", "--epochs", "3"]
    for number in ("3e-4", ".1", "1", "-1"):
        assert range_test_words(["--lr", number]) == ["--lr", number]


# -- mistakes ----------------------------------------------------------------------------------------------------------


def test_an_epoch_stands_in_where_no_length_is_given(tmp_path: Path) -> None:
    assert with_length(OPTIONS, ["--lr", "1"]) == (["--epochs", "1", "--lr", "1"], True)
    assert with_length(OPTIONS, ["--steps", "5"]) == (["--steps", "5"], False)
    (tmp_path / "a.yaml").write_text("epochs: 3\n")
    assert with_length(OPTIONS, ["--config", "a.yaml"]) == (["--config", "a.yaml"], False)


def test_mistakes_are_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "did you mean `digits`?" in printed(capsys, "digts", code=2)
    assert "TASK" in printed(capsys, code=2)
    shown = printed(capsys, GOOD, "--budgte", "3", "--lr-from", "2", "--lr-to", "1", code=2)
    assert "did you mean --budget?" in shown
    assert "--lr-from must be below --lr-to" in shown
    assert "--write FILE" in printed(capsys, GOOD, "--write", "absent/tuned.yaml", code=2)
    assert "there is no such folder" in printed(capsys, GOOD, "--lr", "--csv", "absent/sweep.csv", code=2)
    assert "it is a folder" in printed(capsys, GOOD, "--write", str(tmp_path), code=2)
    shown = printed(capsys, GOOD, "--knobs", "levle", code=2)
    assert "level" in shown
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_PORT", "29511")
    assert "starts its own ranks" in printed(capsys, GOOD, code=2)
    assert list(tmp_path.iterdir()) == []


def test_what_is_missing_is_what_was_not_typed(capsys: pytest.CaptureFixture[str]) -> None:
    shown = printed(capsys, code=2)
    assert "TASK" in shown
    assert "epochs" not in shown  # it is not needed
    shown = printed(capsys, GOOD, "--global-batch", "16", "--knobs", code=2)
    assert "--knobs: needs a value\n" in shown
    assert "epochs" not in shown


@pytest.mark.skipif(sys.platform != "linux", reason="a folder that nobody can write to")
def test_a_file_that_cannot_be_written_is_known_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    tried = measured_by(monkeypatch, lambda settings: 100.0)
    monkeypatch.setattr(tune_lr, "sweep", lambda *_, **__: tried.append({}) or [])
    assert "/proc/t.yaml cannot be written" in printed(capsys, GOOD, "--write", "/proc/t.yaml", code=2)
    assert "/proc/a.csv cannot be written" in printed(capsys, GOOD, "--lr", "--csv", "/proc/a.csv", code=2)
    assert "it is no file" in printed(capsys, GOOD, "--write", "/dev/null", code=2)
    assert tried == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--lr-from", "1e-5"], "--lr-from belongs to the range test: add `--lr` without a number"),
        (["--csv", "a.csv"], "--csv belongs to the range test"),
        (["--lr", "--write", "lr.yaml"], "--write has no meaning in the range test"),
        (["--lr", "--knobs", "level"], "--knobs has no meaning in the range test"),
        (["--mode", "eval"], "--mode must be train or train_eval"),
        (["--benchmark"], "--benchmark times one setting in `paceline train`"),
    ],
)
def test_options_that_do_not_go_together_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    tried = measured_by(monkeypatch, lambda settings: 100.0)
    assert said in printed(capsys, GOOD, *words, code=2)
    assert tried == []


def test_settings_without_effect_are_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    measured_by(monkeypatch, lambda settings: 100.0)
    shown = printed(capsys, GOOD, "--out", "run", "--resume", "auto", "--profile", "--patience", "3")
    assert shown.startswith("without effect here, as nothing is kept: --out, --resume, --profile, --patience\n")
    assert "without effect" not in printed(capsys, GOOD, "--lr", "0.1")


def test_options_of_the_search_and_of_the_task_do_not_clash() -> None:
    assert not set(TuneCommand.model_fields) & set(TrainConfig.model_fields)
