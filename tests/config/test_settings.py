"""Settings that contradict themselves do not become a run."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import pytest
from pydantic import ValidationError

from paceline import PacelineError
from paceline.cli.main import main
from paceline.config.aliases import aliases_of
from paceline.config.command_line import resolve
from paceline.config.load import load
from paceline.config.settings import TrainConfig
from paceline.config.train_command import POSITIONAL, TRAIN_OPTIONS, task_settings


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, "set epochs or steps"),
        ({"epochs": 1, "clip_norm": 1.0, "clip_value": 1.0}, "not both"),
        ({"epochs": 0}, "epochs 0: must be above 0"),
        ({"epochs": 1, "epoch": 2}, "epoch 2: there is no such setting"),
        ({"epochs": 1, "ema": 1.0}, "ema 1.0: must be below 1"),
        ({"epochs": 1, "level": 5}, "level"),
    ],
)
def test_refused(settings: dict[str, object], words: str) -> None:
    with pytest.raises(PacelineError) as caught:
        TrainConfig(**settings)  # type: ignore[arg-type]
    assert words in str(caught.value)


def test_mistakes_in_settings_made_directly_are_said_as_those_of_fit() -> None:
    with pytest.raises(PacelineError) as caught:
        TrainConfig(epoch=3, lr=-1, optimizer="adamm", clip_norm=1.0, clip_value=1.0)  # type: ignore[call-arg]
    said = str(caught.value)
    assert "mistakes in the settings of `TrainConfig`" in said
    for line in ("did you mean epochs?", "lr -1: must be above 0", "did you mean adam?", "not both"):
        assert line in said
    assert isinstance(caught.value, ValueError)  # as pydantic's is
    assert TrainConfig(epochs=1, fsdp="full").shard == "full"  # type: ignore[call-arg]
    with pytest.raises(ValidationError):  # values from elsewhere are for their readers to explain
        TrainConfig.model_validate({"epochs": 0})


def test_the_levels_that_a_run_could_have() -> None:
    class Fewer(TrainConfig):
        level: Literal["auto", 0, 1] = 0

    assert TrainConfig(epochs=1).possible_levels == (0, 1, 2, 3, 4)
    assert Fewer(epochs=1).possible_levels == (0, 1)
    assert TrainConfig(epochs=1, shard="full").possible_levels == (0, 1, 2, 3, 4)
    exact = TrainConfig(epochs=1, precision="fp64")
    assert exact.possible_levels == (0, 1)
    for level in range(5):
        is_taken = True
        try:
            TrainConfig(epochs=1, precision="fp64", level=level)  # type: ignore[arg-type]
        except PacelineError:
            is_taken = False
        assert is_taken == (level in exact.possible_levels)


def test_frozen() -> None:
    config = TrainConfig(epochs=1)
    with pytest.raises(ValidationError):
        config.lr = 3.0  # type: ignore[misc]


def test_a_section_declares_other_spellings() -> None:
    class Own(TrainConfig):
        aliases: ClassVar[dict[str, str]] = {"my_loss": "loss_scale"}

    assert aliases_of(Own) == {**aliases_of(TrainConfig), "my_loss": "loss_scale"}
    assert resolve(Own, "my-loss") == "loss_scale"
    assert resolve(Own, "horovod_reduce_type") == "reduce"
    assert resolve(TrainConfig, "my_loss") is None
    assert resolve(TrainConfig, "train_dataset") is None, "a word of speech recognition"


@pytest.mark.parametrize(
    ("word", "level", "precision"),
    [
        ("bf16", 2, None),
        ("bf16-mixed", 2, None),
        ("fp32", 0, None),
        ("32", 0, None),
        ("32-true", 0, None),
        ("tf32", 1, None),
        ("16-mixed", "auto", "fp16"),
        ("16-true", "auto", "fp16-pure"),
        ("64", "auto", "fp64"),
    ],
)
def test_words_of_other_toolkits_for_precision(word: str, level: Any, precision: str | None) -> None:
    """ce01e4b answered bf16 by "did you mean fp16?"."""
    settings = TrainConfig(epochs=1, precision=word)
    assert (settings.level, settings.precision) == (level, precision)
    typed = load(TrainConfig, ["--epochs", "1", "--precision", word], prog="paceline train")
    assert (typed.level, typed.precision) == (level, precision)


def test_a_type_that_is_not_the_levels(capsys: pytest.CaptureFixture[str]) -> None:
    assert TrainConfig(epochs=1, level=3, precision="bf16").precision is None
    assert main(["train", "digits", "--epochs", "1", "-O0", "--precision", "bf16"]) == 2
    assert "contradicts the level: bf16 is level 2; leave one of them out" in capsys.readouterr().err


@pytest.mark.parametrize("mode", ["eval", "infer"])
def test_using_a_run_needs_no_length(mode: Literal["eval", "infer"]) -> None:
    options = load(TRAIN_OPTIONS, ["digits", "--mode", mode], prog="paceline train", positional=POSITIONAL)
    assert task_settings(options, TrainConfig).epochs is None
    with pytest.raises(PacelineError, match="how long to train"):
        load(TRAIN_OPTIONS, ["digits", "--mode", "train"], prog="paceline train", positional=POSITIONAL)
