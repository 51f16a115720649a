"""`paceline tune` that is told to leave, or killed: it leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.lab.tune import folder as tune_folder
from paceline.lab.tune.folder import AskedToLeave, leaving_when_asked, work_folder

TASK = f"{Path(__file__).parents[2] / 'cli' / 'tasks_for_tests.py'}:Good"


def until(is_so: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    while not is_so():
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)


def tuning(folder: Path, *words: str) -> subprocess.Popen[str]:
    """A search whose first trial has begun."""
    command = [sys.executable, "-m", "paceline", "tune", TASK, "--device", "cpu", "--threads", "1", *words]
    process = subprocess.Popen(
        command, cwd=folder, env={**os.environ, "TMPDIR": str(folder)}, stdout=subprocess.PIPE, text=True
    )
    until(lambda: bool(list(folder.glob("*/0/output.txt"))), process)
    return process


def processes_of(folder: Path) -> list[int]:
    """Those that were told of this folder: trials, their launchers and ranks."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_bytes()
        except OSError:
            continue
        if str(folder).encode() in words:
            found.append(int(entry.name))
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.long)])
def test_nothing_is_left_of_a_search_that_is_ended(tmp_path: Path, number: signal.Signals) -> None:
    """Ranks, too, while they are still importing torch."""
    process = tuning(tmp_path, "--procs", "2", "--budget", "60")
    until(lambda: len(processes_of(tmp_path)) >= 3, process)  # a launcher and its ranks
    process.send_signal(number)
    said, _ = process.communicate(timeout=60)
    deadline = time.monotonic() + 60
    while (left := processes_of(tmp_path)) and time.monotonic() < deadline:
        time.sleep(0.02)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert left == []
    if number == signal.SIGTERM:
        assert process.returncode == 128 + signal.SIGTERM
        assert "nothing was measured, nothing is written" in said
        assert list(tmp_path.iterdir()) == []


def test_folders_of_the_dead_are_removed_and_of_the_living_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tune_folder.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    dead, foreign = tmp_path / "paceline-tune-dead", tmp_path / "paceline-tune-else"
    (dead / "0").mkdir(parents=True)
    (dead / tune_folder.LOCK).touch()
    foreign.mkdir()
    with work_folder() as mine:
        assert mine.parent == tmp_path
        with work_folder() as other:
            assert sorted(tmp_path.iterdir()) == sorted([mine, other, foreign])
    assert list(tmp_path.iterdir()) == [foreign]


def be_asked_twice(put_in_order: Path) -> None:
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)
    finally:
        os.kill(os.getpid(), signal.SIGTERM)
        put_in_order.touch()


def test_being_asked_to_leave_unwinds_and_is_asked_once(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(AskedToLeave) as left, leaving_when_asked():
        be_asked_twice(tmp_path / "in order")
    assert left.value.number == signal.SIGTERM
    assert (tmp_path / "in order").exists()
    assert signal.getsignal(signal.SIGTERM) is before
