"""Programs that begin in a process which has imported torch already: a start takes milliseconds instead of seconds.

They are processes of their own, with an environment, an exit code and pipes, as those of `subprocess.Popen`, of which
`Forked` has the part that tests use.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import TextIO

from tests.crash import _context


class Forked:
    """`python -m MODULE WORDS`: calls `main()` of the module."""

    def __init__(self, module: str, words: Sequence[str], env: Mapping[str, str] | None = None) -> None:
        (out, out_end), (err, err_end) = (_context().Pipe(duplex=False) for _ in range(2))
        surroundings = dict(os.environ if env is None else env)
        args = (module, [module, *words], surroundings, list(sys.path), os.getcwd(), out_end, err_end)
        self._process = _context().Process(target=_run, args=args)
        self._process.start()
        self.stdout, self.stderr = _text(out), _text(err)
        out_end.close()
        err_end.close()

    def __enter__(self) -> Forked:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.join()
        self.stdout.close()
        self.stderr.close()

    def communicate(self, timeout: float) -> tuple[str, str]:
        """Return what it and its children wrote, when all have closed their ends."""
        with ThreadPoolExecutor(2) as pool:
            texts = [pool.submit(stream.read) for stream in (self.stdout, self.stderr)]
            try:
                out, err = (text.result(timeout) for text in texts)
            except TimeoutError:
                self.kill()  # or the threads would read for ever
                raise
        self._process.join(timeout)
        self.stdout.close()
        self.stderr.close()
        return out, err

    @property
    def pid(self) -> int:
        number: int = self._process.pid
        return number

    @property
    def returncode(self) -> int | None:
        code: int | None = self._process.exitcode
        return code

    def wait(self, timeout: float) -> int | None:
        """Return the exit code, when it has ended; None if it has not in time."""
        self._process.join(timeout)
        return self.returncode

    def send_signal(self, number: int) -> None:
        os.kill(self._process.pid, number)

    def kill(self) -> None:
        if self._process.exitcode is None:
            self.send_signal(signal.SIGKILL)


def _text(end: Connection) -> TextIO:
    stream = os.fdopen(os.dup(end.fileno()), encoding="utf-8")
    end.close()
    return stream


def _run(
    module: str, argv: list[str], env: dict[str, str], path: list[str], folder: str, out: Connection, err: Connection
) -> None:
    os.environ.clear()
    os.environ.update(env)
    os.chdir(folder)
    sys.path[:], sys.argv[:] = path, argv
    for number, end in ((1, out), (2, err)):
        os.dup2(end.fileno(), number)
        end.close()
    # New ones: those of before take the pipes for what was there.
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", errors="backslashreplace", buffering=1, closefd=False)  # noqa: SIM115
    sys.exit(importlib.import_module(module).main())
