"""Storms of stop signals: however many come, and whenever, the checkpoint is on disk and the exit code is right."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.cli.main import main
from paceline.observe.journal import read
from paceline.train.checkpoint.reader import newest
from paceline.world.signals import STOP_SIGNALS
from tests.crash import _context
from tests.promises.stormy import ready_file

TASK = f"{Path(__file__).parent / 'stormy.py'}:Stormy"
SETTINGS = [
    "--global-batch",
    "8",
    "--grains",
    "2",
    "--epochs",
    "100000",
    "--device",
    "cpu",
    "--level",
    "0",
    "--lr",
    "0.01",
]
SETTINGS += ["--save-every-epochs", "100000", "--workers", "0"]


def storm(send: Callable[[int], None], is_over: Callable[[], bool], chance: random.Random, first: int) -> int:
    """Send a stop signal, then others at random moments until the process is gone; return how many."""
    count, deadline = 0, time.monotonic() + 60
    while not is_over():
        assert time.monotonic() < deadline
        send(first if count == 0 else chance.choice(STOP_SIGNALS))
        count += 1
        time.sleep(chance.choice([0.0, 0.002, 0.05, 0.3]))
    return count


def wait_until_ready(run: Path, is_over: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 180
    while not ready_file(run).exists():
        assert not is_over()
        assert time.monotonic() < deadline
        time.sleep(0.01)


def check_saved(run: Path) -> None:
    assert json.loads((run / "run.json").read_text())["status"] == "stopped"
    assert list((run / "checkpoints").glob(".writing-*")) == []
    found = newest(run / "checkpoints")
    assert found.broken == []
    assert found.checkpoint is not None
    assert found.checkpoint.step == read(run / "metrics.jsonl")[-1]["step"] + 1


def command(run: str, output: str) -> None:
    """What `paceline train` does, in a process that has torch already."""
    os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT), 2)
    sys.argv = ["paceline", "train", TASK, *SETTINGS, "--out", run]
    sys.exit(main())


@pytest.mark.parametrize("seed", range(3))
def test_a_storm_of_signals_loses_nothing(tmp_path: Path, seed: int) -> None:
    chance, run, output = random.Random(seed), tmp_path / "run", tmp_path / "stderr"
    process = _context().Process(target=command, args=(str(run), str(output)))
    process.start()
    try:
        wait_until_ready(run, lambda: process.exitcode is not None)
        first = STOP_SIGNALS[seed % 3]
        storm(lambda number: os.kill(process.pid, number), lambda: process.exitcode is not None, chance, first)
    finally:
        process.kill()
        process.join()
    assert process.exitcode == 0
    check_saved(run)
    said = re.findall(r"SIG(?:TERM|USR1|INT): saving the run.*SIGKILL \(`kill -9 (\d+)`\)", output.read_text())
    assert set(said) == {str(process.pid)}
    assert "Traceback" not in output.read_text()


def test_a_storm_on_launcher_and_ranks_loses_nothing(tmp_path: Path) -> None:
    """As from a terminal: every Ctrl-C reaches the launcher and the ranks, which get it from the launcher once more.

    Both ranks write, and for longer than their grace.
    """
    chance, run = random.Random(7), tmp_path / "run"
    words = [sys.executable, "-m", "paceline", "launch", "--nproc-per-node", "2", "--grace-s", "4", "--device", "cpu"]
    words += [
        "--stopped-code",
        "75",
        "--",
        "train",
        TASK,
        *SETTINGS,
        "--shard",
        "full",
        "--checkpoint-form",
        "sharded",
        "--out",
        str(run),
    ]
    with (tmp_path / "stderr").open("wb") as file:
        process = subprocess.Popen(
            words, stderr=file, stdout=subprocess.DEVNULL, start_new_session=True, env={**os.environ, "SYNC_S": "0.8"}
        )
    try:
        wait_until_ready(run, lambda: process.poll() is not None)
        storm(lambda number: os.killpg(process.pid, number), lambda: process.poll() is not None, chance, signal.SIGTERM)
    finally:
        process.kill()
        process.wait()
    output = (tmp_path / "stderr").read_text()
    assert process.returncode in (75, 130), output
    check_saved(run)
    assert "saving the run" in output
    assert "Traceback" not in output
