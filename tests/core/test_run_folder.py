"""A run folder: its record, its journal, and its lock, which knows of a killed run what it could not record."""

from __future__ import annotations

import fcntl
import json
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.core import run_folder
from paceline.core.disk import CannotWrite
from paceline.core.run_folder import (
    BrokenRecord,
    JournalEnd,
    NotARun,
    RunBusy,
    RunExists,
    RunFolder,
    RunRecord,
    read_journal,
    read_progress,
    read_record,
    status_now,
)
from tests.train.checkpoint.test_writer import file_size_limit

TRAINS = """
import sys
from pathlib import Path
from paceline.core.run_folder import RunFolder
run = RunFolder(Path(sys.argv[1]))
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
        RunFolder(tmp_path).lock()
    trains.send_signal(signal.SIGKILL)
    trains.wait()
    assert status_now(tmp_path, "running") == "died"
    for said in ("finished", "failed", "stopped"):
        assert status_now(tmp_path, said) == said, "who said how it ended is believed"
    run = RunFolder(tmp_path)
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
    monkeypatch.setattr(run_folder.fcntl, "flock", refuse)
    assert status_now(tmp_path, "running") == "running or died"


def test_who_only_looks_keeps_nobody_from_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".lock").touch()
    with (tmp_path / ".lock").open() as looks:
        fcntl.flock(looks, fcntl.LOCK_SH)
        monkeypatch.setattr("paceline.core.run_folder.time.sleep", lambda seconds: fcntl.flock(looks, fcntl.LOCK_UN))
        run = RunFolder(tmp_path)
        run.lock()
        assert status_now(tmp_path, "running") == "running"
        run.unlock()


def test_who_takes_the_lock_removes_what_a_kill_has_left(tmp_path: Path) -> None:
    others = [".report.html.7.writing", ".run.json", "run.json.7.writing"]
    for name in (".run.json.7.writing", ".metrics.jsonl.8.writing", *others):
        (tmp_path / name).touch()
    folder = RunFolder(tmp_path)
    folder.lock()
    folder.unlock()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([".lock", *others])


def test_no_room_for_what_the_run_is(tmp_path: Path) -> None:
    with file_size_limit(tmp_path, 0):
        run = RunFolder(tmp_path / "run")
        run.lock()  # it holds, although it cannot say whose it is
        busy = status_now(tmp_path / "run", "running")
        with pytest.raises(CannotWrite) as failure:
            run.write(RunRecord({}, status="running"))
    assert busy == "running"
    assert "run.json cannot be written: File too large" in str(failure.value)
    assert [path.name for path in (tmp_path / "run").iterdir()] == [".lock"]
    run.write(RunRecord({}, status="running"))
    assert (tmp_path / "run" / "run.json").exists()
    run.unlock()


def test_a_record_survives_reading_and_writing(tmp_path: Path) -> None:
    values = {
        "status": "finished",
        "grains": 8,
        "task": "asr",
        "settings": {"lr": 0.1},
        "choice": {"level": 3},
        "of a later version": [1],
        "starts": [{"time": "now"}],
    }
    (tmp_path / "run.json").write_text(json.dumps(values))
    record = read_record(tmp_path)
    assert record.other == {"of a later version": [1]}
    RunFolder(tmp_path).write(record)
    assert list(json.loads((tmp_path / "run.json").read_text()).items()) == list(values.items())


def test_a_record_of_an_old_run_may_have_settings_alone() -> None:
    assert RunRecord.from_json({"settings": {}}) == RunRecord({})


@pytest.mark.parametrize(("mode", "is_validated"), [("train", False), ("train_eval", True)])
def test_an_old_run_says_its_validation_by_a_mode(mode: str, is_validated: bool) -> None:
    assert RunRecord.from_json({"settings": {"mode": mode, "lr": 1}}).settings == {"validation": is_validated, "lr": 1}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "run.json is not JSON (Expecting property name enclosed in double quotes: line 1 column 2 (char 1))"),
        ("[]", "run.json has no settings"),
        ("{}", "run.json has no settings"),
        ('{"settings": 3}', "run.json has no settings"),
    ],
)
def test_a_broken_record(tmp_path: Path, text: str, why: str) -> None:
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(BrokenRecord) as failure:
        read_record(tmp_path)
    assert str(failure.value) == why
    with pytest.raises(NotARun) as refused:
        RunFolder(tmp_path).check(may_exist=True)
    assert str(refused.value) == f"{tmp_path} is not a run: {why}"


def test_a_field_that_is_needed() -> None:
    record = RunRecord({}, task="asr")
    record.require("task")
    with pytest.raises(BrokenRecord, match=r"^run.json has no grains$") as failure:
        record.require("task", "grains")
    assert failure.value.cause == "it has no 'grains'"


def test_a_free_folder(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    assert folder.check(may_exist=False) is None
    for name in (".lock", "batch", "logs", ".run.json.17.writing"):
        (tmp_path / "run" / name).mkdir(parents=True)
    assert folder.check(may_exist=False) is None
    folder.write(RunRecord({}, status="failed"))
    assert folder.check(may_exist=False) is None, "it failed before it had anything to lose"
    (folder.checkpoints / "step-00000001").mkdir(parents=True)
    with pytest.raises(RunExists):
        folder.check(may_exist=False)


def test_a_folder_that_is_no_run(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(NotARun, match="it has files but no run.json"):
        RunFolder(tmp_path).check(may_exist=True)
    with pytest.raises(NotARun, match="it is a file"):
        RunFolder(tmp_path / "thesis.tex").check(may_exist=True)


JOURNAL = """\
{"kind": "step", "step": 0, "epoch": 1, "loss": 2.0, "lr": 0.1}
{"kind": "step", "step": 1, "epoch": 1, "loss": 1.5, "lr": 0.1}
not a record
{"kind": "validation", "step": 1, "val/loss": 1.0}
{"kind": "epoch", "step": 1, "epoch": 1}
{"kind": "epoch", "step": 1}
{"kind": "of a later version", "step": 1}
{"kind": "step", "step": 1.5}
{"kind": "step", "step": 2, "epoch": 2, "lo"""


def test_reading_a_journal(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(JOURNAL)
    journal = read_journal(tmp_path / "metrics.jsonl")
    assert [step["step"] for step in journal.steps] == [0, 1]
    assert journal.epochs == [{"kind": "epoch", "step": 1, "epoch": 1}]
    assert journal.validations == [{"kind": "validation", "step": 1, "val/loss": 1.0}]
    assert journal.num_unread == 3, "all but the last line, which a run may be writing"


def test_progress_is_read_without_parsing_the_steps(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(JOURNAL)
    end = read_progress(tmp_path / "metrics.jsonl")
    step, validations = end.step, end.validations
    assert validations == [{"kind": "validation", "step": 1, "val/loss": 1.0}]
    assert step["step"] == 1.5


def test_a_run_without_a_journal(tmp_path: Path) -> None:
    assert read_journal(tmp_path / "metrics.jsonl").steps == []
    assert read_progress(tmp_path / "metrics.jsonl") == JournalEnd()


def test_a_folder_that_cannot_be_written_is_no_full_disk(tmp_path: Path) -> None:
    """The hint was to make room, whatever the reason."""
    folder = RunFolder(tmp_path / "run")
    (tmp_path / "run" / run_folder.LOCK).mkdir(parents=True)
    with pytest.raises(CannotWrite, match="Is a directory") as failure:
        folder.lock()
    assert failure.value.hint == "make it writable, or choose another `--out`"
