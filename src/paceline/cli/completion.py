"""`paceline completion bash|zsh|fish`: a script that completes commands, options and their words."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Literal

from paceline.config.help import Command, completion
from paceline.config.load import load
from paceline.config.settings import Section


class CompletionOptions(Section):
    """Print a completion script. In bash: `source <(paceline completion bash)`, best in your `~/.bashrc`."""

    shell: Literal["bash", "zsh", "fish"]
    """bash, zsh or fish."""


HOMES: dict[str, tuple[str, tuple[str, ...]]] = {
    "train": ("train:OPTIONS", ("task",)),
    "tune": ("tune.command:OPTIONS", ("task",)),
    "eval": ("eval:EvalOptions", ("run",)),
    "infer": ("infer:InferOptions", ("run", "inputs")),
    "manifest": ("manifest:ManifestOptions", ("action", "path")),
    "pack": ("pack.command:PackOptions", ("paths",)),
    "export": ("export:ExportOptions", ("run", "folder")),
    "launch": ("launch:LaunchOptions", ()),
    "submit": ("submit:SubmitOptions", ("scheduler",)),
    "doctor": ("doctor:DoctorOptions", ()),
    "runs": ("runs:RunsOptions", ("folder",)),
    "diff": ("diff:DiffOptions", ("left", "right")),
    "report": ("report:ReportOptions", ("runs",)),
    "demo": ("train:OPTIONS", ("task",)),
    "completion": ("completion:CompletionOptions", ("shell",)),
}
"""Each command's model and its positional settings."""


def run(argv: Sequence[str]) -> int:
    options = load(CompletionOptions, argv, prog="paceline completion", positional=("shell",))
    completion({name: _command(name) for name in HOMES}, prog="paceline", shell=options.shell)


def _command(name: str) -> Command:
    home, positional = HOMES[name]
    module, _, model = home.partition(":")
    return getattr(importlib.import_module(f"paceline.cli.{module}"), model), positional
