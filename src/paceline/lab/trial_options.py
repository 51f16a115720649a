"""Options that `paceline tune` and `paceline sweep` have in common: they train trials, and start the ranks of each."""

from __future__ import annotations

from typing import Any, TypeVar

from pydantic import create_model

from paceline.config.settings import Section, TrainConfig
from paceline.core.errors import Conflict
from paceline.world.discover.environment import World

S = TypeVar("S", bound=Section)
NO_BENCHMARK = "`benchmark` times one setting in `paceline train`: leave it out"


def with_settings(command: type[S], settings: type[TrainConfig], about: str) -> type[S]:
    """Return the options of a command for a task with these settings."""
    bases: Any = (settings, command)
    options: type[S] = create_model(f"{command.__name__}Options", __base__=bases, __doc__=about)
    return options


def refuse_launcher(world: World, command: str, instead: str) -> None:
    """Raise `Conflict` if the process is a rank of a launcher: each trial starts ranks of its own."""
    if world.launcher != "plain":
        raise Conflict(
            f"`paceline {command}` starts its own ranks and cannot be one of {world.launcher}'s",
            hint=f"type `paceline {command} TASK --procs N{instead}",
        )
