"""The example takes Mammoth's command lines, and the docs page on one's own method works as it is written."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from paceline.config.load import load
from paceline.config.train_command import train_options
from paceline.recipes.continual.settings import ContinualSettings
from tests.commands import run_command
from tests.recipes.continual.small import alone, train

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "continual" / "main.py"


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("continual_example", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def settings_of(words: list[str]) -> ContinualSettings:
    assert words[:2] == ["train", "continual"]
    return load(train_options(ContinualSettings), words[1:], prog="paceline train", positional=("task",))  # type: ignore[return-value]


def test_mammoths_words_mean_the_same(example: ModuleType) -> None:
    line = (
        "--model derpp --dataset seq-mnist --buffer_size 500 --minibatch_size 10 --n_epochs 1 --batch_size 10 --lr 0.03"
        " --alpha 1 --beta 0.5 -O 2 --distributed=dp --savecheck task --seed 3 --backbone mnistmlp"
    )
    words = example.translate(line.split())
    assert example.translate([*line.split(), "--print_command"]) == words
    settings = settings_of(words)
    assert (settings.method, settings.dataset, settings.buffer_size, settings.minibatch_size) == (
        "derpp",
        "seq-mnist",
        500,
        10,
    )
    assert (settings.epochs, settings.global_batch, settings.lr, settings.alpha, settings.beta) == (1, 10, 0.03, 1, 0.5)
    assert (settings.level, settings.seed, settings.backbone) == (2, 3, "mlp")
    assert "--procs auto" in " ".join(words)
    assert settings.keep_last > 20


def test_its_defaults_are_mammoths(example: ModuleType) -> None:
    settings = settings_of(example.translate(["--model", "sgd", "--dataset", "seq-mnist", "--lr", "0.03"]))
    assert settings.level == 0
    assert settings.method == "finetune"
    assert (settings.optimizer, settings.momentum) == ("sgd", 0.0)
    line = "--model der --dataset seq-mnist --buffer_size 500 --model_config best"
    best = settings_of(example.translate(line.split()))
    assert (best.lr, best.alpha, best.minibatch_size) == (0.03, 1.0, 128)
    ours = settings_of(
        [*example.translate(["--model", "er", "--dataset", "seq-mnist", "--model_config", "best"]), "--lr", "0.5"]
    )
    assert (ours.lr, ours.buffer_size) == (0.5, 200)


def test_words_that_say_how_not_what(example: ModuleType) -> None:
    """They have a meaning here, or are accepted with the reason why nothing is done."""
    line = "--model er --dataset seq-mnist --nowand 1 --num_workers 0 --device cpu --non_verbose 1 --eval_epochs 2"
    line += " --wandb_project mine --enable_other_metrics 1 --joint 0 --label_perc 1 --base_path files"
    settings = settings_of(example.translate(line.split()))
    assert (settings.workers, settings.device, settings.progress, settings.val_every_epochs) == (0, "cpu", "lines", 2)
    assert settings.data_root == Path("files")
    assert settings.loggers == ("tensorboard",)
    said = example.notes(example.read(line.split()))
    assert [note.partition(":")[0] for note in said] == ["--enable_other_metrics", "--wandb_project"]
    asked = example.translate(["--model", "er", "--dataset", "seq-mnist", "--wandb_project", "mine", "--device", "gpu"])
    assert settings_of(asked).loggers == ("tensorboard", "wandb")
    assert settings_of(asked).device == "cuda"


def test_schedules(example: ModuleType, tmp_path: Path) -> None:
    """Of each task, as theirs; milestones only where these are steps there, too."""
    line = "--model er --dataset seq-mnist --lr 0.1 --lr_scheduler multisteplr --lr_milestones 35 45"
    steps = settings_of(example.translate([*line.split(), "--scheduler_mode", "iter"]))
    assert (steps.schedule, steps.milestones, steps.decay) == ("piecewise", (35, 45), 0.1)
    cosine = settings_of(example.translate(["--model", "er", "--dataset", "seq-mnist", "--lr_scheduler", "cosine"]))
    assert cosine.schedule == "cosine"
    records = train(alone(), {"schedule": "cosine", "steps": 3}, str(tmp_path))["records"]
    rates = [record["lr"] for record in records]
    assert len(rates) == 15
    assert rates[::3] == pytest.approx([0.1] * 5)
    assert rates[2] < 0.05


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        ("--bufer_size 5 --n_epoch 2", ["--bufer_size: there is no such option", "--buffer_size?", "--n_epochs?"]),
        ("--nesterv", ["--nesterv: there is no such option"]),
        ("--lr_scheduler multisteplr --lr_milestones 3", ["are epochs", "--scheduler_mode iter"]),
        ("--device cuda:1", ["CUDA_VISIBLE_DEVICES=1 python"]),
        ("--joint 1 --noise_rate 0.2", ["--joint 1: cannot be done", "--model joint", "--noise_rate 0.2"]),
        ("--fitting_mode early_stopping", ["--fitting_mode early_stopping: cannot be done here"]),
    ],
)
def test_what_cannot_be_done_is_said_at_once(
    words: str, parts: list[str], example: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        example.translate(["--model", "er", "--dataset", "seq-mnist", *words.split()])
    assert left.value.code == 2
    shown = capsys.readouterr().err
    assert "usage" not in shown
    for part in parts:
        assert part in shown, shown


def test_loadcheck_is_a_run_or_a_checkpoint(example: ModuleType, tmp_path: Path) -> None:
    line = ["--model", "er", "--dataset", "seq-digits", "--loadcheck"]
    assert example.translate([*line, str(tmp_path)])[-2:] == ["--resume", str(tmp_path)]
    (tmp_path / "run.json").write_text("{}")
    assert example.translate([*line, str(tmp_path)])[-4:] == ["--out", str(tmp_path), "--resume", "auto"]


def test_it_runs(tmp_path: Path) -> None:
    words = ["--model", "er", "--dataset", "seq-digits", "--lr", "0.1", "--debug_mode", "1", "--distributed=dp"]
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), *words], cwd=tmp_path, capture_output=True, text=True, env=_environment()
    )
    assert done.returncode == 0, done.stderr
    assert "paceline train continual --method er" in done.stdout
    assert "after task5: class-IL" in done.stdout


def test_write_your_own_method_as_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page's file and its two commands: a working method, and the same accuracies on two ranks and on one."""
    page = (ROOT / "docs" / "continual.md").read_text(encoding="utf-8")
    section = page[page.index("## Write your own method") : page.index("## The buffer in your own loop")]
    (name, text) = re.findall(r'```python title="([^"]+)"\n(.*?)```', section, re.DOTALL)[0]
    (tmp_path / name).write_text(text, encoding="utf-8")
    commands = re.findall(r"^paceline (.*)$", section, re.MULTILINE)
    assert len(commands) == 2
    monkeypatch.chdir(tmp_path)
    for command in commands:
        done = run_command(shlex.split(command), timeout_s=300.0)
        assert done.code == 0, done.err
    ranks, alone = (
        json.loads((tmp_path / "runs" / run / "continual.json").read_text()) for run in ("careful", "alone")
    )
    assert ranks == alone
    assert ranks["class_il"] > 30  # 36 to 45, by CPU; 20 is a network that knows the last task alone


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
