"""What a user reads after a typical mistake with the continual recipe."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest

from paceline.cli.main import main
from paceline.core.errors import PacelineError
from paceline.recipes.continual.method import Method
from paceline.recipes.continual.settings import ContinualSettings
from paceline.recipes.continual.task import Continual, NotDistributed
from paceline.train.run import Run, open_run
from paceline.world.link import Link
from tests.ranks import ranks
from tests.recipes.continual.small import MLP, alone


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--dataset seq-mnst", ["--dataset seq-mnst: there is no such stream", "did you mean seq-mnist?"]),
        ("--method der+", ["--method der+: there is no such method", "did you mean der++?", "gdumb"]),
        ("--backbone resnt18", ["--backbone resnt18: there is no such network", "did you mean resnet18?"]),
        ("--buffer-size 5", ["--buffer-size 5", "smaller than a replay batch of 10", "--minibatch-size is not set"]),
        ("--buffer-size 5 --minibatch-size 6", ["--buffer-size is 5, smaller than a replay batch of 6"]),
        ("--num-tasks 11", ["11 tasks cannot share 10 classes", "set `--num-tasks` to 10 or less"]),
        ("--dataset seq-mnist --data-root void", ["mnist needs train-images-idx3-ubyte.gz", "download https://"]),
        ("--dataset seq-cifar100 --data-root void", ["cifar100 needs cifar-100-binary.tar.gz", "--data-root"]),
        ("--method none.py:Mine", ["there is no method none.py:Mine", "path/to/file.py:ClassName"]),
        (
            "--method own.py:Mean --limit-batches 1 --out run --progress none",
            ["`loss` of method Mean returned a single tensor (a mean?)", "return Answer(sum, count, output)"],
        ),
        ("--method own.py:Yours", ["there is no method own.py:Yours", "there: Mean, Mine"]),
        ("--method broken.py:Mine", ["broken.py fails while it is imported", "ZeroDivisionError"]),
        ("--backbone own.py:Net", ["own.py:Net cannot be made: TypeError", "Model((3, 32, 32), 10)"]),
        ("--dataset-distribution random_seed_offset", ["--dataset-distribution", "a stream has one order"]),
        ("--minibatch-size 3 --grains 4", ["a replay batch of 3 cannot be shared by 4 grains", "--minibatch-size"]),
    ],
)
def test_message(
    words: str, message: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    own = "from torch import nn\nfrom paceline.recipes.continual.method import Method\nclass Mine(Method):\n    pass\n"
    own += "class Mean(Method):\n    def loss(self, net, now, replay):\n        return net(now.x).mean()\n"
    Path("own.py").write_text(own + "class Net(nn.Module):\n    pass\n")
    Path("broken.py").write_text("1 / 0\n")
    assert main(["train", "continual", *words.split()]) == 2
    shown = capsys.readouterr().err
    for part in message:
        assert part in shown, shown
    assert "paceline/" not in shown  # the user's own file at most


def test_wrong_checksum(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1"):
        (tmp_path / f"{name}-ubyte.gz").write_bytes(gzip.compress(b"nothing", mtime=0))
    (tmp_path / "cifar-10-binary.tar.gz").write_bytes(b"nothing")
    for dataset, file, wanted in (
        ("seq-mnist", "train-images-idx3-ubyte.gz", "f68b3c2dcbeaaa9fbdd348bbdeb94873"),
        ("seq-cifar10", "cifar-10-binary.tar.gz", "c32a1d4ab5d03f1284b67883e8d87530"),
    ):
        assert main(["train", "continual", "--dataset", dataset, "--data-root", "."]) == 2
        shown = capsys.readouterr().err
        assert f"{file} is not the official file: its md5 is" in shown
        assert wanted in shown
        assert "download it again: https://" in shown


def test_a_subset_that_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.savez(
        tmp_path / "cifar10_5.npz", x_train=np.zeros((5, 3, 8, 8), np.uint8), y_train=np.zeros(5), x_test=0, y_test=0
    )
    assert main(["train", "continual", "--dataset", "seq-cifar10", "--data-root", str(tmp_path)]) == 2
    assert "cifar10_5.npz cannot be used: x_train is uint8 [5, 3, 8, 8]" in capsys.readouterr().err


class Selfish(Method):
    why_not = "it compares each example with the one before it"


def own_method(link: Link, method: type[Method]) -> Run:
    task = Continual()
    config = ContinualSettings(**{**MLP, "method": f"{__file__}:{method.__name__}"})
    return open_run(task, config, link)


@ranks(2)
def test_a_method_that_cannot_run_distributed_is_refused(link: Link) -> None:
    with pytest.raises(NotDistributed, match="cannot run on 2 ranks: it compares each example") as refused:
        own_method(link, Selfish)
    assert "--procs 1" in refused.value.hint
    assert "derpp" in refused.value.hint


def test_no_level_is_offered_that_is_refused() -> None:
    with pytest.raises(PacelineError, match="level"):
        ContinualSettings(**{**MLP, "level": 4})
    assert max(ContinualSettings(**{**MLP, "precision": None}).possible_levels) == 3


def test_but_runs_alone() -> None:
    assert isinstance(own_method(alone(), Selfish).task.method, Method)  # type: ignore[attr-defined]
