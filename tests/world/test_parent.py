"""A process that was to end with its parent knows when that is gone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CHILD = """
import os, signal, sys, time
from paceline.world.parent import end_with_parent, is_orphan
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
