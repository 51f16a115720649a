"""The command line: finds the command and its exit code; each command has a file of its own, loaded when it is used."""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Sequence

COMMANDS = {
    "train": "train a task on this machine or under any launcher",
    "demo": "train something small and real, and report",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; 0 for success, 2 for a user's mistake, 1 for a crash."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help"):
        sys.stdout.write(_help())
        return 0
    if words[0] == "--version":
        from paceline import __version__

        sys.stdout.write(f"paceline {__version__}\n")
        return 0
    if words[0] not in COMMANDS:
        nearest = difflib.get_close_matches(words[0], COMMANDS, n=1)
        hint = f"did you mean `paceline {nearest[0]}`?" if nearest else f"commands: {', '.join(COMMANDS)}"
        sys.stderr.write(f"error: there is no command {words[0]!r}\n  {hint}\n")
        return 2
    command = importlib.import_module(f"paceline.cli.{words[0]}")
    code: int = command.run(words[1:])
    return code


def _help() -> str:
    lines = [f"  {name:<8}{what}" for name, what in COMMANDS.items()]
    return "\n".join(
        ["usage: paceline COMMAND [OPTIONS]", "", *lines, "", "`paceline COMMAND --help` lists a command's options", ""]
    )
