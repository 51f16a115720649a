"""A job for a batch scheduler: what it needs, and what the scripts of all schedulers share. Pure functions."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from paceline.core.errors import PacelineError
from paceline.world.rendezvous.secret import VARIABLE

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

    A line break inside of quotes would be right for bash, but Grid Engine takes every line that begins with `#$`, in
    quotes or not, for an option of its own. Other characters that nobody sees are written as their bytes, too.
    """
    if word.isprintable():
        return shlex.quote(word)
    special = {"\\": "\\\\", "'": "\\'"}
    shown = [special.get(each, each) if each.isprintable() else _as_bytes(each) for each in word]
    return f"$'{''.join(shown)}'"


def join(words: Iterable[str]) -> str:
    """Return the words of a command on one line."""
    return " ".join(map(quote, words))


def job_name(text: str) -> str:
    """Return a name that both schedulers accept: Grid Engine's must not begin with a digit."""
    plain = re.sub(r"[^\w.-]+", "-", text, flags=re.ASCII).strip("-.")[:_MAX_JOB_NAME] or "paceline"
    return f"p{plain}" if plain[0].isdigit() else plain


def name(what: str, text: str) -> str:
    """Return a name as it is; one with other characters than names have is refused."""
    if not re.fullmatch(NAME, text):
        raise NotForScript(what, text, "it is no name")
    return text


def log_file(folder: Path, file: str, not_in_folder: str) -> str:
    """Return a path in double quotes; a folder is refused that has characters which the scheduler reads otherwise."""
    text = str(folder)
    wrong = next((each for each in text if each in not_in_folder or not each.isprintable()), None)
    if wrong is not None:
        advice = "choose another folder: `--out` of the run, or `--script FILE` for the script and the job's output"
        raise NotForScript("the folder", text, f"the scheduler has a meaning of its own for {wrong!r}", advice)
    return f'"{text}/{file}"'


def directive(line: str) -> str:
    """Return one line of options in the scheduler's own words, as the user typed it."""
    if not line.startswith("-") or not line.isprintable():
        why = "it must begin with a dash" if line.isprintable() else "it has characters that nobody sees"
        raise NotForScript("the option", line, why, 'type as for the scheduler: `--directives "--exclusive"`')
    return line


def _as_bytes(character: str) -> str:
    return "".join(f"\\x{byte:02x}" for byte in character.encode("utf-8", "surrogateescape"))


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
    yield f"cd -- {quote(str(job.folder))} || exit 1"
    for variable, value in job.environment:
        if not re.fullmatch(r"[A-Za-z_]\w*", variable, re.ASCII):
            raise NotForScript("the variable", variable, "it is no name")
        yield f"export {variable}={quote(value)}"
    for line in job.setup:
        if re.match(r"\s*#(SBATCH|BSUB|PBS|\$)", line):
            raise NotForScript("the command", line, "it is an option of the scheduler", "give it to `--directives`")
        yield line
    # Another one in every start, in the memory of the job only.
    yield f'export {VARIABLE}="${{{VARIABLE}:-$(od -An -N32 -tx1 /dev/urandom | tr -d " \\n")}}"'


def ranks_in_background(starter: str, job: BatchJob, pass_on: str) -> Iterator[str]:
    """Start the ranks, pass `pass_on` signals to them as USR1, and wait; `$told` and `$code` say how it ended."""
    yield "told= ranks="
    yield f"""trap 'told=yes; [ -z "$ranks" ] || kill -USR1 "$ranks"' {pass_on}"""
    yield """trap 'kill -TERM "$ranks"' TERM"""
    yield f"{starter} {join(job.command)} &"
    yield "ranks=$!"
    # The warning may have come between the two.
    yield '[ -z "$told" ] || kill -USR1 "$ranks"'
    # A signal ends `wait` early; the ranks are then still there.
    yield 'while wait "$ranks"; code=$?; kill -0 "$ranks" 2>/dev/null; do :; done'


def mpirun(job: BatchJob, mpi: Literal["openmpi", "mpich"], *, slot_is_rank: bool = False) -> str:
    """Return the words that start the ranks; a slot of the scheduler is a core, or one rank with its cores.

    Open MPI gives its ranks on other hosts only the variables that it is told; MPICH gives them all.
    """
    if mpi == "mpich":
        return join(["mpiexec", "-np", str(job.ranks), "-ppn", str(job.procs_per_node)])
    names = ["MASTER_ADDR", VARIABLE, *(name for name, _ in job.environment if name != VARIABLE)]
    exported = [word for name in names for word in ("-x", name)]
    # One slot per core: a rank then takes several. With one slot per rank, its threads are ours to choose: bound to the
    # core of its slot it could use no other.
    cores = ["--bind-to", "none"]
    if job.cpus_per_rank is not None:
        slots = f"ppr:{job.procs_per_node}:node" if slot_is_rank else "slot"
        cores = ["--map-by", f"{slots}:PE={job.cpus_per_rank}"]
    return join(["mpirun", "-np", str(job.ranks), *cores, *exported])
