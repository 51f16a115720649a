"""A job for a batch scheduler: what it needs, and what the scripts of all schedulers share. Pure functions."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from paceline.core.errors import PacelineError

_UNITS_S = {"m": 60, "h": 3600, "d": 86400}
_UNITS_MIB = {"M": 1, "G": 1024, "T": 1024 * 1024}


@dataclass(frozen=True)
class BatchJob:
    """A job: its command and its resources."""

    name: str
    command: tuple[str, ...]
    """One rank's command."""
    folder: Path
    """Working folder of the job."""
    logs: Path
    """Folder for what the job prints."""
    nodes: int = 1
    procs_per_node: int = 1
    gpus_per_node: int = 0
    cpus_per_rank: int | None = None
    time_s: int | None = None
    memory_mib: int | None = None
    """Per node."""
    queue: str | None = None
    """SLURM calls it partition."""
    account: str | None = None
    environment: tuple[tuple[str, str], ...] = ()
    setup: tuple[str, ...] = ()
    """Lines of shell before the ranks start."""
    signal_s: int = 120
    """Seconds before the end at which the ranks are told to save and leave."""
    requeue: bool = True
    """Back into the queue when it was told to leave before it had finished."""
    directives: tuple[str, ...] = ()
    """More options for the scheduler, as it spells them."""

    @property
    def ranks(self) -> int:
        return self.nodes * self.procs_per_node


class NotADuration(PacelineError):
    """A time that schedulers read in different ways, or not at all."""

    text: str
    sentence = "{text!r} is not a time"
    hint = "type `90m`, `12h`, `2d`, `12:00:00` (hours first) or `1-12:00:00` (a day and 12 hours)"


class NotASize(PacelineError):
    """An amount of memory without a unit, or no amount."""

    text: str
    sentence = "{text!r} is not an amount of memory"
    hint = "type it with its unit: `800M`, `64G` or `1T`"


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
        raise NotADuration(text)
    if total == 0:
        raise NotADuration(text)
    return total


def mebibytes(text: str) -> int:
    """Return the MiB of `800M`, `64G` or `1T`."""
    match = re.fullmatch(r"([1-9]\d*)([MGT])(?:i?B)?", text)
    if match is None:
        raise NotASize(text)
    return int(match[1]) * _UNITS_MIB[match[2]]


def beginning(job: BatchJob) -> Iterator[str]:
    """Return the lines of every script before the ranks start."""
    yield f"cd {shlex.quote(str(job.folder))} || exit 1"
    yield from (f"export {name}={shlex.quote(value)}" for name, value in job.environment)
    yield from job.setup


def ranks_in_background(starter: str, job: BatchJob, pass_on: str) -> Iterator[str]:
    """Start the ranks, pass `pass_on` signals to them as USR1, and wait; `$told` and `$code` say how it ended."""
    yield "told= ranks="
    yield f"""trap 'told=yes; [ -z "$ranks" ] || kill -USR1 "$ranks"' {pass_on}"""
    yield """trap 'kill -TERM "$ranks"' TERM"""
    yield f"{starter} {shlex.join(job.command)} &"
    yield "ranks=$!"
    # The warning may have come between the two.
    yield '[ -z "$told" ] || kill -USR1 "$ranks"'
    # A signal ends `wait` early; the ranks are then still there.
    yield 'while wait "$ranks"; code=$?; kill -0 "$ranks" 2>/dev/null; do :; done'
