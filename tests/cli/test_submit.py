"""`paceline submit`: what it asks of the user, what it adds to the command, what it leaves on the disk."""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path

import pytest

from paceline.cli.main import main

TASK = f"{Path(__file__).with_name('tasks_for_tests.py')}:Good"


def submit(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main(["submit", *words])
    shown = capsys.readouterr()
    return code, shown.out, shown.err


def ranks_command(script: str) -> list[str]:
    """What each rank is started with."""
    (line,) = [line for line in script.splitlines() if line.startswith("srun ")]
    words = shlex.split(line.removesuffix(" &"))
    return words[words.index("paceline") :]


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_training_gets_a_folder_and_goes_on_in_it(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out, _ = submit(capsys, "slurm", "--dry-run", "--", "train", TASK, "--epochs", "1", "--exp-name", "a b")
    assert code == 0
    added = ["--out", "runs/a b", "--resume", "auto", "--progress", "lines"]
    assert ranks_command(out)[-8:] == ["--exp-name", "a b", *added]
    assert "#SBATCH --job-name=a-b\n" in out
    assert list(tmp_path.iterdir()) == []


def test_what_was_typed_is_not_added_again(capsys: pytest.CaptureFixture[str]) -> None:
    train = ["train", TASK, "--epochs", "1", "--out", "here", "--resume", "auto", "--progress", "none"]
    assert ranks_command(submit(capsys, "slurm", "--dry-run", "--", *train)[1]) == ["paceline", *train]
    other = ["eval", "runs/a", "--device", "cpu"]
    assert ranks_command(submit(capsys, "slurm", "--dry-run", "--", *other)[1]) == ["paceline", *other]


def test_one_rank_per_gpu_unless_said(capsys: pytest.CaptureFixture[str]) -> None:
    train = ["--dry-run", "--", "train", TASK, "--epochs", "1"]
    assert "--ntasks-per-node=8\n" in submit(capsys, "slurm", "--gpus-per-node", "8", *train)[1]
    assert "--ntasks-per-node=2\n" in submit(capsys, "slurm", "--procs-per-node", "2", *train)[1]
    assert "#$ -pe mpi 6\n" in submit(capsys, "sge", "--nodes", "3", "--gpus-per-node", "2", *train)[1]


def test_mistakes_are_said_before_the_job_waits(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--queue", "a", "--mpi", "mpich", "--time", "90", "--memory", "3", "--env", "A"]
    code, out, err = submit(capsys, "slurm", *options, "--", "train", TASK, "--epochs", "1")
    assert (code, out) == (2, "")
    assert err.startswith("error: 5 mistakes")
    for part in ("--queue: has no", "--mpi: has no", "'90' is not a time", "'3' is not an", "'A' is not NAME=VALUE"):
        assert part in err
    for words, part in (
        (["slurm", "--dry-run"], "COMMAND: is missing"),
        (["slurm", "--dry-run", "--", "runs"], "does not run on ranks"),
        (["slurm", "--time", "1m", "--", "train", TASK, "--epochs", "1"], "over before the ranks are warned"),
        (["slurm", "--dry-run", "--", "train", TASK], "how long to train"),
        (["slurm", "--dry-run", "--", "train", TASK, "--epochs", "1", "--procs", "4"], "--procs-per-node N"),
        (["slurm", "--dry-run", "--", "train", TASK, "--epochs", "1", "--resume", "x/step-1"], "--no-requeue"),
        (["slurm", "--env", "A='", "--", "train", TASK, "--epochs", "1"], "No closing quotation"),
    ):
        code, _, err = submit(capsys, *words)
        assert code == 2
        assert part in err


def test_an_existing_run_is_not_touched_unasked(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "run.json").write_text(json.dumps({"settings": {}}))
    train = ["train", TASK, "--epochs", "1", "--out", "old"]
    code, _, err = submit(capsys, "slurm", "--dry-run", "--", *train)
    assert code == 2
    assert "--resume auto" in err
    assert submit(capsys, "slurm", "--dry-run", "--", *train, "--resume", "auto")[0] == 0


def test_the_script_is_kept_and_queued(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    (bin_folder / "sbatch").write_text('#!/bin/sh\necho "Submitted batch job 7: $(head -n 1 "$1")"\n')
    (bin_folder / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{bin_folder}{os.pathsep}{os.environ['PATH']}")
    train = ["train", TASK, "--steps", "1", "--device", "cpu", "--out", "run"]
    code, out, _ = submit(capsys, "slurm", "--", *train)
    (script,) = (tmp_path / "run" / "batch").iterdir()
    assert (code, out) == (0, f"Submitted batch job 7: #!/bin/bash\nscript {script.relative_to(tmp_path)}\n")
    assert f'#SBATCH --output="{tmp_path}/run/batch/slurm-%j.log"' in script.read_text()
    # The job then trains in that folder, although the script is there already.
    assert main([*ranks_command(script.read_text())[1:], "--threads", "1"]) == 0
    code, _, _ = submit(capsys, "slurm", "--script", "mine.sh", "--", *train[:-1], "other")
    assert code == 0
    assert (tmp_path / "mine.sh").exists()
    assert not (tmp_path / "other").exists()


def test_where_there_is_no_scheduler(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent / "nothing"))
    code, _, err = submit(capsys, "sge", "--", "train", TASK, "--epochs", "1", "--out", "run")
    assert (code, err) == (
        2,
        "error: there is no `qsub` here\n  submit on a machine of the cluster, or add --dry-run to see the script\n",
    )
