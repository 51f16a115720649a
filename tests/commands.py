"""Commands in processes of their own, forked from one that has imported torch: a start takes milliseconds.

So are the ranks that a command starts. How they start for a user is what tests/launchers is about.
"""

from __future__ import annotations

import os
import socket
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.chaos.processes import fork_ranks

from tests.crash import TIMEOUT_S, _context


@dataclass(frozen=True)
class Ended:
    """A command that has ended."""

    code: int | None
    """None if it was still running and had to be killed."""
    out: str
    err: str


def run_command(words: Sequence[str], timeout_s: float = TIMEOUT_S, **env: str) -> Ended:
    """Run `paceline WORDS`."""
    return _run([(words, env)], timeout_s)[0]


def run_by_hand(words_by_rank: Sequence[Sequence[str]], timeout_s: float = TIMEOUT_S) -> list[Ended]:
    """Run `paceline WORDS` as the ranks of one job, each with its own words, as somebody with two terminals would."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    size = str(len(words_by_rank))
    job = {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    jobs = [(words, {**job, "RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank, words in enumerate(words_by_rank)]
    return _run(jobs, timeout_s)


def _run(jobs: Sequence[tuple[Sequence[str], Mapping[str, str]]], timeout_s: float) -> list[Ended]:
    with tempfile.TemporaryDirectory() as folder:
        files = [(Path(folder) / f"out{number}", Path(folder) / f"err{number}") for number in range(len(jobs))]
        processes = [
            _context().Process(
                target=_work, args=(list(words), dict(env), *map(str, each), os.getcwd(), list(sys.path))
            )
            for (words, env), each in zip(jobs, files, strict=True)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join(timeout_s)
        codes = [process.exitcode for process in processes]
        for process in processes:
            process.kill()
            process.join()
        texts = [tuple(file.read_text() if file.exists() else "" for file in each) for each in files]
        return [Ended(code, *text) for code, text in zip(codes, texts, strict=True)]


def _work(words: list[str], env: dict[str, str], out: str, err: str, folder: str, path: list[str]) -> None:
    for name, number in ((out, 1), (err, 2)):
        file = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, number)
    os.environ.update(env)
    os.chdir(folder)
    sys.path[:] = path
    sys.argv = ["paceline", *words]
    from paceline.cli.main import main

    if "--procs" in words or words[:1] == ["launch"]:
        fork_ranks()
    code = main(words)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
