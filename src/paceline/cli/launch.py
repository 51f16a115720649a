"""`paceline launch --nproc-per-node N -- train ...`: any command as several ranks, in torchrun's words."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field

from paceline.cli.main import COMMANDS
from paceline.config.errors import PacelineError
from paceline.config.load import load
from paceline.config.problems import Problem, SettingsInvalid
from paceline.config.settings import Positive, PositiveFloat, Section

PROG = "paceline launch"
_RANKED = ("train", "eval", "infer")


class LaunchOptions(Section):
    """Start a paceline command as several ranks: `paceline launch --nproc-per-node 8 -- train TASK ...`."""

    nproc_per_node: Positive | Literal["auto"] = "auto"
    """Ranks on this machine; `auto` is one per GPU, one without."""
    nnodes: Positive = 1
    """Machines. One, for now."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """What the ranks compute on, as far as `auto` and the check against the number of GPUs need to know."""
    max_restarts: Annotated[int, Field(ge=0)] = 0
    """How often all ranks are started again when one dies."""
    grace_s: PositiveFloat = 60.0
    """Seconds that the ranks have to save and leave after SIGTERM."""


class SeveralNodes(PacelineError):
    """Starting ranks on other machines is not built yet."""

    hint = "start `torchrun --nnodes ... -m paceline ...`, mpirun or srun: paceline finds its ranks under all of them"

    def __init__(self, nnodes: int) -> None:
        super().__init__(f"--nnodes {nnodes}: `paceline launch` starts ranks on one machine; several come with issue 5")
        self.nnodes = nnodes


def run(argv: Sequence[str]) -> int:
    words = list(argv)
    at = words.index("--") if "--" in words else len(words)
    own, command = words[:at], words[at + 1 :]
    options = _load(own, command)
    if options.nnodes > 1:
        raise SeveralNodes(options.nnodes)
    from paceline.world.discover import discover
    from paceline.world.failure import fail_together
    from paceline.world.launch import launch

    return fail_together(
        discover(os.environ),
        lambda: launch(
            options.nproc_per_node,
            [sys.executable, "-m", "paceline", *command],
            device=options.device,
            max_restarts=options.max_restarts,
            grace_s=options.grace_s,
        ),
    )


def _load(own: list[str], command: list[str]) -> LaunchOptions:
    wrong = []
    if not command:
        wrong = [
            Problem("COMMAND", "is missing", f"put it behind two dashes: `{PROG} --nproc-per-node 2 -- train ...`")
        ]
    elif command[0] not in _RANKED:
        what = "does not run on ranks" if command[0] in COMMANDS else "is no command"
        wrong = [Problem(command[0], what, f"commands that do: {', '.join(_RANKED)}")]
    try:
        options = load(LaunchOptions, own, prog=PROG)
    except SettingsInvalid as invalid:
        raise SettingsInvalid([*invalid.problems, *wrong], PROG) from None
    if wrong:
        raise SettingsInvalid(wrong, PROG)
    return options
