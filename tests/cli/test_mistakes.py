"""What a user reads after a typical mistake, word for word; the texts are in `golden/`, for people to judge."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from paceline.cli.main import main

GOLDEN = Path(__file__).parent / "golden"


@dataclass(frozen=True)
class Mistake:
    """A command, and the files it finds."""

    words: str
    files: dict[str, str] = field(default_factory=dict)
    num_gpus: int = 0


MISTAKES = {
    "unknown-command": Mistake("trian digits"),
    "nothing-said": Mistake("train"),
    "unknown-task": Mistake("train digts --epochs 3 --lr 0"),
    "two-bad-values-and-an-unknown-option": Mistake("train digits --lr -1 --epochs many --larning-rate 0.1"),
    "value-forgotten": Mistake("train digits --epochs --out runs/a --regrain true"),
    "choices": Mistake("train digits --epochs 3 --optimizer adan -O9 --betas 0.9 1.5 --workers -1"),
    "other-toolkit": Mistake("train digits --num-epochs 3 --batch-size 32 --learning_rate 0.1 --num-workers 4"),
    "yaml-syntax": Mistake("train digits --config train.yaml", {"train.yaml": "epochs: 3\nlr: 0.1 seed: 4\n"}),
    "yaml-keys": Mistake(
        "train digits --config train.yaml --lr 0",
        {
            "train.yaml": "epoch: 3\nweight_decay: -0.1\nseed: 1\nseed: 2\n"
            "groups:\n  - match: '*.bias'\n    lr_scal: 2\n"
        },
    ),
    "file-missing": Mistake("train digits --epochs 3 --config trian.yaml", {"train.yaml": "", "notes.txt": ""}),
    "contradiction": Mistake("train digits --epochs 3 --config a.yaml --clip-norm 1", {"a.yaml": "clip-value: 0.5\n"}),
    "task-raises": Mistake(
        "train tower.py:Tower --epochs 3",
        {"tower.py": "def tower():\n    raise RuntimeError('no bricks')\n\n\ntower()\n"},
    ),
    "three-procs-two-gpus": Mistake("train digits --epochs 3 --procs 3", num_gpus=2),
    "which-run": Mistake("train digits --epochs 3 --resume auto"),
    "launch-nothing": Mistake("launch --nproc-per-node 0"),
    "launch-several-nodes": Mistake("launch --nproc-per-node 2 --nnodes 2 -- train digits --epochs 3"),
    "launch-node-rank": Mistake("launch --nnodes 2 --node-rank 2 --master-addr a -- train digits --epochs 3"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_the_message_is_the_golden_one(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    mistake = MISTAKES[name]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: mistake.num_gpus)
    for file, text in mistake.files.items():
        (tmp_path / file).write_text(text, encoding="utf-8")
    assert main(mistake.words.split()) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    text = f"$ paceline {mistake.words}\n{shown.err}".replace(str(tmp_path), "/home/you")
    assert text == (GOLDEN / f"{name}.txt").read_text(encoding="utf-8")
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "__pycache__") == sorted(mistake.files)


def test_every_golden_text_is_of_a_mistake() -> None:
    assert {path.stem for path in GOLDEN.glob("*.txt")} == set(MISTAKES)
