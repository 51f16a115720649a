"""`mode`: what `paceline train` and `paceline.fit` do with a task. It is a word of theirs, no setting of a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeVar

from paceline.config.settings import FOR_USE, Section, TrainConfig

Mode = Literal["train", "eval", "train_eval", "infer"]
Purpose = Literal["train", "eval", "infer"]
"""What a task is attached for: to be trained, to measure a trained model, or to use one in another way."""
C = TypeVar("C", bound=TrainConfig)


class ModeCommand(Section):
    """What is done with the task."""

    mode: Mode = "train_eval"
    """`train` without validation, `train_eval` with it, `eval` only validates, `infer` only predicts."""

    @property
    def given_mode(self) -> Mode | None:
        """The mode, if one was given; without one, the settings say whether there is validation."""
        return self.mode if "mode" in self.model_fields_set else None

    @property
    def is_for_training(self) -> bool:
        return purpose_of(self.mode) == "train"


def purpose_of(mode: Mode | None) -> Purpose:
    """Return what a task is attached for in a mode."""
    if mode == "eval" or mode == "infer":  # type checkers understand no `in`
        return mode
    return "train"


def in_mode(settings: type[C], values: Mapping[str, Any], mode: Mode | None) -> C:
    """Return settings of these values, with what a mode says of validation."""
    if purpose_of(mode) != "train":
        return settings.model_validate(dict(values), context={FOR_USE: True})
    return validating(settings(**values), mode)


def validating(config: C, mode: Mode | None) -> C:
    """Return settings with what a mode says of validation."""
    if mode is None or purpose_of(mode) != "train" or config.validation == (mode == "train_eval"):
        return config
    return config.model_copy(update={"validation": mode == "train_eval"})
