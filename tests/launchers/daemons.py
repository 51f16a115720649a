"""Processes that serve while tests run, and end with them."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

READY_S = 120.0


class Daemons:
    """Started in order, ended in reverse order; what they say goes to files."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self, words: Sequence[str], env: Mapping[str, str] | None = None) -> None:
        with (self._folder / f"daemon{len(self._processes)}.log").open("wb") as log:
            self._processes.append(
                subprocess.Popen(words, env=env, stdout=log, stderr=log, stdin=subprocess.DEVNULL, cwd=self._folder)
            )

    def wait_until(self, ready: Callable[[], bool], what: str) -> None:
        """Ask until they are ready; a daemon that ended instead is shown."""
        deadline = time.monotonic() + READY_S
        while not ready():
            ended = [process.args for process in self._processes if process.poll() is not None]
            if ended or time.monotonic() > deadline:
                raise AssertionError(f"{what}: not ready; ended: {ended}\n{self.logs()}")
            time.sleep(0.1)

    def logs(self) -> str:
        return "\n".join(f"--- {path.name}\n{path.read_text()[-3000:]}" for path in sorted(self._folder.glob("*.log")))

    def stop(self) -> None:
        for process in reversed(self._processes):
            process.terminate()
        for process in reversed(self._processes):
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
