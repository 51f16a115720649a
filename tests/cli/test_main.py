"""The front door: help without torch, completion, and ranks that agree on their folder."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.cli.main import COMMANDS, main
from paceline.observe.journal import read
from tests.commands import run_command

FILE = Path(__file__).parent / "tasks_for_tests.py"
TIMEOUT_S = 90


@pytest.mark.parametrize("words", [["--help"], ["train", "--help"], ["runs", "--help"], ["diff", "--help"], ["train"]])
def test_help_does_not_wait_for_torch(words: list[str]) -> None:
    code = (
        "import sys; from paceline.cli.main import main; code = main(sys.argv[1:]); "
        "sys.exit(9 if 'torch' in sys.modules else code)"
    )
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == (2 if words == ["train"] else 0), done.stderr
    assert "paceline" in done.stdout + done.stderr


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--help"]) == 0
    assert f"usage: paceline {command} " in capsys.readouterr().out


def test_help_of_the_demo_has_its_own_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--help"]) == 0
    shown = capsys.readouterr().out
    assert "TASK" not in shown
    assert "(default: small)" in shown
    assert "demo-speech/train.json" in shown


def test_a_full_disk_for_the_output() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "paceline", "--help"], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert done.returncode == 2
    assert done.stderr.splitlines()[0] == "error: the output cannot be written: No space left on device"
    assert len(done.stderr.splitlines()) == 2


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts_know_commands_and_options(
    shell: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    for word in (*COMMANDS, "--global-batch", "inverse-sqrt", "--nproc-per-node"):
        assert word in script, word
    if shutil.which(shell) and shell == "bash":
        (tmp_path / "script").write_text(script)
        subprocess.run([shell, "-n", tmp_path / "script"], check=True, timeout=TIMEOUT_S)


def test_bash_completes_a_command_and_a_choice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Sourced in a real bash, as its completion machinery would call it."""
    assert main(["completion", "bash"]) == 0
    (tmp_path / "script").write_text(capsys.readouterr().out)
    ask = (
        'source "$1"; shift; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMP_LINE="$*"; COMP_POINT=${#COMP_LINE}; '
        "function=$(complete -p paceline | sed 's/.*-F \\([^ ]*\\).*/\\1/'); $function; echo \"${COMPREPLY[@]}\""
    )

    def complete(*words: str) -> list[str]:
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        done = subprocess.run(
            ["bash", "-c", ask, "bash", str(tmp_path / "script"), *words],
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            env={**os.environ, "PATH": path},
        )
        return done.stdout.split()

    assert complete("paceline", "tr") == ["train"]
    assert sorted(complete("paceline", "train", "--optimizer", "ada")) == ["adam", "adamw"]
    assert complete("paceline", "train", "--global-b") == ["--global-batch"]


def test_launched_ranks_agree_on_a_folder(tmp_path: Path) -> None:
    """No `--out`: each rank alone would choose another name. The command is written down as it was typed."""
    train = ["train", f"{FILE}:Good", "--device", "cpu", "--global-batch", "16", "--epochs", "1", "--grains", "2"]
    words = ["launch", "--nproc-per-node", "2", "--device", "cpu", "--", *train, "--threads", "1"]
    done = subprocess.run(
        [sys.executable, "-m", "paceline", *words], capture_output=True, text=True, timeout=TIMEOUT_S, cwd=tmp_path
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "global batch 16 = 2 grains of 8 = 2 ranks x 1" in done.stdout
    (run,) = (tmp_path / "runs").iterdir()
    record = json.loads((run / "run.json").read_text())
    assert record["settings"]["out"] == f"runs/{run.name}"
    assert record["starts"][0]["command"] == " ".join(["paceline", *train, "--threads", "1"])


def test_restarted_ranks_go_on_in_the_same_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With `--on-failure restart`; that those that are left go on is in tools/chaos/survivors.py."""
    words = ["train", f"{FILE.parent / 'dies_once.py'}:DiesOnce", "--device", "cpu", "--threads", "1"]
    words += ["--global-batch", "16", "--epochs", "3", "--save-every-steps", "1", "--procs", "2", "--max-restarts", "1"]
    words += ["--on-failure", "restart"]
    monkeypatch.chdir(tmp_path)
    done = run_command(words)
    assert done.code == 0, done.err
    assert "starting all ranks again" in done.err
    assert "resumed after step" in done.out
    (run,) = (tmp_path / "runs").iterdir()
    record = json.loads((run / "run.json").read_text())
    assert (record["status"], len(record["starts"])) == ("finished", 2)
    assert [entry["step"] for entry in read(run / "metrics.jsonl")] == list(range(9))
