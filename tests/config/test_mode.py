"""The word `mode`: what it says of settings, and where it may stand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline.config.load import load
from paceline.config.mode import Mode, Purpose, in_mode, purpose_of, validating
from paceline.config.problems import SettingsInvalid
from paceline.config.settings import TrainConfig
from paceline.config.train_command import POSITIONAL, TRAIN_OPTIONS, task_settings


@pytest.mark.parametrize(
    ("mode", "purpose"),
    [(None, "train"), ("train", "train"), ("train_eval", "train"), ("eval", "eval"), ("infer", "infer")],
)
def test_a_mode_has_a_purpose(mode: Mode | None, purpose: Purpose) -> None:
    assert purpose_of(mode) == purpose


@pytest.mark.parametrize("is_set", [True, False])
@pytest.mark.parametrize(("mode", "validates"), [(None, None), ("train", False), ("train_eval", True), ("eval", None)])
def test_a_mode_of_training_wins_over_validation(mode: Mode | None, validates: bool | None, is_set: bool) -> None:
    config = TrainConfig(epochs=1, validation=is_set)
    assert validating(config, mode).validation is (is_set if validates is None else validates)


def test_only_training_needs_a_length() -> None:
    assert in_mode(TrainConfig, {"lr": 0.5}, "eval").lr == 0.5
    for mode in (None, "train", "train_eval"):
        with pytest.raises(SettingsInvalid, match="how long to train"):
            in_mode(TrainConfig, {"lr": 0.5}, mode)  # type: ignore[arg-type]


def read(*words: Any) -> tuple[Mode | None, TrainConfig]:
    options = load(TRAIN_OPTIONS, ["digits", *map(str, words)], prog="paceline train", positional=POSITIONAL)
    return options.given_mode, task_settings(options, TrainConfig)


def test_a_file_may_say_the_mode_and_the_command_line_wins(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("mode: train\nepochs: 2\n")
    mode, config = read("--config", file)
    assert (mode, config.validation) == ("train", False)
    mode, config = read("--config", file, "--mode", "train_eval")
    assert (mode, config.validation) == ("train_eval", True)
    mode, config = read("--epochs", 1, "--no-validation")
    assert (mode, config.validation) == (None, False)


def test_it_is_no_setting_of_a_run() -> None:
    with pytest.raises(SettingsInvalid, match="did you mean validation"):
        TrainConfig(epochs=1, mode="train")  # type: ignore[call-arg]
