"""A save that is killed before any of its system calls, or at any moment, leaves a sound checkpoint."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

# Forks one process per kill, as importing torch anew would take a second each. Step n saves tensors of the value n.
KILLS = """
import json, os, pathlib, random, select, shutil, signal, sys, time
import torch
from paceline.train.checkpoint import snapshot
from paceline.train.checkpoint.format import listed
from paceline.train.checkpoint.writer import Checkpointer
from paceline.train.checkpoint.reader import load, newest

def parts(step):
    return {part: {"w": torch.full((size,), float(step))} for part, size in (("model", 60000), ("optimizer", 1000))}

def value_of(checkpoint):
    values = {value.item() for part in checkpoint.parts.values() for value in part["w"].unique()}
    assert values == {float(checkpoint.step)} and checkpoint.state == {"step": checkpoint.step}, values
    return checkpoint.step

def forked(body):
    child = os.fork()
    if not child:
        try:
            body()
        finally:
            os._exit(0)
    return child

WATCHED = {"open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.scandir", "shutil.rmtree", "our.write"}

def at_call(folder, number, steps):
    # All that touches the disk passes here; the process dies at the call with this number, before it is made.
    calls = 0
    def hook(event, arguments):
        nonlocal calls
        if event in WATCHED:
            calls += 1
            if calls == number:
                os.kill(os.getpid(), signal.SIGKILL)
    write_all = snapshot._write_all
    def watched(file, content):
        sys.audit("our.write")
        write_all(file, content)
    snapshot._write_all = watched
    sys.addaudithook(hook)
    checkpointer = Checkpointer(folder, keep_last=1)
    for step in steps:
        checkpointer.save(step, parts(step), {"step": step})
    checkpointer.close()

def at_moment(folder, pipe):
    checkpointer = Checkpointer(folder, keep_last=2)
    for step in range(1, 10**6):
        checkpointer.save(step, parts(step), {"step": step})
        os.write(pipe, step.to_bytes(4, "little"))

base, mode = pathlib.Path(sys.argv[1]), sys.argv[2]
snapshot.CHUNK_BYTES = 2**16
outcomes = []
if mode == "call":
    steps = json.loads(sys.argv[3])
    for number in range(1, 400):
        folder = base / str(number)
        first = Checkpointer(folder)
        first.save(1, parts(1), {"step": 1})
        first.close()
        _, status = os.waitpid(forked(lambda: at_call(folder, number, steps)), 0)
        found = newest(folder)
        outcomes.append(value_of(found.checkpoint))
        for path in listed(folder):
            load(path)  # what was to be removed must not look like a checkpoint either
        Checkpointer(folder).close()
        assert value_of(newest(folder).checkpoint) == outcomes[-1]
        shutil.rmtree(folder)
        if status == 0:
            break
        assert os.WTERMSIG(status) == signal.SIGKILL, status
else:
    moments = random.Random(int(sys.argv[3]))
    for number in range(40):
        folder = base / str(number)
        reader, writer = os.pipe()
        child = forked(lambda: at_moment(folder, writer))
        os.close(writer)
        for _ in range(moments.randrange(1, 8)):
            returned = int.from_bytes(os.read(reader, 4), "little")
        select.select([], [], [], moments.uniform(0, 0.02))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        while data := os.read(reader, 4):
            returned = int.from_bytes(data, "little")
        os.close(reader)
        found = newest(folder)
        assert not found.broken, found.broken
        step = 0 if found.checkpoint is None else value_of(found.checkpoint)
        assert returned - 1 <= step <= returned + 1, (step, returned)
        outcomes.append(step)
print(json.dumps(outcomes))
"""


def kill_outcomes(folder: Path, *arguments: str) -> list[int]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.run(
        [sys.executable, "-c", KILLS, str(folder), *arguments],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    assert process.returncode == 0, process.stderr
    outcomes = json.loads(process.stdout)
    assert isinstance(outcomes, list)
    return outcomes


@pytest.mark.parametrize(
    "steps", [[2, 3], pytest.param([1, 1], marks=pytest.mark.long)], ids=["new steps", "the same step again"]
)
def test_killed_before_any_of_its_disk_calls_a_save_leaves_a_sound_checkpoint(steps: list[int], tmp_path: Path) -> None:
    outcomes = kill_outcomes(tmp_path, "call", json.dumps(steps))
    assert len(outcomes) > 30
    assert outcomes == sorted(outcomes)
    assert set(outcomes) == {1, *steps}


def test_killed_at_random_moments_a_save_leaves_a_sound_checkpoint(tmp_path: Path) -> None:
    outcomes = kill_outcomes(tmp_path, "moment", "1")
    assert len(outcomes) == 40
    assert max(outcomes) > 1
