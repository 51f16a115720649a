"""Numbers of a task's own, the norm of gradients and the learning rate in the journal."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import paceline
from paceline.observe.journal import read
from paceline.train.trainer import Trainer
from paceline.world.link import Link
from tests.ranks import ranks
from tests.train.small import BATCH, SmallTask, fresh_net, points, raw_steps, sgd

PLAIN: dict[str, Any] = {"global_batch": BATCH, "order": "none", "level": 0, "workers": 0, "progress": "none"}


class Logging(SmallTask):
    def loss(self, model: nn.Module, grain: paceline.Grain) -> Any:
        with torch.no_grad():
            self.log("mean_y", grain.y.sum(), len(grain))
        return super().loss(model, grain)

    def after_step(self, model: nn.Module, step: Any, grains: Any) -> None:
        self.log("twice", 2.0)


@ranks(1, 2)
def test_own_numbers_are_means_over_grains_ranks_and_steps(link: Link, tmp_path: Path) -> None:
    config = paceline.TrainConfig(epochs=2, grains=2, log_every=2, lr=0.01, out=tmp_path / "run", **PLAIN)
    Trainer(Logging(), config, link).fit()
    if not link.is_first:
        return
    y = points(20, seed=1).tensors[1].double()
    steps = read(tmp_path / "run" / "metrics.jsonl", "step")
    means = {record["step"]: record["mean_y"] for record in steps if "mean_y" in record}
    assert list(means) == [1, 2, 3, 5]  # every second step, and the end of the epoch
    assert means[1] == pytest.approx(float(y[:16].mean()))
    assert means[2] == pytest.approx(float(y[16:].mean()))
    assert means[3] == pytest.approx(float(y[:8].mean()))
    assert {record["twice"] for record in steps if "twice" in record} == {2.0}
    assert [record["lr"] for record in steps] == [0.01] * 6


def test_the_norm_of_gradients_is_measured_where_it_is_logged(tmp_path: Path) -> None:
    """Without clipping; ce01e4b had none."""
    settings = {**PLAIN, "optimizer": "sgd", "lr": 0.05}
    paceline.fit(SmallTask(), steps=4, log_every=2, out=tmp_path / "run", **settings)
    net = fresh_net()
    norms = []
    for _ in raw_steps(net, sgd(net), 4):
        gradients = [parameter.grad for parameter in net.parameters() if parameter.grad is not None]
        norms.append(float(torch.nn.utils.get_total_norm(gradients)))
    steps = read(tmp_path / "run" / "metrics.jsonl", "step")
    assert [record.get("gradient_norm") for record in steps] == [None, norms[1], None, norms[3]]


def test_names_of_every_step_are_refused() -> None:
    class Bad(SmallTask):
        def loss(self, model: nn.Module, grain: paceline.Grain) -> Any:
            self.log("loss", 1.0)
            return super().loss(model, grain)

    with pytest.raises(paceline.PacelineError, match="every step has a number of this name already") as error:
        paceline.fit(Bad(), steps=1, **PLAIN)
    assert "train_loss" in error.value.hint


def test_nothing_is_logged_outside_of_training() -> None:
    task = Logging()
    with pytest.raises(paceline.PacelineError, match="no run has begun"):
        task.log("x", 1.0)
    values: list[float] = []

    class Tell(paceline.Callback):
        def step(self, records: list[Any]) -> None:
            values.extend(record["mean_y"] for record in records if "mean_y" in record)

    paceline.fit(task, epochs=1, watchers=[Tell()], **PLAIN)
    assert values == [pytest.approx(float(points(20, seed=1).tensors[1].double().mean()))]
    assert not math.isnan(values[0])
