"""Ranks that may die: fresh processes for one job, ended together as a launcher would when one of them is killed."""

from __future__ import annotations

import functools
import importlib
import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

TIMEOUT_S = 90.0
KILLED = -9


@functools.cache
def _context() -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "paceline.train.fit", "paceline.cli.train", "tests.ranks"])
    return context


_attempts = 0


@functools.cache
def _store() -> Any:
    from paceline.world.rendezvous.server import StoreServer

    return StoreServer("127.0.0.1", 0, os.environ["PACELINE_SECRET"].encode())


def run_until_death(size: int, function: Callable[..., None], *args: Any) -> list[int]:
    """Call `function(link, *args)` in `size` new processes; their exit codes (-9 for SIGKILL) once all have ended.

    When one dies the others are killed, so that no rank ends well by itself after a crash.
    """
    global _attempts
    _attempts += 1
    name = (function.__module__, function.__qualname__)
    port = _store().port
    workers = [
        _context().Process(target=_work, args=(rank, size, port, _attempts, name, args, list(sys.path)))
        for rank in range(size)
    ]
    for worker in workers:
        worker.start()
    alive = {worker.sentinel: worker for worker in workers}
    while alive:
        ended = wait(list(alive), TIMEOUT_S)
        if not ended or any(alive[sentinel].exitcode != 0 for sentinel in ended):
            for worker in workers:
                worker.kill()
        for sentinel in ended:
            alive.pop(sentinel).join()
    return [worker.exitcode for worker in workers]


def command(words: list[str], output: Path, env: dict[str, str]) -> Any:
    """Start `paceline WORDS` in a process that need not import torch again; what it says goes to the file."""
    process = _context().Process(target=_command, args=(words, str(output), {**os.environ, **env}, list(sys.path)))
    process.start()
    return process


def _command(words: list[str], output: str, env: dict[str, str], path: list[str]) -> None:
    os.environ.clear()
    os.environ.update(env)
    sys.path[:] = path
    handle = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(handle, stream)
    from paceline.cli.main import main

    sys.exit(main(words))


def _work(rank: int, size: int, port: int, attempt: int, name: tuple[str, str], args: Any, path: list[str]) -> None:
    from paceline.world.discover.environment import World
    from paceline.world.start import start

    sys.path[:] = path
    meeting = f"127.0.0.1:{port}" if size > 1 else None
    attempt += 100_000  # apart from the attempts of the pool
    world = World(rank, rank, size, size, 0, 1, "crash test", meeting, attempt=attempt, launcher_hosts_store=True)
    module, qualname = name
    function = functools.reduce(getattr, qualname.split("."), importlib.import_module(module))
    try:
        with start(world, device="cpu", threads=1, start_timeout_s=60, timeout_s=60) as link:
            function(link, *args)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
