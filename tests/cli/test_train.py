"""`paceline train` as it is typed: exit codes, messages, and that nothing is lost by a mistake.

Cases of one process call `main` here; cases of several start real ones, which costs seconds each.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from paceline.cli.main import main
from paceline.core.paths import near
from paceline.core.run_folder import RunFolder
from paceline.observe.journal import read
from tests.commands import run_command
from tests.train.checkpoint.test_writer import small_disk

FILE = Path(__file__).parent / "tasks_for_tests.py"
TIMEOUT_S = 90
Mistake = Callable[..., str]


def arguments(task: str, *words: object) -> list[str]:
    name = task if "/" in task or not task[0].isupper() else f"{FILE}:{task}"
    typed = [str(word) for word in words]
    usual = {"--device": "cpu", "--threads": "1", "--global-batch": "16"}
    return ["train", name, *(word for pair in usual.items() if pair[0] not in typed for word in pair), *typed]


def start(task: str, *words: object) -> tuple[int | None, str, str]:
    done = run_command(arguments(task, *words))
    return done.code, done.out, done.err


@pytest.fixture
def mistake(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Mistake:
    """Type a command that is wrong; its message."""
    monkeypatch.setattr(sys, "path", list(sys.path))  # a task's own folder is put in front of it
    monkeypatch.chdir(tmp_path)

    def type_wrong(task: str, *words: object) -> str:
        capsys.readouterr()
        assert main(arguments(task, *words)) == 2
        shown = capsys.readouterr().err
        assert "Traceback" not in shown
        assert shown.startswith("error: ")
        return shown

    return type_wrong


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# -- one process -------------------------------------------------------------------------------------------------------


def test_a_task_that_is_not_there_is_answered_with_what_is(mistake: Mistake, tmp_path: Path) -> None:
    assert "did you mean `digits`?" in mistake("digts", "--steps", 1)
    assert f"there is no file {tmp_path}/absent.py" in mistake(f"{tmp_path}/absent.py:Task", "--steps", 1)
    shown = mistake("God", "--steps", 1)
    assert f"{FILE} has no task class 'God'" in shown
    assert "task classes there: Good, Mean, NotANumber, BreaksOnOneRank" in shown
    assert contents(tmp_path) == {}


def test_a_device_or_level_that_is_not_there(
    mistake: Mistake,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    shown = mistake("Good", "--steps", 1, "-O3", "--device", "cuda")
    assert "torch sees no CUDA device" in shown
    assert "--device cpu" in shown
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    shown = mistake("Good", "--steps", 1, "-O3")
    assert "-O3 cannot run on this CPU" in shown
    assert contents(tmp_path) == {}


def test_wrong_losses_are_explained(mistake: Mistake, tmp_path: Path) -> None:
    shown = mistake("Mean", "--steps", 1, "--out", tmp_path / "mean")
    assert "returned a single tensor (a mean?)" in shown
    assert "return (sum, count)" in shown
    shown = mistake("NotANumber", "--steps", 1, "--out", tmp_path / "nan")
    assert "the loss is nan at step 0 (data: float32[16, 3], int64[16])" in shown


def test_folders_that_hold_something_are_left_alone(mistake: Mistake, tmp_path: Path) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "text.tex").write_text("years of work")
    for resume in ("no", "auto"):
        shown = mistake("Good", "--steps", 1, "--out", tmp_path / "thesis", "--resume", resume)
        assert "thesis is not a run: it has files but no run.json" in shown
    assert "text.tex is not a run: it is a file" in mistake("Good", "--steps", 1, "--out", tmp_path / "thesis/text.tex")
    assert contents(tmp_path) == {"thesis/text.tex": b"years of work"}


def test_a_run_is_only_touched_with_permission(mistake: Mistake, tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = ["--out", run, "--optimizer", "sgd", "--epochs", 2, "--keep-last", 9]
    assert main(arguments("Good", *words, "--lr", 0.1)) == 0
    before = contents(run)
    assert "--resume auto" in mistake("Good", *words, "--lr", 0.1)
    shown = mistake("Good", *words, "--lr", 0.2, "--seed", 5, "--log-every", 3, "--resume", "auto")
    assert "lr: 0.1 in the run, 0.2 now" in shown
    assert "seed: 0 in the run, 5 now" in shown
    assert "log_every" not in shown
    assert "--allow-change" in shown
    assert "needs to know the run" in mistake("Good", "--steps", 1, "--resume", "auto")
    assert "is a run, not a checkpoint" in mistake("Good", "--steps", 1, "--resume", run)
    assert f"{run}/none is not a checkpoint" in mistake("Good", "--steps", 1, "--resume", run / "none")
    assert contents(run) == before
    assert contents(tmp_path).keys() == {f"run/{name}" for name in before}

    middle = run / "checkpoints" / "step-00000003"
    assert main(arguments("Good", *words[2:], "--lr", 0.2, "--resume", middle, "--allow-change")) == 0
    records = read(run / "metrics.jsonl")
    assert records[:3] == [json.loads(line) for line in before["metrics.jsonl"].splitlines()][:3]
    assert [record["lr"] for record in records] == [0.1] * 3 + [0.2] * 3


# -- several processes -------------------------------------------------------------------------------------------------


def test_two_processes_give_the_losses_of_one(tmp_path: Path) -> None:
    words = ["--grains", 2, "--epochs", 3, "--lr", 0.01]
    assert main(arguments("Good", *words, "--out", tmp_path / "one")) == 0
    code, shown, error = start("Good", *words, "--out", tmp_path / "two", "--procs", 2)
    assert (code, error) == (0, "")
    assert "global batch 16 = 2 grains of 8 = 2 ranks x 1" in shown
    one, two = [read(tmp_path / name / "metrics.jsonl") for name in ("one", "two")]
    assert [record["step"] for record in two] == list(range(9))
    assert [record["loss"] for record in two] == pytest.approx([record["loss"] for record in one], rel=1e-6)


def test_mistakes_on_several_ranks_are_said_once(tmp_path: Path) -> None:
    code, shown, error = start("Good", "--steps", 1, "--out", tmp_path / "run", "--procs", 4, "--grains", 2)
    assert (code, shown) == (2, "")
    assert error == (
        "error: 4 ranks, but the settings ask for 2 grains per step: a rank takes whole grains\n"
        "  use at most 2 ranks, or set `--grains 4`\n"
    )
    code, _, error = start("Mean", "--steps", 1, "--out", tmp_path / "run", "--procs", 2)
    assert code == 2
    assert error.count("error: ") == error.count("(a mean?)") == 1
    assert "Traceback" not in error


def test_a_bug_on_one_rank_is_printed_once(tmp_path: Path) -> None:
    code, _, error = start("BreaksOnOneRank", "--steps", 3, "--out", tmp_path / "run", "--procs", 2)
    assert code == 1
    assert error.count("Traceback (most recent call last)") == 1
    assert "rank 1 on " in error
    assert error.splitlines()[-2].endswith("failed first: ValueError: one rank has a bug")
    assert error.splitlines()[-1].startswith("  rank 1: training, step 0, collective ")


def test_a_full_disk_is_said_before_the_first_step(mistake: Mistake, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    with small_disk(disk, 4096):
        with suppress(OSError), (disk / "full").open("wb", buffering=0) as file:
            while file.write(bytes(4096)):
                pass
        shown = mistake("Good", "--out", disk / "run", "--epochs", "1")
        assert f"{near(disk / 'run' / 'run.json')} cannot be written: No space left on device" in shown
        assert "make room there, or choose another `--out`" in shown
        (disk / "full").unlink()
        assert main(arguments("Good", "--out", disk / "run", "--epochs", "1")) == 2, "one page: not even its settings"
        assert not (disk / "run" / "run.json").exists()
        assert RunFolder(disk / "run").check(may_exist=False) is None, "the same command may be typed again"


def test_a_disk_that_fills_up_is_said_and_the_run_goes_on_when_there_is_room(mistake: Mistake, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    seldom = ("--save-every-epochs", "1000", "--keep-best", "0")  # the journal fills it, not a checkpoint
    words = ("--out", disk / "run", "--steps", "400", "--loggers", "none", "--progress", "none", *seldom)
    with small_disk(disk, 2**20):
        (disk / "full").write_bytes(bytes(2**20 - 24 * 1024))
        shown = mistake("Good", *words)
        assert f"{near(disk / 'run')} cannot be written: No space left on device" in shown
        assert "`--resume auto`" in shown
        assert "could not end" not in shown
        (disk / "full").unlink()
        assert main(arguments("Good", *words, "--resume", "auto")) == 0
        assert [record["step"] for record in read(disk / "run" / "metrics.jsonl")] == list(range(400))


def test_a_timeline_that_cannot_be_written_is_told_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was told at the end of the run, when the steps had been recorded in vain."""
    (tmp_path / "file").touch()
    out = tmp_path / "run"
    for place, why in ((tmp_path, "Is a directory"), (tmp_path / "file" / "a.json", "Not a directory")):
        monkeypatch.setenv("HOROVOD_TIMELINE", str(place))
        assert main(arguments("Good", "--out", out, "--epochs", "1")) == 2
        error = capsys.readouterr().err
        assert f"cannot be written: {why}" in error or "cannot be written: File exists" in error
        assert "`--profile-file` (or HOROVOD_TIMELINE)" in error
        assert not out.exists()


def test_a_folder_in_the_place_of_a_task_s_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", f"{tmp_path}:Waves", "--epochs", "1"]) == 2
    assert f"{tmp_path} is a folder, not a Python file" in capsys.readouterr().err


def test_more_ranks_than_samples_are_refused_before_any_starts(capsys: pytest.CaptureFixture[str]) -> None:
    """ce01e4b started 64 processes on two cores, of which 48 had nothing to do, without a word."""
    for procs, batch, most in (("64", "32", "16 ranks"), ("3", "2", "1 rank")):
        words = ["train", "digits", "--epochs", "1", "--device", "cpu", "--procs", procs, "--global-batch", batch]
        assert main(words) == 2
        error = capsys.readouterr().err
        assert f"{procs} ranks for a batch of {batch} samples" in error
        assert f"start at most {most}, or set `--global-batch {2 * int(procs)}` or more" in error
