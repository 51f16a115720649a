"""`@ranks(1, 2, 4)`: run a test body on that many gloo processes on loopback.

The processes are started once, when first needed, and reused: a fresh start of four costs seconds.
After a failure or a hang they are replaced, so that one bad test does not spoil the next.
"""

from __future__ import annotations

import faulthandler
import functools
import importlib
import inspect
import multiprocessing
import os
import pickle
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

POOL_SIZE = 4
TIMEOUT_S = 60.0
# After one rank failed, the others fail as their collectives break; those that do not are given up.
STRAGGLER_S = 5.0


class RanksFailed(AssertionError):
    """What went wrong on which rank."""


def ranks(*sizes: int, timeout_s: float = TIMEOUT_S) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run `def test_x(link, ...)` at each of these world sizes; other arguments are fixtures that can be pickled."""

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        first, *rest = inspect.signature(body).parameters.values()
        assert first.name == "link", f"{body.__qualname__}: the first argument of a test on ranks is `link`"

        @functools.wraps(body)
        def test(world_size: int, **fixtures: Any) -> None:
            run_ranks(world_size, test, *(fixtures[parameter.name] for parameter in rest), timeout_s=timeout_s)

        # pytest reads the arguments from here: the world size instead of the link.
        size = inspect.Parameter("world_size", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        test.__signature__ = inspect.Signature([size, *rest])  # type: ignore[attr-defined]
        return pytest.mark.parametrize("world_size", sizes)(test)

    return decorate


def run_ranks(
    size: int, function: Callable[..., Any], *args: Any, timeout_s: float = TIMEOUT_S, machines: int = 1
) -> list[Any]:
    """Call `function(link, *args)` on `size` ranks; what each returned, by rank. It must be a module's own function.

    The ranks are told that they are on so many `machines`, which have equally many each.
    """
    assert "<locals>" not in function.__qualname__, f"{function.__qualname__}: ranks cannot import an inner function"
    return _pool().run(size, (function.__module__, function.__qualname__), args, timeout_s, machines)


def close_pool() -> None:
    """End the processes; conftest.py does it at the end of the session."""
    if _pool.cache_info().currsize:
        _pool().stop()
        _pool.cache_clear()


@functools.cache
def _pool() -> Pool:
    return Pool()


@dataclass
class Worker:
    process: BaseProcess
    pipe: Connection
    stacks: Path
    """Where the worker writes its stacks when it has not finished in time."""


class Pool:
    """The processes, and the store where they meet: one store for all tests, a new attempt in it for each."""

    def __init__(self) -> None:
        from paceline.world.rendezvous.server import StoreServer

        self._store = StoreServer("127.0.0.1", 0, os.environ["PACELINE_SECRET"].encode())
        # A server that has imported torch once and forks: a new worker takes milliseconds.
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["torch", "paceline.train.fit", "paceline.cli.train", "tests.ranks"])
        self._workers: list[Worker] = []
        self._runs = 0

    def run(
        self, size: int, name: tuple[str, str], args: tuple[Any, ...], timeout_s: float, machines: int = 1
    ) -> list[Any]:
        while len(self._workers) < max(size, POOL_SIZE):  # more than usual stay until the next failure
            self._workers.append(self._start(len(self._workers)))
        self._runs += 1
        local_size = size // machines
        for rank, worker in enumerate(self._workers[:size]):
            job = {
                "name": name,
                "args": args,
                "path": sys.path,
                "timeout_s": timeout_s,
                "world": {
                    "rank": rank,
                    "local_rank": rank % local_size,
                    "size": size,
                    "local_size": local_size,
                    "node_rank": rank // local_size,
                    "nodes": machines,
                    "launcher": "test pool",
                    "meeting": f"127.0.0.1:{self._store.port}" if size > 1 else None,
                    "attempt": self._runs,
                    "launcher_hosts_store": True,
                },
            }
            worker.pipe.send_bytes(pickle.dumps(job))
        answers = self._collect(self._workers[:size], timeout_s)
        stacks = {rank: self._workers[rank].stacks.read_text() for rank in range(size) if rank not in answers}
        if len(answers) < size or any(status == "failed" for status, _ in answers.values()):
            self.stop()
            raise RanksFailed(_describe(size, answers, stacks, timeout_s))
        for status, value in answers.values():
            if status == "skipped":
                pytest.skip(value)
        return [answers[rank][1] for rank in range(size)]

    def stop(self) -> None:
        for worker in self._workers:
            worker.process.kill()
        for worker in self._workers:
            worker.process.join()
            worker.pipe.close()
            worker.stacks.unlink(missing_ok=True)
        self._workers = []

    def _start(self, rank: int) -> Worker:
        here, there = self._context.Pipe()
        handle, stacks = tempfile.mkstemp(prefix=f"paceline-rank{rank}-")
        os.close(handle)
        # Not a daemon: those may not have children, and test bodies use loaders with worker processes.
        process = self._context.Process(target=_serve, args=(there, stacks), name=f"rank{rank}")
        process.start()
        there.close()
        return Worker(process, here, Path(stacks))

    @staticmethod
    def _collect(workers: list[Worker], timeout_s: float) -> dict[int, tuple[str, Any]]:
        answers: dict[int, tuple[str, Any]] = {}
        waiting = {worker.pipe: rank for rank, worker in enumerate(workers)}
        deadline = time.monotonic() + timeout_s
        while waiting:
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = waiting.pop(pipe)
                try:
                    answers[rank] = pickle.loads(pipe.recv_bytes())
                except EOFError:
                    answers[rank] = ("failed", "the process ended without an answer")
                if answers[rank][0] == "failed":
                    deadline = min(deadline, time.monotonic() + STRAGGLER_S)
        return answers


def _describe(size: int, answers: dict[int, tuple[str, Any]], stacks: dict[int, str], timeout_s: float) -> str:
    parts = [f"on {size} ranks:"]
    parts += [f"--- rank {rank}:\n{value}" for rank, (status, value) in sorted(answers.items()) if status == "failed"]
    for rank, text in stacks.items():
        parts.append(f"--- rank {rank} gave no answer in {timeout_s:g} s, or after another failed:\n{text}")
    return "\n".join(parts)


def _serve(pipe: Connection, stacks: str) -> None:
    """The life of a worker: one test body after the other."""
    warnings.simplefilter("error")
    with open(stacks, "w") as file:
        while True:
            try:
                job = pickle.loads(pipe.recv_bytes())
            except EOFError:
                return
            file.seek(0)
            file.truncate()
            faulthandler.dump_traceback_later(max(job["timeout_s"] - 0.5, 0.1), file=file)
            answer = _answer(job)
            faulthandler.cancel_dump_traceback_later()
            pipe.send_bytes(answer)


def _answer(job: dict[str, Any]) -> bytes:
    from paceline.world.discover.environment import World
    from paceline.world.start import start

    sys.path[:] = job["path"]
    try:
        world = World(**job["world"])
        module, qualname = job["name"]
        function = functools.reduce(getattr, qualname.split("."), importlib.import_module(module))
        function = inspect.unwrap(function)
        link = start(world, device="cpu", threads=1, start_timeout_s=job["timeout_s"], timeout_s=job["timeout_s"])
        try:
            value = function(link, *job["args"])
        finally:
            link.close()
        return pickle.dumps(("done", value))
    except pytest.skip.Exception as skipped:
        return pickle.dumps(("skipped", str(skipped)))
    except BaseException as error:
        return pickle.dumps(("failed", "".join(traceback.format_exception(error)) + _locals(error)))


def _locals(error: BaseException) -> str:
    """The values where an assertion failed: pytest does not rewrite assertions in the workers."""
    frame = [frame for frame, _ in traceback.walk_tb(error.__traceback__)][-1]
    lines = [f"    {name} = {repr(value)[:300]}" for name, value in frame.f_locals.items()]
    return "  where\n" + "\n".join(lines) + "\n" if isinstance(error, AssertionError) else ""
