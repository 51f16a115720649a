"""Whether a run is running is what its lock says, not what it wrote down before it was killed."""

from __future__ import annotations

import fcntl
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.core import run_lock
from paceline.core.disk import CannotWrite
from paceline.core.run_lock import status_now
from paceline.train.run import Run, RunBusy
from tests.train.checkpoint.test_writer import file_size_limit

TRAINS = """
import sys
from pathlib import Path
from paceline.train.run import Run
run = Run(Path(sys.argv[1]))
run.lock()
print("locked", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def trains(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that has the lock of the folder, until it is killed."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", TRAINS, str(tmp_path)], text=True, **pipes) as process:  # type: ignore[call-overload]
        assert process.stdout.readline() == "locked\n"
        yield process
        process.kill()


def test_running_until_it_is_killed(trains: subprocess.Popen[str], tmp_path: Path) -> None:
    assert status_now(tmp_path, "running") == "running"
    with pytest.raises(RunBusy, match=f"pid {trains.pid} on "):
        Run(tmp_path).lock()
    trains.send_signal(signal.SIGKILL)
    trains.wait()
    assert status_now(tmp_path, "running") == "died"
    for said in ("finished", "failed", "stopped"):
        assert status_now(tmp_path, said) == said, "who said how it ended is believed"
    run = Run(tmp_path)
    run.lock()
    assert status_now(tmp_path, "running") == "running", "it goes on"
    run.unlock()


def test_what_cannot_be_seen_from_here(tmp_path: Path) -> None:
    assert status_now(tmp_path, "running") == "running or died", "it has no lock"
    (tmp_path / ".lock").write_text("pid 7 on another-machine\n")
    assert status_now(tmp_path, "running") == "running or died on another-machine"
    (tmp_path / ".lock").write_text(f"pid 7 on {socket.gethostname()}\n")
    assert status_now(tmp_path, "running") == "died"


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(file: object, how: int) -> None:
        raise OSError(95, "Operation not supported")

    (tmp_path / ".lock").write_text(f"pid 7 on {socket.gethostname()}\n")
    monkeypatch.setattr(run_lock.fcntl, "flock", refuse)
    assert status_now(tmp_path, "running") == "running or died"


def test_who_only_looks_keeps_nobody_from_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".lock").touch()
    with (tmp_path / ".lock").open() as looks:
        fcntl.flock(looks, fcntl.LOCK_SH)
        monkeypatch.setattr("paceline.train.run.time.sleep", lambda seconds: fcntl.flock(looks, fcntl.LOCK_UN))
        run = Run(tmp_path)
        run.lock()
        assert status_now(tmp_path, "running") == "running"
        run.unlock()


def test_no_room_for_what_the_run_is(tmp_path: Path) -> None:
    with file_size_limit(tmp_path, 0):
        run = Run(tmp_path / "run")
        run.lock()  # it holds, although it cannot say whose it is
        busy = status_now(tmp_path / "run", "running")
        with pytest.raises(CannotWrite) as failure:
            run.write({"status": "running"})
    assert busy == "running"
    assert "run.json cannot be written: File too large" in str(failure.value)
    assert [path.name for path in (tmp_path / "run").iterdir()] == [".lock"]
    run.write({"status": "running"})
    assert (tmp_path / "run" / "run.json").exists()
    run.unlock()
