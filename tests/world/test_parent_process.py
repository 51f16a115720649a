"""A process that was to end with its parent knows when that is gone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from paceline.world.parent_process import bound

CHILD = """
import os, signal, sys, time
from paceline.world.parent_process import end_with_parent, is_orphan
told = []
signal.signal(signal.SIGUSR1, lambda *_: told.append(is_orphan()))
before = is_orphan()
end_with_parent(signal.SIGUSR1)
before = before or is_orphan()
print("ready", flush=True)
while not told:
    time.sleep(0.01)
open(sys.argv[1], "w").write(f"{before} {told[0]}")
"""
PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", *sys.argv[1:]], stdout=subprocess.PIPE)
child.stdout.readline()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells")
def test_a_child_knows_that_its_parent_is_gone(tmp_path: Path) -> None:
    told = tmp_path / "told"
    # The child holds the other end of this pipe: it closes when it has ended.
    subprocess.run([sys.executable, "-c", PARENT, CHILD, str(told)], check=True, stderr=subprocess.PIPE, timeout=60)
    assert told.read_text() == "False True"


FRESH = """
import os, sys
with open(sys.argv[1], "a") as file:
    file.write(f"{os.getpid()} ")
import time
time.sleep(600)
"""
LAUNCHER = """
import sys
from paceline.world.launch.launcher import launch
launch(2, [sys.executable, "-c", *sys.argv[1:]], device="cpu")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells")
def test_ranks_that_have_not_begun_yet_do_not_outlive_a_killed_launcher(tmp_path: Path) -> None:
    """As those that still import torch: nothing of ours has run in them."""
    told = tmp_path / "pids"
    told.touch()
    launcher = subprocess.Popen([sys.executable, "-c", LAUNCHER, FRESH, str(told)], stdout=subprocess.PIPE)
    while len(pids := told.read_text().split()) < 2:
        assert launcher.poll() is None
        time.sleep(0.01)
    launcher.kill()
    # The ranks hold the other end of this pipe: it closes when they have ended.
    try:
        launcher.communicate(timeout=60)
    finally:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells")
def test_a_child_whose_parent_went_before_it_began_does_not_begin() -> None:
    begin = bound([sys.executable, "-c", "print('begun', flush=True)"], signal.SIGKILL)
    assert subprocess.run(begin, capture_output=True, text=True, timeout=60).stdout == "begun\n"
    begin[begin.index(str(os.getpid()))] = "1"
    assert subprocess.run(begin, capture_output=True, text=True, timeout=60).stdout == ""
