"""Job for a batch scheduler: its command and its resources, and the quoting of text in a script. Pure functions."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from paceline.core.errors import InvalidSetting, PacelineError

NAME = r"[A-Za-z0-9_@*][A-Za-z0-9_.@,:/+*|!()&=~-]*"
"""Names of queues, accounts and such: what schedulers use, and nothing that begins an option, a comment or a string."""
_MAX_JOB_NAME = 100
_UNITS_S = {"m": 60, "h": 3600, "d": 86400}
_UNITS_MIB = {"M": 1, "G": 1024, "T": 1024 * 1024}


@dataclass(frozen=True)
class BatchJob:
    """A job: its command and its resources."""

    name: str
    command: tuple[str, ...]
    """Command of one rank."""
    folder: Path
    """Working folder of the job."""
    logs: Path
    """Folder for the output of the job."""
    nodes: int = 1
    procs_per_node: int = 1
    gpus_per_node: int = 0
    cpus_per_rank: int | None = None
    time_s: int | None = None
    memory_mib: int | None = None
    """Memory per node."""
    queue: str | None = None
    """Queue of the job, which SLURM calls partition."""
    account: str | None = None
    environment: tuple[tuple[str, str], ...] = ()
    setup: tuple[str, ...] = ()
    """Lines of shell before the ranks start."""
    signal_s: int = 120
    """Seconds before the end at which the ranks are told to save and leave."""
    requeue: bool = True
    """Queue the job again when it was told to leave before it had finished."""
    directives: tuple[str, ...] = ()
    """More options for the scheduler, as it spells them."""

    @property
    def ranks(self) -> int:
        return self.nodes * self.procs_per_node


class NotForScript(PacelineError):
    """Text for a line of the scheduler's that cannot be written there: it has no way to quote it, or cuts it off."""

    what: str
    text: str
    why: str
    advice: str = "choose another"
    sentence = "{what} {text!r} cannot stand in a batch script: {why}"
    hint = "{advice}"


def quote(word: str) -> str:
    """Return a word as bash reads it back, always on one line.

    A line break in quotes would be right for bash, but Grid Engine takes every line that begins with `#$`, quoted or
    not, for an option of its own. Other characters that are not printable are written as their bytes, too.
    """
    if word.isprintable():
        return shlex.quote(word)
    special = {"\\": "\\\\", "'": "\\'"}
    characters = [special.get(each, each) if each.isprintable() else _as_bytes(each) for each in word]
    return f"$'{''.join(characters)}'"


def _as_bytes(character: str) -> str:
    return "".join(f"\\x{byte:02x}" for byte in character.encode("utf-8", "surrogateescape"))


def join(words: Iterable[str]) -> str:
    """Return the words of a command on one line."""
    return " ".join(map(quote, words))


def job_name(text: str) -> str:
    """Return a name that all schedulers accept: Grid Engine's must not begin with a digit."""
    plain = re.sub(r"[^\w.-]+", "-", text, flags=re.ASCII).strip("-.")[:_MAX_JOB_NAME] or "paceline"
    return f"p{plain}" if plain[0].isdigit() else plain


def seconds(text: str) -> int:
    """Return the seconds of `90m`, `12h`, `2d`, `H:MM:SS`, `D-HH`, `D-HH:MM` or `D-HH:MM:SS`.

    `90` and `2:30` are refused: SLURM would read minutes and minutes:seconds, Grid Engine seconds and nothing.
    """
    if match := re.fullmatch(r"(\d+)([mhd])", text):
        total = int(match[1]) * _UNITS_S[match[2]]
    elif match := re.fullmatch(r"(\d+)-(\d+)(?::([0-5]\d)(?::([0-5]\d))?)?", text):
        days, hours, minutes, rest = (int(part or 0) for part in match.groups())
        total = ((days * 24 + hours) * 60 + minutes) * 60 + rest
    elif match := re.fullmatch(r"(\d+):([0-5]\d):([0-5]\d)", text):
        hours, minutes, rest = map(int, match.groups())
        total = (hours * 60 + minutes) * 60 + rest
    else:
        total = 0
    if total == 0:
        raise InvalidSetting(
            f"{text!r} is not a time",
            hint="type `90m`, `12h`, `2d`, `12:00:00` (hours first) or `1-12:00:00` (a day and 12 hours)",
        )
    return total


def mebibytes(text: str) -> int:
    """Return the MiB of `800M`, `64G` or `1T`."""
    match = re.fullmatch(r"([1-9]\d*)([MGT])(?:i?B)?", text)
    if match is None:
        raise InvalidSetting(
            f"{text!r} is not an amount of memory", hint="type it with its unit: `800M`, `64G` or `1T`"
        )
    return int(match[1]) * _UNITS_MIB[match[2]]
