"""Paceline commands as forks of one process that has imported everything: a start takes milliseconds, not seconds.

What is forked is what a user starts: own process, session, standard streams and environment, signals as by default,
the command line's `main`. The launcher's ranks are forked, too (see `_Spare`). A process that uses this must have no
threads, and compute nothing with torch but with one thread.
"""

from __future__ import annotations

import atexit
import ctypes
import importlib
import itertools
import json
import os
import platform
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

_SUBREAPER, _DEATH_SIGNAL = 36, 1  # prctl
_CLONE_PARENT = 0x8000
_SYS_CLONE = {"x86_64": 56, "aarch64": 220}
_FOREIGN = ("MASTER_", "RANK", "LOCAL_", "WORLD_SIZE", "TORCHELASTIC", "SLURM_", "PACELINE_")
_PAUSE_S = 0.004


@dataclass
class Running:
    """A command that was started."""

    pid: int
    name: str
    words: Sequence[str]
    folder: Path
    code: int | None = None
    """Exit code, negative for a signal; None while it runs."""

    @property
    def out(self) -> str:
        return _read(self.folder / f"{self.name}.out")

    @property
    def err(self) -> str:
        return _read(self.folder / f"{self.name}.err")


def _read(path: Path) -> str:
    """Return a stream's text; empty if the process was killed before it had the stream."""
    try:
        return path.read_text(encoding="utf-8", errors="surrogateescape")
    except FileNotFoundError:
        return ""


class Nursery:
    """Starts processes, waits for them, and finds what they leave: orphans become children of this process."""

    def __init__(self) -> None:
        ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)
        self._running: dict[int, Running] = {}

    def start(
        self,
        words: Sequence[str],
        folder: Path,
        name: str,
        env: Mapping[str, str] | None = None,
        before: Callable[[], None] | None = None,
        cwd: Path | None = None,
    ) -> Running:
        """Start `paceline WORDS`; its streams go to NAME.out and NAME.err of the folder. `before` runs in the child."""
        return self.call(lambda: _paceline(words), folder, name, env, before, cwd, words)

    def call(
        self,
        job: Callable[[], int],
        folder: Path,
        name: str,
        env: Mapping[str, str] | None = None,
        before: Callable[[], None] | None = None,
        cwd: Path | None = None,
        words: Sequence[str] = (),
    ) -> Running:
        """Start any function as a process; what it returns is the exit code."""
        pid = os.fork()
        if pid == 0:
            _become(job, folder, name, env or {}, before, cwd or folder)
        running = Running(pid, name, words, folder)
        self._running[pid] = running
        return running

    def wait(self, processes: Sequence[Running], timeout_s: float, meanwhile: Callable[[], None] | None = None) -> bool:
        """Wait until all have ended; return False if they have not in time. `meanwhile` is called all the time."""
        deadline = time.monotonic() + timeout_s
        while True:
            self.reap()
            if all(process.code is not None for process in processes):
                return True
            if time.monotonic() > deadline:
                return False
            if meanwhile is not None:
                meanwhile()
            time.sleep(_PAUSE_S)

    def reap(self) -> None:
        """Note the exit codes of all that have ended."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid in self._running:
                self._running.pop(pid).code = os.waitstatus_to_exitcode(status)

    def left(self, patience_s: float) -> list[str]:
        """Return the descendants that are still there after so many seconds; one line each."""
        deadline = time.monotonic() + patience_s
        while True:
            self.reap()
            alive = descendants(os.getpid())
            if not alive or time.monotonic() > deadline:
                return [f"{pid} {_command_line(pid)}" for pid in alive]
            time.sleep(0.02)

    def clear(self) -> None:
        """End whatever is still there, by its id."""
        for _ in range(50):
            self.reap()
            alive = descendants(os.getpid())
            if not alive:
                break
            for pid in alive:
                send(pid, signal.SIGKILL)
            time.sleep(_PAUSE_S)
        self._running.clear()


def send(pid: int, number: signal.Signals) -> bool:
    """Send a signal; return False if there is no such process any more."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def descendants(root: int) -> list[int]:
    """Return the processes below `root`, zombies left out, parents before children."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            with open(f"/proc/{entry}/stat", encoding="utf-8", errors="replace") as file:
                state, parent = file.read().rpartition(")")[2].split()[:2]
        except OSError:
            continue
        if state != "Z":
            children.setdefault(int(parent), []).append(int(entry))
    found, queue = [], [root]
    while queue:
        queue = [child for pid in queue for child in children.get(pid, [])]
        found += queue
    return found


def _command_line(pid: int) -> str:
    try:
        state = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace").splitlines()
        return f"{state[0].split()[1]} {next(line for line in state if line.startswith('State'))}"
    except (OSError, StopIteration):
        return "(gone)"


# -- in the child ------------------------------------------------------------------------------------------------------


def _become(
    job: Callable[[], int],
    folder: Path,
    name: str,
    env: Mapping[str, str],
    before: Callable[[], None] | None,
    cwd: Path,
) -> NoReturn:
    try:
        os.setsid()
        for number in range(1, signal.NSIG):
            if number not in (signal.SIGKILL, signal.SIGSTOP, signal.SIGPIPE) and number < 32:
                signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        _redirect(folder / f"{name}.out", folder / f"{name}.err")
        _set_environment(env)
        os.chdir(cwd)
        if before is not None:
            before()
    except BaseException:
        traceback.print_exc()
        os._exit(99)
    _run_and_exit(job)


def _run_and_exit(job: Callable[[], int]) -> NoReturn:
    """Run a function and end as the interpreter would."""
    code = 1
    try:
        code = job()
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else 0 if left.code is None else 1
    except KeyboardInterrupt:
        traceback.print_exc()
        sys.stderr.flush()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        traceback.print_exc()
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:
        traceback.print_exc()
    os._exit(code & 0xFF)


def _redirect(out: Path, err: Path) -> None:
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    for number, path in ((1, out), (2, err)):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(descriptor, number)
    os.closerange(3, 4096)
    _reopen_streams()


def _reopen_streams() -> None:
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout = os.fdopen(1, "w", encoding="utf-8", errors="strict", closefd=False)
    sys.stderr = os.fdopen(2, "w", 1, encoding="utf-8", errors="backslashreplace", closefd=False)


def _set_environment(env: Mapping[str, str]) -> None:
    for name in [name for name in os.environ if name.startswith(_FOREIGN)]:
        del os.environ[name]
    os.environ.update(env)


def _paceline(words: Sequence[str]) -> int:
    from paceline.cli.main import main

    if "--procs" in words or words[:1] == ["launch"]:
        fork_ranks()
    sys.argv = ["paceline", *words]
    return main()  # without words: as the program itself, which ends afterwards


def limit_memory(more_bytes: int) -> None:
    """Let this process map so many bytes more than it has now."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + more_bytes
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


# -- ranks of our own launcher -----------------------------------------------------------------------------------------


def fork_ranks() -> None:
    """Let the launcher in this process, which has no threads yet, fork its ranks instead of starting an interpreter
    for each. They are to be programs like `python -m MODULE WORDS`, and those are calls of the module's `main()`."""
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    from paceline.world.launch import survivors

    spare = _Spare()

    def popen(self: Any, args: Sequence[str], env: Mapping[str, str]) -> _Forked:
        return spare.fork(list(args), dict(env))

    setattr(subprocess_handler.SubprocessHandler, "_popen", popen)  # noqa: B010  typed as Popen
    survivors.start_process = lambda command, environment: spare.fork(list(command), dict(environment))


class _Spare:
    """A process without threads that forks on behalf of the launcher, which has some by then.

    What it forks are children of the launcher (CLONE_PARENT), which waits for them and whose death they notice.
    """

    def __init__(self) -> None:
        here, there = socket.socketpair()
        launcher = os.getpid()
        if os.fork() == 0:
            here.close()
            _end_with(launcher, signal.SIGKILL)
            self._serve(there)
        there.close()
        self._pipe = here

    def fork(self, command: Sequence[str], env: Mapping[str, str]) -> _Forked:
        self._pipe.sendall(json.dumps([list(command), dict(env)]).encode() + b"\n")
        answer = b""
        while not answer.endswith(b"\n"):
            answer += self._pipe.recv(64)
        return _Forked(int(answer))

    @staticmethod
    def _serve(pipe: socket.socket) -> NoReturn:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        with pipe.makefile("rb") as requests:
            for line in requests:
                command, env = json.loads(line)
                pid = _fork_as_sibling()
                if pid == 0:
                    _become_rank(command, env)
                pipe.sendall(b"%d\n" % pid)
        os._exit(0)


def _fork_as_sibling() -> int:
    libc, python = ctypes.PyDLL(None), ctypes.pythonapi
    python.PyOS_BeforeFork()
    pid: int = libc.syscall(_SYS_CLONE[platform.machine()], _CLONE_PARENT | signal.SIGCHLD, 0, 0, 0, 0)
    if pid == 0:
        python.PyOS_AfterFork_Child()
    else:
        python.PyOS_AfterFork_Parent()
    return pid


def _become_rank(command: Sequence[str], env: Mapping[str, str]) -> NoReturn:
    """Do what `python -c BIND parent signal python -m MODULE WORDS` does, in this process."""
    try:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.closerange(3, 4096)
        _reopen_streams()
        os.environ.clear()
        os.environ.update(env)
        module, *words = command[list(command).index("-m") + 1 :]
        parent, number = next(
            (int(word), int(other)) for word, other in itertools.pairwise(command) if word.isdigit() and other.isdigit()
        )
        _end_with(parent, signal.Signals(number))
    except BaseException:
        traceback.print_exc()
        os._exit(99)
    _run_and_exit(lambda: _paceline(words) if module == "paceline" else _main_of(module, words))


def _main_of(module: str, words: Sequence[str]) -> int:
    sys.argv = [module, *words]
    code: int = importlib.import_module(module).main()
    return code


def _end_with(parent: int, number: signal.Signals) -> None:
    ctypes.CDLL(None).prctl(_DEATH_SIGNAL, int(number), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(0)


class _Forked:
    """As much of `subprocess.Popen` as the elastic agent uses."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._asking = threading.Lock()

    def poll(self) -> int | None:
        with self._asking:  # a launcher has a thread that waits for it, too
            if self.returncode is None:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                if pid:
                    self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        deadline = None if timeout is None else time.monotonic() + timeout
        while self.poll() is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("rank", timeout or 0.0)
            time.sleep(_PAUSE_S)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)
