"""Which folder a run gets, decided without a disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.config.run_path import run_folder
from paceline.config.settings import RunSettings
from paceline.core.errors import InvalidSetting


def folder(*taken: str, **settings: object) -> str:
    there = {Path(name) for name in taken}
    return str(run_folder(RunSettings.model_validate(settings), task="T", moment="noon", exists=there.__contains__))


def test_a_new_run_never_gets_a_folder_that_exists() -> None:
    assert folder() == "runs/T-noon"
    assert folder("runs/T-noon") == "runs/T-noon-2"
    assert folder(exp_name="a") == "runs/a"
    assert folder("runs/a", "runs/a-2", exp_name="a") == "runs/a-3"
    assert folder("else/a", exp_name="a", runs_dir="else") == "else/a-2"
    assert folder("runs/v1.0", exp_name="v1.0") == "runs/v1.0-2"


def test_a_run_that_goes_on_keeps_its_folder() -> None:
    assert folder("runs/a", "b", exp_name="a", out="b") == "b"
    assert folder("runs/a", exp_name="a", resume="auto") == "runs/a"
    assert folder("/r/run.json", resume="/r/checkpoints/step-00000003") == "/r"
    assert folder("/r/run.json", "runs/a", resume="/r/checkpoints/step-00000003", exp_name="a") == "runs/a-2"
    assert folder(resume="/r/checkpoints/step-00000003") == "runs/T-noon"


def test_what_cannot_be_decided() -> None:
    with pytest.raises(InvalidSetting, match="needs to know the run"):
        folder(resume="auto")
    for name in ("/etc", "../up", ""):
        with pytest.raises(InvalidSetting, match="is a path, not a name"):
            folder(exp_name=name)
