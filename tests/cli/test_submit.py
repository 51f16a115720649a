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


def test_a_line_break_becomes_neither_a_command_nor_an_option(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """On ce01e4b `--out` and `--exp-name` with one were executed by the job, or read by the scheduler."""
    for scheduler, mark in (("slurm", "#SBATCH"), ("sge", "#$")):
        for option, value in (
            ("--out", f"x\n{mark} --uid=0\ntouch owned\n"),
            ("--exp-name", f"x\n{mark} --uid=0\ntouch owned\n"),
            ("--out", 'x"y'),
            ("--exp-name", "\x1b[31mred"),
        ):
            code, out, err = submit(capsys, scheduler, "--dry-run", "--", "train", TASK, "--epochs", "1", option, value)
            assert (code, out) == (2, "")
            assert "cannot stand in a batch script" in err or "is no name" in err
            assert "\x1b" not in err
        train = ["train", TASK, "--epochs", "1", "--monitor", f"a\n{mark} --uid=0"]
        code, out, _ = submit(capsys, scheduler, "--dry-run", "--script", "a.sh", "--", *train)
        assert code == 0
        assert all(f"{mark} --uid" not in line for line in out.splitlines() if line.startswith("#"))
    for option in ("--partition", "--account"):
        code, _, err = submit(
            capsys, "slurm", option, "a\n#SBATCH --uid=0", "--dry-run", "--", "train", TASK, "--steps", "1"
        )
        assert code == 2
        assert option in err
    assert list(tmp_path.iterdir()) == []


def test_a_name_is_told_what_it_may_have(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = submit(capsys, "slurm", "--dry-run", "--account", "a;b", "--", "train", TASK, "--epochs", "1")
    assert code == 2
    assert "--account a;b: must be text of the form ^[A-Za-z0-9_@*]" in err  # not in small letters


def test_the_scheduler_s_own_words_may_begin_with_dashes(capsys: pytest.CaptureFixture[str]) -> None:
    """The help's own example, which ce01e4b refused."""
    train = ["--dry-run", "--", "train", TASK, "--epochs", "1"]
    for words in (["--constraint=a100 --exclusive"], ["--exclusive"]):
        code, out, _ = submit(capsys, "slurm", "--directives", *words, *train)
        assert code == 0
        assert f"#SBATCH {words[0]}\n" in out
    code, _, err = submit(capsys, "slurm", "--directives", *train)
    assert (code, "--directives: needs a value before --dry-run" in err) == (2, True)
    code, _, err = submit(capsys, "slurm", "--directives", "exclusive", *train)
    assert (code, "it must begin with a dash" in err) == (2, True)


def test_the_script_is_the_user_s_alone(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Variables of `--env` may be keys. A name that begins with a dash is no option of the scheduler's."""
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    (tmp_path / "sbatch").write_text('#!/bin/sh\necho "$@"\n')
    (tmp_path / "sbatch").chmod(0o755)
    options = ["--env", "WANDB_API_KEY=abc", "--script=-x.sh"]
    code, out, _ = submit(capsys, "slurm", *options, "--", "train", TASK, "--epochs", "1")
    assert (code, out.splitlines()[0]) == (0, str(tmp_path / "-x.sh"))
    assert (tmp_path / "-x.sh").stat().st_mode & 0o777 == 0o600
    code, _, err = submit(capsys, "slurm", "--script", "x" * 300, "--", "train", TASK, "--epochs", "1")
    assert (code, "File name too long" in err or "255" in err) == (2, True)


def test_one_machine_of_grid_engine(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On ce01e4b `-pe mpi`, whatever its allocation rule."""
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    train = ["--procs-per-node", "4", "--dry-run", "--", "train", TASK, "--epochs", "1"]
    rules = 'case $2 in smp) echo "allocation_rule    \\$pe_slots";; *) echo "allocation_rule    \\$fill_up";; esac'
    for names, told in (("mpi smp", "-pe smp 4"), ("mpi", "no parallel environment here promises 4 slots")):
        (tmp_path / "qconf").write_text(f'#!/bin/sh\n[ "$1" = -spl ] && echo {names} && exit\n{rules}\n')
        (tmp_path / "qconf").chmod(0o755)
        _, out, err = submit(capsys, "sge", *train)
        assert told in out + err
    (tmp_path / "qconf").write_text("#!/bin/sh\nexit 1\n")
    assert "-pe smp 4\n" in submit(capsys, "sge", *train)[1]


def test_options_of_the_training_before_the_dashes(capsys: pytest.CaptureFixture[str]) -> None:
    """The hint was "did you mean --account?"."""
    code, _, err = submit(capsys, "slurm", "--out", "runs/a", "--dry-run", "--", "train", TASK, "--epochs", "1")
    assert code == 2
    assert "--out runs/a: is no option of submit" in err
    assert "belongs behind the two dashes: `paceline submit ... -- train TASK --out runs/a`" in err
    code, _, err = submit(capsys, "slurm", "--no-val-at-end", "--lr=1", "--acount", "x", "--", "train", TASK)
    assert "-- train TASK --no-val-at-end`" in err
    assert "-- train TASK --lr 1`" in err
    assert "did you mean --account?" in err, "as before, of submit's own"
