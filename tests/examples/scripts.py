"""Modules of the example folders, which are no packages."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from paceline.config.load import load
from paceline.config.settings import TrainConfig
from paceline.config.train_command import POSITIONAL, task_settings, train_options
from paceline.train.find_task import find_task

EXAMPLES = Path(__file__).parents[2] / "examples"


def module(folder: str, name: str) -> ModuleType:
    """As the script itself imports it, with its folder on the path."""
    place = str(EXAMPLES / folder)
    if place not in sys.path:
        sys.path.append(place)
    return importlib.import_module(name)


def settings(words: Sequence[str]) -> TrainConfig:
    """What `paceline train` makes of a translation."""
    command, name, *_ = words
    assert command == "train"
    own = find_task(name).Settings
    return task_settings(load(train_options(own), words[1:], prog="paceline train", positional=POSITIONAL), own)
