"""What makes ranks disagree in practice, each against one rank: heads in turn, stage hooks, odd buffers, dice."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from paceline.config.settings import TrainConfig
from paceline.core.errors import TaskContract
from paceline.data.grain import Grain
from paceline.observe.journal import read
from paceline.train import loop
from paceline.train.engine import Engine
from paceline.train.feed import NothingRead
from paceline.train.loss import NoGradients
from paceline.train.run import open_run
from paceline.train.task import HasStages, Stage, Task
from paceline.world.link import Link
from tests.ranks import ranks, run_ranks
from tests.train.test_engine import alone


class Points(Task):
    """Regression on points, in fp64."""

    def data(self, num_samples: int = 24) -> TensorDataset:
        x = torch.randn(num_samples, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
        return TensorDataset(x, x.sum(1))

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))

    def train_data(self) -> Any:
        return self.data()

    def loss(self, model: nn.Module, grain: Grain) -> Any:
        return (model(grain.x).squeeze(1) - grain.y).square().sum(), len(grain)


def train(link: Link, kind: str, folder: str | None, settings: dict[str, Any]) -> dict[str, torch.Tensor]:
    task = {each.__name__: each for each in Task_kinds()}[kind]()
    given = {"epochs": 3, "global_batch": 8, "grains": 4, "precision": "fp64", "lr": 0.05, "optimizer": "sgd"}
    given.update(settings)
    trainer = open_run(task, TrainConfig(out=None if folder is None else Path(folder), **given), link)
    loop.train(trainer)
    state = {name: tensor.clone() for name, tensor in trainer.stepper.model.state_dict().items()}
    return {**state, **{f"seen/{name}": value for name, value in getattr(task, "seen", {}).items()}}


def Task_kinds() -> list[type[Task]]:
    return [each for each in globals().values() if isinstance(each, type) and issubclass(each, Task)]


def check(kind: str, **settings: Any) -> None:
    (expected,) = run_ranks(1, train, kind, None, settings)
    for size in (2, 4):
        for state in run_ranks(size, train, kind, None, settings):
            for name, value in expected.items():
                torch.testing.assert_close(state[name], value, rtol=1e-11, atol=1e-12, msg=f"{size} ranks: {name}")


class TwoHeads(Points):
    """Each head is used in every second step, one layer never: momentum and decay must leave them alone meanwhile."""

    steps = 0

    def model(self) -> nn.Module:
        return nn.ModuleDict({"a": nn.Linear(3, 1), "b": nn.Linear(3, 1), "never": nn.Linear(3, 3)})

    def loss(self, model: nn.Module, grain: Grain) -> Any:
        head = model["ab"[self.engine_steps() % 2]]  # type: ignore[index]
        return (head(grain.x).squeeze(1) - grain.y).square().sum(), len(grain)

    def engine_steps(self) -> int:
        return self.steps

    def after_step(self, model: nn.Module, step: Any, grains: list[Grain]) -> None:
        self.steps += 1


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_parameters_without_a_gradient_are_left_alone_as_on_one_rank(optimizer: str) -> None:
    check("TwoHeads", optimizer=optimizer, weight_decay=0.1)


class Teacher(Points, HasStages):
    """Keeps a copy of the model at the end of each stage, and freezes a batch norm for the second."""

    def __init__(self) -> None:
        self.seen: dict[str, torch.Tensor] = {}

    def stages(self) -> list[Stage]:
        return [Stage("one", self.data()), Stage("two", self.data(16))]

    def before_stage(self, model: nn.Module, stage: int) -> None:
        if stage == 1:
            model[1].eval()  # type: ignore[index]

    def after_stage(self, model: nn.Module, stage: int) -> None:
        self.seen.update({f"{stage}/{name}": value.clone() for name, value in model.state_dict().items()})


def test_stage_hooks_see_whole_statistics_and_may_freeze_them() -> None:
    check("Teacher")


class FrozenLate(Points):
    def after_step(self, model: nn.Module, step: Any, grains: list[Grain]) -> None:
        model[1].eval()  # type: ignore[index]


@ranks(2)
def test_a_batch_norm_frozen_between_steps_is_refused(link: Link) -> None:
    with pytest.raises(TaskContract, match="a batch norm was put into evaluation mode"):
        train(link, "FrozenLate", None, {"sums": "fast"})


class Constant(Points):
    """All inputs are 5: so is every mean, whatever the number of grains."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.BatchNorm1d(3, momentum=0.5), nn.Linear(3, 1))

    def train_data(self) -> Any:
        return TensorDataset(torch.full((18, 3), 5.0, dtype=torch.float64), torch.zeros(18, dtype=torch.float64))


@ranks(1, 2, 4)
def test_statistics_keep_their_mass_when_every_rank_walks_its_own_way(link: Link) -> None:
    state = train(link, "Constant", None, {"dataset_distribution": "random_seed_offset", "epochs": 6})
    torch.testing.assert_close(state["0.running_mean"], torch.full((3,), 5.0, dtype=torch.float64))


class Mixup(Points):
    """A loss that draws from torch, numpy and Python."""

    def loss(self, model: nn.Module, grain: Grain) -> Any:
        x = grain.x * np.random.beta(2, 2) + 0.1 * torch.rand(()) + 0.1 * random.random()
        return (model(x).squeeze(1) - grain.y).square().sum(), len(grain)


def test_what_a_loss_draws_is_keyed() -> None:
    check("Mixup")


class LateDice(Mixup):
    """Begins to draw from numpy long after the first step."""

    calls = 0

    def loss(self, model: nn.Module, grain: Grain) -> Any:
        self.calls += 1
        return super().loss(model, grain) if self.calls > 4 else Points.loss(self, model, grain)


def test_dice_found_late_are_keyed_from_then_on_and_said(caplog: pytest.LogCaptureFixture) -> None:
    train(alone(), "LateDice", None, {"epochs": 350})
    assert "keyed from step 1024 on, not before" in caplog.text


class OddBuffers(Points):
    def model(self) -> nn.Module:
        net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        net.register_buffer("strided", torch.arange(10.0)[::2])
        net.register_buffer("short", torch.tensor([3, 4], dtype=torch.int16))
        return net


def test_buffers_of_any_layout_and_dtype_reach_all_ranks() -> None:
    check("OddBuffers")


class Instance(Points):
    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Unflatten(1, (1, 3)), nn.InstanceNorm1d(1, track_running_stats=True), nn.Flatten(), nn.Linear(3, 1)
        )


@ranks(2)
def test_other_statistics_are_the_first_ranks_everywhere(link: Link) -> None:
    state = train(link, "Instance", None, {})
    for theirs in link.gather_objects(state):
        assert torch.equal(theirs["1.running_mean"], state["1.running_mean"])


@ranks(1, 2)
def test_parameters_of_nobodys_model_are_refused(link: Link) -> None:
    engine = Engine(link=link, level=0)
    model, temperature = nn.Linear(2, 1), nn.Parameter(torch.ones(()))
    with pytest.raises(TaskContract, match="1 parameter that"):
        engine.prepare(model, torch.optim.SGD([*model.parameters(), temperature], lr=0.1))


@ranks(1, 2)
def test_a_detached_loss_is_named(link: Link) -> None:
    engine = Engine(link=link, level=0)
    model = nn.Linear(3, 1).double()
    engine.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    batch = next(iter(engine.batches(Points().data(), global_batch=8, grains=2)))
    with pytest.raises(NoGradients):
        engine.step(lambda grain: (model(grain.x).sum().detach(), len(grain)), batch)


# -- one rank is enough to see it -----------------------------------------------------------------------------------


class UnequalStages(Points, HasStages):
    def stages(self) -> list[Stage]:
        return [Stage("long", self.data(80)), Stage("short", self.data(16))]


def test_one_schedule_spans_stages_of_any_size(tmp_path: Path) -> None:
    train(alone(), "UnequalStages", str(tmp_path / "run"), {"epochs": 1, "schedule": "cosine"})
    rates = [record["lr"] for record in read(tmp_path / "run" / "metrics.jsonl")]
    expected = [0.05 * 0.5 * (1 + math.cos(math.pi * step / 12)) for step in range(12)]
    assert rates == pytest.approx(expected)


class ByName(Points):
    """Metrics that only some batches have, in any order."""

    scores: Any = None

    def val_data(self) -> Mapping[str, Any]:
        return {"dev": self.data(8)}

    def metrics(self, model: nn.Module, grain: Grain) -> Mapping[str, Any]:
        first = int(grain.samples[0])
        return {"even": (first, 1)} if first % 4 == 0 else {"odd": (100, 1), "even": (0, 1)}


def run_by_name(link: Link) -> dict[str, float]:
    config = TrainConfig(epochs=1, global_batch=8, grains=4, precision="fp64", eval_batch=2)
    return loop.train(open_run(ByName(), config, link)).metrics


def test_metrics_are_joined_by_name() -> None:
    for size in (1, 2, 3):
        for metrics in run_ranks(size, run_by_name):
            assert metrics == {"dev/even": (0 + 0 + 4 + 0) / 4, "dev/odd": 100.0}


class Once(Points):
    def __init__(self) -> None:
        self.rows = ((x, y) for x, y in self.data(16))

    def train_data(self) -> Any:
        return self.rows


def test_an_iterator_that_is_used_up_is_named() -> None:
    with pytest.raises(NothingRead, match="epoch 2"):
        train(alone(), "Once", None, {"epochs": None, "steps": 10})


class Rows(torch.utils.data.IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(Points().data(16))


class Streamed(Points):
    def train_data(self) -> Any:
        return Rows()


def test_a_stream_saved_at_the_end_of_an_epoch_resumes_without_an_extra_step(tmp_path: Path) -> None:
    settings = {"save_every_steps": 2, "save_every_epochs": None, "epochs": 3}
    run_ranks(2, train, "Streamed", str(tmp_path / "whole"), settings)
    run_ranks(2, train, "Streamed", str(tmp_path / "parts"), {**settings, "steps": 2})
    again = {**settings, "resume": "auto", "allow_change": True}
    run_ranks(2, train, "Streamed", str(tmp_path / "parts"), again)
    whole, parts = (read(tmp_path / name / "metrics.jsonl") for name in ("whole", "parts"))
    assert [record["loss"] for record in parts] == pytest.approx([record["loss"] for record in whole], rel=1e-12)


def test_batches_may_be_asked_for_epoch_by_epoch() -> None:
    engine = Engine(link=alone(), precision="fp64")
    model = nn.Linear(3, 1)
    engine.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    orders = []
    for _ in range(3):
        batches = list(engine.batches(Points().data(), global_batch=8))
        orders.append([grain.samples.tolist() for batch in batches for grain in batch.grains])
    assert [len(order) for order in orders] == [3, 3, 3]
    assert orders[0] != orders[1] != orders[2]
