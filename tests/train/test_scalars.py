"""Numbers of a task's own, the norm of gradients and the learning rate in the journal.

On ce01e4b a task had no `log`, and a validation after epoch 1 had another number in the journal than that epoch.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import paceline
from paceline.config.settings import EngineConfig
from paceline.observe.journal import read
from paceline.speed.graphs import Recorder
from paceline.train.engine import Engine
from paceline.train.loop import train
from paceline.train.run import open_run
from paceline.train.scalars import Scalars
from paceline.world.discover.environment import discover
from paceline.world.link import Link
from paceline.world.start import start
from tests.ranks import ranks, run_ranks
from tests.speed.test_graphs import Again
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
    train(open_run(Logging(), config, link))
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


def logged_by_an_engine(link: Link, recorder: Recorder | None) -> dict[str, float]:
    """Log in a loss that is called, or that is replayed."""
    engine = Engine(EngineConfig(level=0, seed=5), link=link)
    net = fresh_net()
    engine.prepare(net, sgd(net))
    scalars = Scalars(link, True, lambda: engine.stepper.is_counted)
    if recorder is not None:
        engine.record(recorder, lambda grain: grain.data, scalars)

    def loss(grain: paceline.Grain) -> Any:
        output = net(grain.x)
        scalars.add("mean_y", grain.y.sum(), len(grain))
        scalars.add("output", output.detach().square().sum(), output.numel())
        scalars.add("grains", 1.0, 2.0)
        return (output - grain.y).square().sum(), len(grain)

    for batch in engine.batches(points(40, seed=1), epochs=3, global_batch=8, grains=2, workers=0):
        engine.step(loss, batch)
    if recorder is not None:
        assert engine.recorded is not None
        assert engine.recorded.graphs.num_replayed > engine.recorded.graphs.num_plain
        assert not engine.recorded.graphs.failures
    return scalars.read()


def test_what_a_loss_logs_is_the_same_where_graphs_replay_and_on_any_ranks() -> None:
    """A replay calls no loss, and a recording calls it more than once: numbers were missing, or counted thrice."""
    (plain,) = run_ranks(1, logged_by_an_engine, None)
    assert plain["grains"] == 0.5
    assert run_ranks(1, logged_by_an_engine, Again()) == [plain]
    for recorder in (None, Again()):
        assert run_ranks(2, logged_by_an_engine, recorder) == [plain, plain]


def test_numbers_that_are_none_are_null() -> None:
    link = start(discover({}), device="cpu", threads=1)
    scalars = Scalars(link, True, lambda: True)
    numbers = {"nan": [math.nan, 1.0], "both": [math.inf, -math.inf], "huge": [1e308, 1e308], "inf": [math.inf]}
    for name, values in numbers.items():
        for value in values:
            scalars.add(name, value, 1.0)
    scalars.add("nothing", 0.0, 0.0)
    found = scalars.read()
    assert found.pop("inf") == math.inf
    assert all(math.isnan(value) for value in found.values())
    assert len(found) == 4
