"""The promise: losses, buffer, draws and accuracies do not depend on the number of ranks, nor on SIGKILL and resume."""

from __future__ import annotations

import functools
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from paceline.observe.journal import read
from paceline.recipes.continual.methods import METHODS
from paceline.recipes.continual.settings import ContinualSettings
from paceline.recipes.continual.task import Continual
from paceline.train import loop
from paceline.train.checkpoint import reader as restore
from paceline.train.run import open_run
from paceline.world.link import Link
from tests.crash import KILLED, run_until_death
from tests.ranks import run_ranks
from tests.recipes.continual.small import MLP, alone, train

SHORT: dict[str, dict[str, Any]] = {"gdumb": {"fitting_epochs": 1}, "joint": {"num_tasks": 2}}


def assert_same(ours: dict[str, Any], whole: dict[str, Any], what: str) -> None:
    assert ours["digests"] == whole["digests"], what
    assert ours["drawn"] == whole["drawn"], what
    assert len(ours["losses"]) == len(whole["losses"])
    for step, (one, other) in enumerate(zip(ours["losses"], whole["losses"], strict=True)):
        assert one == pytest.approx(other, rel=1e-12), f"{what}, step {step}"
    for name, weight in whole["weights"].items():
        assert torch.allclose(ours["weights"][name], weight, rtol=1e-12, atol=1e-12), f"{what}: {name}"
    for name in ("class_il", "task_il", "untrained"):
        assert np.array_equal(ours[name], whole[name], equal_nan=True), f"{what}: {name}"
    for name, tensor in (ours["buffer"] or {}).items():
        if tensor.is_floating_point():
            assert torch.allclose(tensor, whole["buffer"][name], rtol=1e-12, atol=1e-12), f"{what}: {name}"
        else:
            assert torch.equal(tensor, whole["buffer"][name]), f"{what}: {name}"


@functools.cache
def on_one_rank(method: str) -> dict[str, Any]:
    return train(alone(), settings_of(method))


def settings_of(method: str) -> dict[str, Any]:
    return {"method": method, "num_tasks": 3, **SHORT.get(method, {})}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("size", "mode"),
    [
        (2, "replicated"),
        (4, "sharded"),
        pytest.param(2, "sharded", marks=pytest.mark.long),
        pytest.param(4, "replicated", marks=pytest.mark.long),
    ],
)
def test_every_method_is_the_same_on_any_number_of_ranks(method: str, size: int, mode: str) -> None:
    whole = on_one_rank(method)
    assert len(whole["losses"]) >= 9
    if not whole["buffer"]:
        mode = "replicated"
    for ours in run_ranks(size, train, {**settings_of(method), "buffer_mode": mode}):
        assert_same(ours, whole, f"{method}, {size} ranks, {mode}")


@pytest.mark.parametrize("strategy", ["class-balanced", "loss-aware", "herding"])
def test_every_strategy_too(strategy: str) -> None:
    settings = {"method": "derpp", "num_tasks": 3, "strategy": strategy}
    whole = train(alone(), settings)
    for size, mode in ((2, "replicated"), (4, "sharded")):
        for ours in run_ranks(size, train, {**settings, "buffer_mode": mode}):
            assert_same(ours, whole, f"{strategy}, {size} ranks, {mode}")


def test_batch_norm_too() -> None:
    """Three calls of the network per grain (DER++), on a residual net with batch norm."""
    here = str(Path(__file__).with_name("narrow.py"))
    # Batch norm over a handful of values multiplies rounding errors by thousands a step: larger grains, small steps.
    gentle = {"global_batch": 40, "minibatch_size": 40, "buffer_size": 60, "grains": 2, "lr": 1e-4}
    settings = {"method": "derpp", "num_tasks": 2, "steps": 5, "backbone": f"{here}:Narrow", **gentle}
    whole = train(alone(), settings)
    assert any("running" in name for name in whole["weights"])
    for ours in run_ranks(2, train, {**settings, "buffer_mode": "sharded"}):
        assert_same(ours, whole, "2 ranks")


# -- SIGKILL ---------------------------------------------------------------------------------------------------------


class Mortal(Continual):
    die_at: int | None = None
    steps_done = 0

    def loss(self, model: torch.nn.Module, grain: Any) -> Any:
        self.steps_done += 1
        if self.die_at is not None and self.world.rank == self.world.size - 1 and self.steps_done > self.die_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().loss(model, grain)


def live(link: Link, folder: str, settings: dict[str, Any], die_at: int | None) -> None:
    config = ContinualSettings(
        **{**MLP, **settings, "out": Path(folder), "resume": "auto", "save_every_steps": 4, "log_every": 3}
    )
    task = Mortal()
    task.die_at = die_at
    loop.train(open_run(task, config, link))


@pytest.mark.parametrize(
    ("method", "strategy", "mode"),
    [
        ("derpp", "reservoir", "sharded"),
        ("er_ace", "herding", "sharded"),
        pytest.param("ewc_on", "reservoir", "replicated", marks=pytest.mark.long),
        pytest.param("er", "class-balanced", "replicated", marks=pytest.mark.long),
        pytest.param("er", "loss-aware", "sharded", marks=pytest.mark.long),
        pytest.param("lwf", "reservoir", "replicated", marks=pytest.mark.long),
    ],
)
def test_killed_and_resumed_on_other_ranks(tmp_path: Path, method: str, strategy: str, mode: str) -> None:
    settings = {"method": method, "strategy": strategy, "num_tasks": 3, "buffer_mode": mode}
    live(alone(), str(tmp_path / "whole"), settings, None)
    deaths = 0
    for size, die_at in ((4, 7), (2, 9), (1, None)):
        codes = run_until_death(size, live, str(tmp_path / "broken"), settings, die_at)
        deaths += KILLED in codes
    assert codes == [0]
    assert deaths == 2
    whole, broken = (restore.newest(tmp_path / name / "checkpoints").checkpoint for name in ("whole", "broken"))
    assert whole is not None
    assert broken is not None
    assert whole.step == broken.step == 27
    for part in ("model", "task"):
        assert whole.parts[part].keys() == broken.parts[part].keys()
        for name, tensor in whole.parts[part].items():
            other = broken.parts[part][name]
            if tensor.is_floating_point():
                assert torch.allclose(tensor, other, rtol=1e-11, atol=1e-12, equal_nan=True), f"{part}: {name}"
            else:
                assert torch.equal(tensor, other), f"{part}: {name}"
    losses = [
        [line["loss"] for line in read(tmp_path / name / "metrics.jsonl") if line["kind"] == "step"]
        for name in ("whole", "broken")
    ]
    assert len(losses[0]) == 27
    assert losses[1] == pytest.approx(losses[0], rel=1e-12)
    assert (tmp_path / "broken" / "continual.json").read_text() == (tmp_path / "whole" / "continual.json").read_text()
