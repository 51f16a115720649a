"""Trials in processes of their own: whatever memory, a signal or a bug does to one, the search goes on.

The parent writes what to try into a folder; each rank of the trial writes there how it ended. A rank that the kernel
kills says nothing, and that is how it is known.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from paceline.core.disk import replacing
from paceline.core.errors import PacelineError
from paceline.core.language import ENGLISH, speaking
from paceline.lab.tune.knobs import Facts
from paceline.lab.tune.search import Failure, FailureKind, Speed
from paceline.train.loss import ALLOCATION_FAILURES, OutOfMemory
from paceline.world.failure.together import is_broken_link, user_message
from paceline.world.parent_process import bound, end_with_parent

SPEC, FACTS, SPEED, LOG = "trial.json", "facts.json", "speed.json", "output.txt"
POLL_S = 0.05
LEAVE_S = 5.0
"""Time for the processes of a trial to leave when they are told to, before they are killed."""
_KILLED_WORKER = "is killed by signal: Killed"


@dataclass(frozen=True)
class Spec:
    """Description of a trial, for its processes."""

    task: str
    settings: dict[str, Any]
    procs: int
    measure_s: float
    is_paced: bool = False
    """It waits for a word before each part: see tune_race.py."""


# -- inside a trial ----------------------------------------------------------------------------------------------------


def die_with_parent() -> None:
    """A trial must not outlive the search, nor a rank its launcher; and if memory runs out, it is the one to go."""
    end_with_parent(signal.SIGKILL)
    try:
        Path("/proc/self/oom_score_adj").write_text("1000")
    except OSError:
        return  # not Linux, or a container that does not show it: then the kernel chooses


def read_spec(folder: Path) -> Spec:
    return Spec(**json.loads((folder / SPEC).read_text(encoding="utf-8")))


def write_facts(folder: Path, facts: Facts) -> None:
    _write(folder / FACTS, dataclasses.asdict(facts))


def write_speed(folder: Path, speed: Speed) -> None:
    _write(folder / SPEED, dataclasses.asdict(speed))


def write_end(folder: Path, rank: int, error: BaseException) -> None:
    """Write how a rank failed, for the search."""
    kind = kind_of(error)
    with speaking(ENGLISH):
        text = user_message(error).removeprefix("error: ") if isinstance(error, PacelineError) else repr(error)
    _write(folder / f"rank-{rank}.json", {"kind": kind, "what": text})


def kind_of(error: BaseException) -> str:
    """`memory`, `killed`, `lost` (another rank is gone), `refused` (a user's mistake) or `failed`."""
    if isinstance(error, (OutOfMemory, torch.OutOfMemoryError, MemoryError)):
        return "memory"
    if is_broken_link(error):
        return "lost"
    text = str(error)
    if isinstance(error, (RuntimeError, OSError)):
        if _KILLED_WORKER in text:
            return "killed"
        if any(sign in text for sign in ALLOCATION_FAILURES):
            return "memory"
    return "refused" if isinstance(error, PacelineError) else "failed"


def _write(path: Path, values: Mapping[str, Any]) -> None:
    with replacing(path) as file:
        json.dump(values, file)


# -- around a trial ----------------------------------------------------------------------------------------------------


def run_trial(
    command: Sequence[str], folder: Path, spec: Spec, limit_s: float, tick: Callable[[], None]
) -> tuple[Speed | Failure, Facts | None]:
    """Run `command FOLDER` as a trial; what came of it, and what it said of the task. It calls `tick` meanwhile."""
    deadline = time.monotonic() + limit_s
    with started(command, folder, spec) as process:
        while process.poll() is None and time.monotonic() < deadline:
            tick()
            time.sleep(POLL_S)
        is_late = process.poll() is None
    outcome = judge(folder, process.returncode, spec.procs)
    if is_late and not isinstance(outcome, Speed):
        outcome = Failure("time", f"not measured within {limit_s:.0f} s")
    facts = folder / FACTS
    return outcome, Facts.read(json.loads(facts.read_text(encoding="utf-8"))) if facts.exists() else None


@contextmanager
def started(command: Sequence[str], folder: Path, spec: Spec) -> Iterator[subprocess.Popen[bytes]]:
    """The processes of a trial; they are gone when this is left."""
    folder.mkdir(parents=True)
    _write(folder / SPEC, dataclasses.asdict(spec))
    with (folder / LOG).open("wb") as log:
        process = subprocess.Popen(
            bound([*command, str(folder)], signal.SIGKILL),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            yield process
        finally:
            end(process)


def end(process: subprocess.Popen[bytes]) -> None:
    """End a trial and all that it started: first asked, then killed."""
    if process.poll() is None:
        process.terminate()  # a launcher passes it on to its ranks
        with suppress(subprocess.TimeoutExpired):
            process.wait(LEAVE_S + 2.0)
    # Also where the first process is gone: a rank that did not listen may be left, with its memory.
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def judge(folder: Path, code: int, procs: int) -> Speed | Failure:
    """Return the outcome of a trial, from its files and its exit code."""
    if (folder / SPEED).exists():
        return Speed(**json.loads((folder / SPEED).read_text(encoding="utf-8")))
    paths = {rank: folder / f"rank-{rank}.json" for rank in range(procs)}
    ends = {rank: json.loads(path.read_text(encoding="utf-8")) for rank, path in paths.items() if path.exists()}
    by_kind = {each["kind"]: each["what"] for each in reversed(ends.values())}
    kinds: tuple[FailureKind, ...] = ("memory", "killed", "failed", "refused")
    for kind in kinds:
        if kind in by_kind:
            # Of a bug, what was printed has the traceback.
            return Failure(kind, (kind == "failed" and tail(folder)) or by_kind[kind])
    silent = [rank for rank in range(procs) if rank not in ends]
    if procs > 1 and silent and code != 0:
        return _silent(silent, folder)
    return _exit(code, folder)


def _exit(code: int, folder: Path) -> Failure:
    """Return what the exit code means, where no rank says more."""
    if code == -signal.SIGKILL:
        return Failure("killed", "ended by SIGKILL, as the kernel does when memory runs out")
    if code < 0:
        return Failure("failed", f"ended by {signal.Signals(-code).name}")
    return Failure("failed", tail(folder) or f"ended with code {code}")


def _silent(silent: Sequence[int], folder: Path) -> Failure:
    """Ranks that left no word: killed, or told to leave because one was; before any began it is a failed start."""
    text = tail(folder)
    if "SIGKILL" in text or "without a word" in text:
        return Failure("killed", f"rank {', '.join(map(str, silent))} ended without a word, as when memory runs out")
    return Failure("failed", text or "the ranks did not start")


def tail(folder: Path, lines: int = 40) -> str:
    """The end of what a trial printed."""
    text = (folder / LOG).read_text(encoding="utf-8", errors="replace") if (folder / LOG).exists() else ""
    return "\n".join(text.rstrip().splitlines()[-lines:])
