"""`paceline completion bash|zsh|fish`: a script that completes commands, options and their words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from paceline.cli.main import command_names, import_command
from paceline.config.help import Command, completion
from paceline.config.load import load
from paceline.config.settings import Section


class CompletionOptions(Section):
    """Print a completion script. In bash: `source <(paceline completion bash)`, best in your `~/.bashrc`."""

    shell: Literal["bash", "zsh", "fish"]
    """bash, zsh or fish."""


OPTIONS, POSITIONAL = CompletionOptions, ("shell",)


def run(argv: Sequence[str]) -> int:
    options = load(CompletionOptions, argv, prog="paceline completion", positional=POSITIONAL)
    completion({name: options_of(name) for name in command_names()}, prog="paceline", shell=options.shell)


def options_of(command: str) -> Command:
    """Return the model of a command's options, and its positional ones."""
    module = import_command(command)
    return module.OPTIONS, module.POSITIONAL
