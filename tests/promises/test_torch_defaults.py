"""torch's defaults belong to the user: `set_default_dtype` and `set_default_device` change nothing of a run."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import paceline
from paceline import Task, TrainConfig
from paceline.data.grain import Grain
from paceline.train import loop
from paceline.train.run import open_run
from paceline.world.link import Link
from tests.ranks import run_ranks

CREATING = {"arange", "as_tensor", "empty", "eye", "full", "linspace", "ones", "rand", "randint", "randn", "randperm"}
CREATING |= {"tensor", "zeros"}
FLOATING = {"empty", "eye", "full", "linspace", "ones", "rand", "randn", "zeros"}
"""Those whose dtype is the default one whatever they are given."""
OF_THE_USER = {"data/collate.py": {"as_tensor"}}
"""Samples keep their device, and numbers among them become what the user's defaults say."""


class Explicit(Task):
    """Names the dtype and the device of every tensor."""

    def model(self) -> nn.Module:
        kind: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}
        return nn.Sequential(nn.Linear(3, 8, **kind), nn.BatchNorm1d(8, **kind), nn.Tanh(), nn.Linear(8, 1, **kind))

    def train_data(self) -> Any:
        x = torch.arange(60, dtype=torch.float32, device="cpu").view(20, 3).sin()
        return TensorDataset(x, x.sum(1))

    def val_data(self) -> dict[str, Any]:
        return {"dev": self.train_data()}

    def loss(self, model: nn.Module, grain: Grain) -> Any:
        return (model(grain.x).squeeze(1) - grain.y).square().sum(), len(grain)

    def metrics(self, model: nn.Module, grain: Grain) -> Any:
        total, count = self.loss(model, grain)
        return {"loss": (total, count), "tenth": (0.1, 1)}


@contextmanager
def defaults(dtype: torch.dtype | None, device: str | None) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype or before)
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
        torch.set_default_device(None)


def train(link: Link, out: str, dtype: torch.dtype | None, device: str | None, settings: dict[str, Any]) -> list[Any]:
    plain = {"epochs": 2, "global_batch": 8, "grains": 4, "optimizer": "sgd", "lr": 0.1, "level": 0, "workers": 0}
    config = TrainConfig(**{**plain, **settings}, out=Path(out), loggers=(), progress="none")
    with defaults(dtype, device):
        trainer = open_run(Explicit(), config, link)
        result = loop.train(trainer)
        state = trainer.stepper.model.state_dict()
    return [result.status, result.loss, result.metrics, {name: tensor.tolist() for name, tensor in state.items()}]


CASES = {
    "plain": {"clip_norm": 0.5, "ema": 0.5},
    "param": {"reduce": "param", "sync_step": 2, "wire": "int8"},
    "fp16": {"precision": "fp16-master", "level": "auto"},
    "novograd": {"optimizer": "novograd", "larc": "clip"},
}


@pytest.mark.parametrize(("size", "case"), [(1, "plain"), (2, "plain"), (2, "param"), (1, "fp16"), (1, "novograd")])
def test_a_run_is_the_same_whatever_the_defaults_are(size: int, case: str, tmp_path: Path) -> None:
    settings = CASES[case]
    expected = run_ranks(size, train, str(tmp_path / "plain"), None, None, settings)
    assert expected[0][0] == "finished"
    assert expected[0][2]["dev/tenth"] == pytest.approx(0.1, rel=1e-15)  # no number of a metric is rounded to float32
    assert run_ranks(size, train, str(tmp_path / "double"), torch.float64, None, settings) == expected
    assert run_ranks(size, train, str(tmp_path / "meta"), None, "meta", settings) == expected


def test_no_tensor_of_ours_is_made_by_default() -> None:
    root, found = Path(paceline.__file__).parent, []
    for path in sorted(root.rglob("*.py")):
        name = str(path.relative_to(root))
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Call(func=ast.Attribute(value=ast.Name(id="torch"), attr=maker)) if maker in CREATING:
                    keywords = {keyword.arg for keyword in node.keywords}
                    wanted = {"device"} | ({"dtype"} if maker in FLOATING else set())
                    if wanted - keywords and maker not in OF_THE_USER.get(name, ()):
                        found.append(f"{name}:{node.lineno}: {ast.unparse(node)} without {wanted - keywords}")
    assert found == []
