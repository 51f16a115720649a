"""Two starts in one run folder: one of them trains, the other is refused, however slow it was."""

from __future__ import annotations

import fcntl
import json
import os
import sys
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
from torch import nn

from paceline.cli.main import main
from paceline.observe.journal import read
from tests.crash import _context
from tests.train.small import SmallTask

HERE = f"{__file__}:Slow"
SETTINGS = ["--global-batch", "8", "--order", "none", "--optimizer", "sgd", "--lr", "0.05", "--level", "0"]
SETTINGS += ["--device", "cpu", "--threads", "1", "--workers", "0", "--save-every-steps", "2"]


class Slow(SmallTask):
    """Is set up when `GO` is there, and says that it waits for it."""

    def model(self) -> nn.Module:
        go, deadline = os.environ.get("GO"), time.monotonic() + 60
        if go is not None:
            Path(f"{go}-{os.getpid()}").touch()
            while not Path(go).exists():
                assert time.monotonic() < deadline
                time.sleep(0.01)
        return super().model()


def train(folder: str, steps: int, resume: str, go: str | None, output: str) -> None:
    os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT), 2)
    if go is not None:
        os.environ["GO"] = go
    words = ["train", HERE, *SETTINGS, "--out", folder, "--steps", str(steps), "--resume", resume]
    sys.exit(main(words))


def run(
    folder: Path, steps: int, resume: str = "no", go: Path | None = None, output: Path = Path(os.devnull)
) -> BaseProcess:
    process: BaseProcess = _context().Process(
        target=train, args=(str(folder), steps, resume, go and str(go), str(output))
    )
    process.start()
    return process


def wait_for(folder: Path, pattern: str, count: int) -> None:
    deadline = time.monotonic() + 60
    while len(list(folder.glob(pattern))) < count:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def files(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != ".lock"}


def end(process: BaseProcess) -> int:
    process.join(60)
    assert process.exitcode is not None
    return process.exitcode


@pytest.mark.parametrize("resume", ["no", "auto"])
def test_a_slow_start_does_not_overwrite_what_another_has_trained_meanwhile(tmp_path: Path, resume: str) -> None:
    folder, go, output = tmp_path / "run", tmp_path / "go", tmp_path / "stderr"
    if resume == "auto":
        assert end(run(folder, 2)) == 0
    slow = run(folder, 6, resume, go, output)
    wait_for(tmp_path, "go-*", 1)
    assert end(run(folder, 6, resume)) == 0
    before = files(folder)
    go.touch()
    assert end(slow) == 2
    assert files(folder) == before
    said = output.read_text()
    why = "holds a run already" if resume == "no" else "was trained by another start while this one was being set up"
    assert f"error: {folder} {why}\n" in said
    assert "--resume auto" in said
    assert "Traceback" not in said


def test_of_starts_at_once_one_trains(tmp_path: Path) -> None:
    folder, go = tmp_path / "run", tmp_path / "go"
    starts = [run(folder, 6, go=go, output=tmp_path / f"stderr{number}") for number in range(4)]
    wait_for(tmp_path, "go-*", 4)
    go.touch()
    assert sorted(map(end, starts)) == [0, 2, 2, 2]
    record = json.loads((folder / "run.json").read_text())
    assert record["status"] == "finished"
    assert len(record["starts"]) == 1
    assert [line["step"] for line in read(folder / "metrics.jsonl")] == list(range(6))


def test_a_start_in_a_folder_that_is_being_trained_is_refused_before_it_is_set_up(tmp_path: Path) -> None:
    folder, go, output = tmp_path / "run", tmp_path / "go", tmp_path / "stderr"
    go.touch()
    holder = os.open(_locked(folder), os.O_RDWR)
    try:
        fcntl.flock(holder, fcntl.LOCK_EX)
        assert end(run(folder, 6, "auto", tmp_path / "never", output)) == 2
    finally:
        os.close(holder)
    assert "is being trained by pid 7 on somewhere" in output.read_text()
    assert list(tmp_path.glob("never-*")) == []


def _locked(folder: Path) -> Path:
    folder.mkdir()
    (folder / ".lock").write_text("pid 7 on somewhere\n")
    return folder / ".lock"
