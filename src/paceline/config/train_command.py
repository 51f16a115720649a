"""Options of `paceline train` beside a task's settings, joined with them into one model."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Protocol

from pydantic import Field, create_model

from paceline.config.command_line import read_words
from paceline.config.mode import ModeCommand, in_mode
from paceline.config.problems import Problem
from paceline.config.settings import Section, TrainConfig
from paceline.core import plugins

POSITIONAL = ("task",)


class TrainCommand(ModeCommand):
    """Which task, on how many ranks of this machine."""

    task: str
    """A recipe's name, or `path/to/file.py:ClassName`."""
    procs: Annotated[int, Field(gt=0)] | Literal["auto"] = 1
    """Ranks to start on this machine, no launcher needed; `auto` is one per GPU, one without."""
    distributed: Literal["no", "dp"] = "no"
    """`dp` splits the batch over all devices of this machine: the same as `--procs auto`."""
    max_restarts: Annotated[int, Field(ge=0)] = 0
    """How many processes are started for dead ones, in all; with `on_failure: restart`, how often all ranks are
    started again."""
    on_failure: Literal["continue", "restart", "stop"] = "continue"
    """When a rank dies: `continue` lets the others go on, and those that are started for the dead join them; `restart`
    ends all and starts all again from the newest checkpoint, as often as `max_restarts` says; `stop` ends all."""
    min_ranks: Annotated[int, Field(gt=0)] = 1
    """With fewer ranks left than these, and no replacement on its way, the run is saved and ends."""
    print_config: bool = False
    """Show the settings that all this amounts to, as a file for `--config`, and leave."""


def train_options(settings: type[TrainConfig]) -> type[TrainCommand]:
    """Return the model of `paceline train` for a task with these settings."""
    about = "Train a task: a recipe, or a class in your own file."
    bases: Any = (settings, TrainCommand)
    options: type[TrainCommand] = create_model("TrainOptions", __base__=bases, __doc__=about)
    return options


def task_settings(options: ModeCommand, settings: type[TrainConfig]) -> TrainConfig:
    """Return the task's part of the options that were set."""
    values = {name: getattr(options, name) for name in options.model_fields_set & set(settings.model_fields)}
    return in_mode(settings, values, options.given_mode)


TRAIN_OPTIONS = train_options(TrainConfig)
"""Model of `paceline train` before the task is known."""


def take_task(words: Sequence[str], options: type[Section] = TRAIN_OPTIONS) -> tuple[str | None, list[str]]:
    """Return the word that names the task (None if missing) and the remaining words.

    The task may be anywhere among the words: it has options of its own, which `options` does not know.
    """
    typed = read_words(options, words, POSITIONAL)
    indices = typed.loose or [index for index in typed.swallowed if _looks_like_task(words[index])]
    if not indices:
        return None, list(words)
    return words[indices[0]], [word for index, word in enumerate(words) if index != indices[0] and word != "--"]


def _looks_like_task(word: str) -> bool:
    return re.search(r"\.py:\w+$", word) is not None or word in plugins.names("recipes")


class RulesOfFailure(Protocol):
    """Options of `launch` and `train` that say what the death of a rank means."""

    @property
    def on_failure(self) -> str: ...

    @property
    def max_restarts(self) -> int: ...

    @property
    def min_ranks(self) -> int: ...


def failure_problems(options: RulesOfFailure) -> list[Problem]:
    """Return what is wrong between the options that say what a death means."""
    if options.on_failure == "stop" and options.max_restarts:
        hint = "leave one of them out"
        return [Problem("--max-restarts", "nobody is started again with `--on-failure stop`", hint)]
    if options.on_failure != "continue" and options.min_ranks > 1:
        hint = f"leave out `--on-failure {options.on_failure}`, or this one"
        return [Problem("--min-ranks", "is for ranks that go on when others die", hint, str(options.min_ranks))]
    return []
