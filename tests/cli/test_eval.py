"""`paceline eval`, `paceline infer` and the modes of `paceline train`, as they are typed."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.cli.main import main
from paceline.observe.journal import read
from tests.commands import run_command

TASK = '''
"""A task as a user would write it, with a setting of its own."""
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import paceline


def points(number, seed):
    random = torch.Generator().manual_seed(seed)
    return TensorDataset(torch.randn(number, 3, generator=random), torch.randint(0, 2, (number,), generator=random))


def unseen():
    return points(5, seed=9)


class Settings(paceline.TrainConfig):
    width: int = 8


class Small(paceline.Task, paceline.Exports):
    Settings = Settings

    def model(self):
        width = self.settings.width
        return nn.Sequential(nn.Linear(3, width), nn.BatchNorm1d(width), nn.Dropout(0.2), nn.Linear(width, 2))

    def train_data(self):
        return points(40, seed=0)

    def val_data(self):
        return {"dev": points(11, seed=1), "other": points(6, seed=2)}

    def loss(self, model, grain):
        return F.cross_entropy(model(grain.x), grain.y, reduction="sum"), len(grain)

    def metrics(self, model, grain):
        output = model(grain.x)
        right = (output.argmax(1) == grain.y).sum()
        return {"loss": (F.cross_entropy(output, grain.y, reduction="sum"), len(grain)), "right": (right, len(grain))}

    def predict(self, model, grain):
        return [f"class {int(best)}" for best in model(grain.x).argmax(1)]

    def export(self, folder, weights, about):
        folder.mkdir()
        (folder / "names.txt").write_text(" ".join(weights))


class Silent(Small):
    predict = paceline.Task.predict
'''
Type = Callable[..., str]


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", list(sys.path))  # a task's own folder is put in front of it
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "my_task.py"
    path.write_text(TASK)
    return path


@pytest.fixture
def shown(capfd: pytest.CaptureFixture[str]) -> Type:
    """Type a command that is right; what it prints, also from processes that it starts."""

    def type_right(*words: object) -> str:
        capfd.readouterr()
        code = main([str(word) for word in words])
        printed = capfd.readouterr()
        assert (code, printed.err) == (0, "")
        return printed.out

    return type_right


@pytest.fixture
def mistake(capfd: pytest.CaptureFixture[str]) -> Type:
    """Type a command that is wrong; its message."""

    def type_wrong(*words: object) -> str:
        capfd.readouterr()
        assert main([str(word) for word in words]) == 2
        printed = capfd.readouterr()
        assert printed.err.startswith("error: ")
        assert "Traceback" not in printed.err
        return printed.err

    return type_wrong


def train(file: Path, *words: object, task: str = "Small") -> list[str]:
    fixed = ["--device", "cpu", "--threads", 1, "--global-batch", 16, "--grains", 2, "--precision", "fp64"]
    return [str(word) for word in ["train", f"{file}:{task}", *fixed, *words]]


def logged(run: Path) -> list[dict[str, Any]]:
    return read(run / "metrics.jsonl", "validation")


def metrics(record: dict[str, Any]) -> dict[str, float]:
    return {name: value for name, value in record.items() if "/" in name}


# -- eval --------------------------------------------------------------------------------------------------------------


def test_a_run_whose_intervals_never_came_can_be_used(file: Path, shown: Type) -> None:
    """It was validated at its end, so its last checkpoint is its best."""
    shown(*train(file, "--out", "run", "--epochs", 2, "--val-every-epochs", 5))
    assert json.loads(shown("eval", "run", "--json"))["metrics"] == metrics(logged(Path("run"))[-1])
    assert len(shown("infer", "run").splitlines()) == 11
    assert shown("export", "run", "weights").startswith("run/checkpoints/step-00000006\n")


def test_a_run_that_was_never_validated_is_used_as_it_was_left(
    file: Path, shown: Type, capfd: pytest.CaptureFixture[str]
) -> None:
    shown(*train(file, "--out", "run", "--epochs", 2, "--val-every-epochs", 5, "--no-val-at-end"))
    for words in (["eval", "run"], ["infer", "run"], ["export", "run", "weights"]):
        assert main(words) == 0
        printed = capfd.readouterr()
        assert printed.err == "no checkpoint of run has a validation score: taking the last one, step-00000006\n"
    assert Path("weights").is_dir()


def test_eval_gives_what_training_logged(file: Path, shown: Type) -> None:
    run = file.parent / "run"
    shown(*train(file, "--out", run, "--epochs", 3, "--lr", 0.05, "--keep-last", 9, "--width", 12))
    records = {record["step"] + 1: record for record in logged(run)}
    best = min(records, key=lambda step: records[step]["dev/loss"])
    for which, step in (("best", best), ("last", 9), ("step-00000003", 3), (run / "checkpoints/step-00000006", 6)):
        found = json.loads(shown("eval", run, "--checkpoint", which, "--json"))
        assert found["step"] == step
        assert found["metrics"] == metrics(records[step])  # fp64, to the last bit
        assert found["checkpoint"].endswith(f"step-{step:08d}")
    assert json.loads(shown("eval", run, "--json"))["step"] == best

    lines = shown("eval", run).splitlines()
    assert lines[0] == f"{run}/checkpoints/step-{best:08d}"
    assert lines[1].split() == ["set", "loss", "right"]
    for line, name in zip(lines[2:], ("dev", "other"), strict=True):
        assert line.split() == [name, *(f"{records[best][f'{name}/{metric}']:.6g}" for metric in ("loss", "right"))]

    few = json.loads(shown("eval", run, "--limit-batches", 1, "--eval-batch", 6, "--json"))["metrics"]
    assert few["other/right"] == records[best]["other/right"]  # one batch of 6 is all of it
    assert (few["dev/right"] * 6) % 1 == 0
    level = json.loads(shown("eval", run, "-O0", "--json"))["metrics"]  # fp32 instead of the run's fp64
    assert level != metrics(records[best])
    assert level == pytest.approx(metrics(records[best]), rel=1e-5)


def test_on_two_processes(file: Path, shown: Type) -> None:
    run = file.parent / "run"
    shown(*train(file, "--out", run, "--epochs", 2, "--lr", 0.05))
    both = run_command(["eval", str(run), "--checkpoint", "last", "--json", "--device", "cpu", "--procs", "2"])
    assert (both.code, both.err) == (0, "")
    found = json.loads(both.out)
    assert found["metrics"] == metrics(logged(run)[-1])


def test_eval_on_other_data(file: Path, shown: Type, mistake: Type) -> None:
    """ce01e4b had no `--data` here."""
    file.write_text(f"{TASK}\n\ndef both():\n    return {{'dev': points(11, seed=1), 'five': unseen()}}\n")
    run = file.parent / "run"
    shown(*train(file, "--out", run, "--epochs", 1))
    own = json.loads(shown("eval", run, "--json"))["metrics"]
    one = json.loads(shown("eval", run, "--json", "--data", f"{file}:unseen"))["metrics"]
    two = json.loads(shown("eval", run, "--json", "--data", f"{file}:both"))["metrics"]
    assert set(one) == {"unseen/loss", "unseen/right"}
    assert two["five/loss"] == one["unseen/loss"]
    assert two["dev/loss"] == own["dev/loss"]
    assert "has no function 'x'" in mistake("eval", run, "--data", f"{file}:x")


# -- infer -------------------------------------------------------------------------------------------------------------


def test_infer_prints_one_line_per_sample(file: Path, shown: Type) -> None:
    run = file.parent / "run"
    shown(*train(file, "--out", run, "--epochs", 1, "--limit-batches", 2, "--eval-batch", 2))
    lines = [line.split("\t") for line in shown("infer", run).splitlines()]
    assert [int(index) for index, _ in lines] == list(range(11))  # all of the first set, not the run's two batches
    assert {prediction for _, prediction in lines} <= {"class 0", "class 1"}

    rows = [json.loads(line) for line in shown("infer", run, "--json").splitlines()]
    assert [(str(row["index"]), row["prediction"]) for row in rows] == [tuple(line) for line in lines]

    out = file.parent / "found.txt"
    assert shown("infer", run, "--data", f"{file}:unseen", "--out", out) == f"5 predictions in {out}\n"
    assert [line.split("\t")[0] for line in out.read_text().splitlines()] == list("01234")
    assert sorted(path.name for path in file.parent.iterdir() if path.is_file()) == ["found.txt", "my_task.py"]


# -- modes and benchmark -----------------------------------------------------------------------------------------------


def test_modes_of_train(file: Path, shown: Type) -> None:
    run = file.parent / "run"
    shown(*train(file, "--out", run, "--epochs", 2, "--mode", "train"))
    assert logged(run) == []
    more = train(file, "--out", run, "--epochs", 2)
    lines = shown(*more, "--mode", "eval").splitlines()
    assert lines[0] == f"{run}/checkpoints/step-00000006"
    assert lines[1].split() == ["set", "loss", "right"]
    assert shown(*more, "--mode", "infer").endswith(f"11 predictions in {run}/predictions.jsonl\n")
    assert len((run / "predictions.jsonl").read_text().splitlines()) == 11
    assert logged(run) == []


def test_benchmark_says_how_fast_and_leaves_nothing(file: Path, shown: Type) -> None:
    before = {path.name for path in file.parent.iterdir()}
    printed = shown(*train(file, "--epochs", 1, "--benchmark", "--bench-steps", 8, "--bench-start", 3))
    assert "benchmark: steps 3 to 7, 72 samples in" in printed  # an epoch of 16 + 16 + 8, then 16 + 16
    assert "time per step" in printed
    assert "objects/s" in printed
    assert {path.name for path in file.parent.iterdir()} - before <= {"__pycache__"}


# -- mistakes ----------------------------------------------------------------------------------------------------------


def test_mistakes_are_explained(
    file: Path,
    shown: Type,
    mistake: Type,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    folder = file.parent
    run = folder / "run"
    said = mistake("eval", folder / "absent")
    assert "absent is not a run: there is no such folder" in said
    assert "`paceline runs` lists them" in said
    assert "my_task.py is not a run: it is a file" in mistake("eval", file)
    said = mistake("eval", folder / "absent", "--option-of-a-task", 7)  # nobody knows which options that has
    assert said.startswith(f"error: {folder / 'absent'} is not a run")
    assert "it has files but no run.json" in mistake("infer", folder)

    shown(*train(file, "--out", run, "--epochs", 1, task="Silent"))
    said = mistake("infer", run)
    assert "Silent has no `predict`" in said
    assert "def predict(self, model, grain)" in said
    assert "`--data unseen.py:x`: there is no file unseen.py" in mistake(
        "infer", run, "--task", f"{file}:Small", "--data", "unseen.py:x"
    )
    assert "has no function 'seen'" in mistake("infer", run, "--task", f"{file}:Small", "--data", f"{file}:seen")
    assert "step-1 is not a checkpoint" in mistake("eval", run, "--checkpoint", "step-1")
    said = mistake("infer", run, "--task", f"{file}:Small", "--out", folder / "no" / "where.txt")
    assert "No such file or directory" in said
    assert "Is a directory" in mistake("infer", run, "--task", f"{file}:Small", "--out", folder)

    said = mistake("eval", run, "--limit-batches", 0, "--devise", "cpu")
    assert "--limit-batches" in said
    assert "--device" in said

    file.rename(folder / "moved.py")
    said = mistake("eval", run)
    assert f"{run} was made with the task {file}:Silent, which cannot be loaded: there is no file {file}" in said
    assert "--task path/to/file.py:ClassName" in said
    assert shown("eval", run, "--task", f"{folder}/moved.py:Silent").startswith(f"{run}/checkpoints/")

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert "torch sees no CUDA device" in mistake(
        "eval", run, "--task", f"{folder}/moved.py:Silent", "--device", "cuda"
    )

    for path in (run / "checkpoints").iterdir():
        (path / "state.json").write_text("{")
    assert main(["eval", str(run), "--task", f"{folder}/moved.py:Silent", "--checkpoint", "last"]) == 2
    broken, said, *_ = capfd.readouterr().err.splitlines()
    assert broken.startswith("skipped a broken checkpoint: ")
    assert said == f"error: {run} has no sound checkpoint"
