"""Learning rates that are not the settings': an own optimizer's groups, torch's schedulers, changes by hand.

On ce01e4b a rate of 0.7 of an own optimizer was 0.001 after the first step, and with a StepLR that the task stepped
four times 0.0005 instead of 0.04375.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import paceline
from paceline.world.link import Link
from tests.ranks import ranks
from tests.train.small import BATCH, NUM_SAMPLES, Net, SmallTask, assert_same, batches, fresh_net, points, squares

PLAIN: dict[str, Any] = {"global_batch": BATCH, "order": "none", "level": 0, "workers": 0, "progress": "none"}


class OwnTask(SmallTask):
    """Keeps its model, so that a test can look at it after `fit`, and makes an optimizer of two groups."""

    def model(self) -> nn.Module:
        self.net = Net()
        return self.net

    def val_data(self) -> dict[str, Any]:
        return {}

    def optimizer(self, groups: Any, settings: Any, device: torch.device) -> torch.optim.Optimizer:
        self.optim = two_groups(self.net)
        return self.optim


def two_groups(net: Net) -> torch.optim.SGD:
    groups = [{"params": list(net.body.parameters()), "lr": 0.01}, {"params": list(net.head.parameters())}]
    return torch.optim.SGD(groups, lr=0.2, momentum=0.9)


def train_plainly(num_steps: int, make: Callable[[torch.optim.Optimizer], Any] | None = None) -> dict[str, Any]:
    """Train in plain PyTorch with these two groups, and a scheduler that is stepped after every update."""
    net = fresh_net()
    optimizer = two_groups(net)
    scheduler = None if make is None else make(optimizer)
    for x, y in batches(num_steps, points(NUM_SAMPLES, seed=1)):
        optimizer.zero_grad()
        (squares(net, x, y) / len(y)).backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    return {name: tensor.detach() for name, tensor in net.state_dict().items()}


def test_rates_of_own_groups_stay() -> None:
    task = OwnTask()
    paceline.fit(task, steps=7, **PLAIN)
    assert_same(task.net.state_dict(), train_plainly(7))
    assert [group["lr"] for group in task.optim.param_groups] == [0.01, 0.2]


def test_a_schedule_scales_rates_of_own_groups(capsys: pytest.CaptureFixture[str]) -> None:
    task = OwnTask()
    paceline.fit(task, steps=4, lr=0.5, warmup_steps=3, **{**PLAIN, "progress": "lines"})
    assert [group["lr"] for group in task.optim.param_groups] == pytest.approx([0.01, 0.2])
    said = " ".join(capsys.readouterr().out.split())
    assert "learning rate: 0.01, 0.2 of the task's own optimizer, which `schedule` and warm-up scale" in said
    assert "`lr` has no effect" in said
    assert "learning rate 0.5" not in said
    task = OwnTask()
    paceline.fit(task, steps=2, lr=0.5, warmup_steps=3, **PLAIN)
    assert [group["lr"] for group in task.optim.param_groups] == pytest.approx([0.005, 0.1])


class StepsItself(OwnTask, paceline.StepsSchedulers):
    """Steps a scheduler as a plain loop does."""

    def optimizer(self, groups: Any, settings: Any, device: torch.device) -> torch.optim.Optimizer:
        optimizer = super().optimizer(groups, settings, device)
        self.one_cycle = one_cycle(optimizer)
        return optimizer

    def schedulers(self) -> dict[str, Any]:
        return {"scheduler": self.one_cycle}

    def after_step(self, model: nn.Module, step: Any, grains: Any) -> None:
        self.one_cycle.step()


class HandsItOver(OwnTask):
    def scheduler(self, optimizer: torch.optim.Optimizer, num_steps: int | None) -> Any:
        assert num_steps == 9
        return one_cycle(optimizer)


def one_cycle(optimizer: torch.optim.Optimizer) -> Any:
    """Moves the momentum, too."""
    return lr_scheduler.OneCycleLR(optimizer, [0.05, 0.3], total_steps=12)


class Decays(OwnTask):
    """Takes the optimizer of the settings, and lets torch lower its rate."""

    def optimizer(self, groups: Any, settings: Any, device: torch.device) -> torch.optim.Optimizer:
        return paceline.Task.optimizer(self, groups, settings, device)

    def scheduler(self, optimizer: torch.optim.Optimizer, num_steps: int | None) -> Any:
        return lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)


def test_a_scheduler_that_starts_from_lr_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    """It was called without effect, and the summary spoke of a constant rate."""
    paceline.fit(Decays(), steps=2, lr=0.25, **{**PLAIN, "progress": "lines"})
    said = " ".join(capsys.readouterr().out.split())
    assert "learning rate: set by the task's scheduler (LambdaLR) from `lr` 0.25" in said
    assert "no effect" not in said.split("LambdaLR")[1].split("train epoch")[0]
    assert "constant" not in said


@pytest.mark.parametrize("kind", [StepsItself, HandsItOver])
def test_torch_schedulers_are_respected_and_resumed(
    kind: type[OwnTask], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    task = kind()
    paceline.fit(task, steps=9, schedule="cosine", warmup_steps=2, **{**PLAIN, "progress": "lines"})
    assert_same(task.net.state_dict(), train_plainly(9, one_cycle))
    said = " ".join(capsys.readouterr().out.split())
    assert (
        "learning rate: set by the task's scheduler (OneCycleLR); `schedule` and `warmup_steps` have no effect" in said
    )
    resumed = kind()
    if kind is StepsItself:  # the other has asked how many steps there are
        paceline.fit(kind(), steps=4, out=tmp_path / "run", **PLAIN)
        paceline.fit(resumed, steps=9, out=tmp_path / "run", resume="auto", allow_change=True, **PLAIN)
    else:
        paceline.fit(StopsAfter(4), steps=9, out=tmp_path / "run", **PLAIN)
        paceline.fit(resumed, steps=9, out=tmp_path / "run", resume="auto", **PLAIN)
    assert_same(resumed.net.state_dict(), train_plainly(9, one_cycle))


class StopsAfter(HandsItOver):
    def __init__(self, steps: int) -> None:
        super().__init__()
        self._left = steps

    def after_step(self, model: nn.Module, step: Any, grains: Any) -> None:
        import os
        import signal

        self._left -= 1
        if self._left == 0:
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize(
    "make",
    [
        lambda o: lr_scheduler.MultiStepLR(o, [2, 5, 5], gamma=0.5),
        lambda o: lr_scheduler.SequentialLR(
            o, [lr_scheduler.LinearLR(o, 0.1, total_iters=2), lr_scheduler.ExponentialLR(o, 0.8)], [2]
        ),
        lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
        lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=2),
    ],
    ids=["multi-step", "sequential", "lambda", "cyclic"],
)
def test_kinds_of_scheduler_go_on(make: Callable[..., Any], tmp_path: Path) -> None:
    class Kind(OwnTask):
        def scheduler(self, optimizer: torch.optim.Optimizer, num_steps: int | None) -> Any:
            return make(optimizer)

    task, once = Kind(), Kind()
    paceline.fit(once, steps=3, out=tmp_path / "run", **PLAIN)
    paceline.fit(task, steps=7, out=tmp_path / "run", resume="auto", allow_change=True, **PLAIN)
    assert_same(task.net.state_dict(), train_plainly(7, make))


def test_a_plateau_is_told_of_scores() -> None:
    class Flat(OwnTask):
        def val_data(self) -> dict[str, Any]:
            return {"dev": points(4, seed=2)}

        def metrics(self, model: nn.Module, grain: Any) -> Any:
            return {"loss": (1.0, 1)}

        def scheduler(self, optimizer: torch.optim.Optimizer, num_steps: int | None) -> Any:
            return lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=1)

    task = Flat()
    paceline.fit(task, epochs=4, **PLAIN)
    assert [group["lr"] for group in task.optim.param_groups] == [0.005, 0.1]


def test_rates_that_are_changed_by_hand_stay(capsys: pytest.CaptureFixture[str]) -> None:
    class ByHand(OwnTask):
        def optimizer(self, groups: Any, settings: Any, device: torch.device) -> torch.optim.Optimizer:
            self.optim = torch.optim.SGD(groups)
            return self.optim

        def before_step(self, model: nn.Module, batch: Any) -> None:
            self.optim.param_groups[0]["lr"] = 0.125

    task = ByHand()
    paceline.fit(task, steps=3, **{**PLAIN, "progress": "lines"})
    assert task.optim.param_groups[0]["lr"] == 0.125
    assert "the learning rate of group 0 was changed to 0.125 by the task: it is left to it" in " ".join(
        capsys.readouterr().out.split()
    )


def test_two_optimizers_are_explained() -> None:
    class Two(OwnTask):
        def optimizer(self, groups: Any, settings: Any, device: torch.device) -> Any:
            net = self.net
            return torch.optim.SGD(net.body.parameters()), torch.optim.SGD(net.head.parameters())

    class Lightning(OwnTask):
        def optimizer(self, groups: Any, settings: Any, device: torch.device) -> Any:
            optimizer = super().optimizer(groups, settings, device)
            return [optimizer], [one_cycle(optimizer)]

    with pytest.raises(paceline.PacelineError, match="returned tuple of SGD, SGD, not one torch optimizer") as two:
        paceline.fit(Two(), steps=1, **PLAIN)
    assert "two engines in a loop of your own: docs/own-loop.md" in two.value.hint
    with pytest.raises(paceline.PacelineError, match="not one torch optimizer") as pair:
        paceline.fit(Lightning(), steps=1, **PLAIN)
    assert "def scheduler(self, optimizer, num_steps):" in pair.value.hint


def test_a_scheduler_of_another_optimizer_is_refused() -> None:
    class Foreign(OwnTask):
        def scheduler(self, optimizer: torch.optim.Optimizer, num_steps: int | None) -> Any:
            return lr_scheduler.ConstantLR(two_groups(Net()))

    with pytest.raises(paceline.PacelineError, match="the ConstantLR moves the learning rates of another optimizer"):
        paceline.fit(Foreign(), steps=1, **PLAIN)


@ranks(1, 2)
def test_an_engine_steps_a_torch_scheduler(link: Link) -> None:
    net = fresh_net()
    optimizer = two_groups(net)
    scheduler = one_cycle(optimizer)
    engine = paceline.Engine(link=link, level=0)
    engine.prepare(net, optimizer, scheduler)
    data = points(NUM_SAMPLES, seed=1)
    shown = []
    for batch in engine.batches(data, global_batch=BATCH, epochs=2, order="none", grains=2):
        engine.step(lambda grain: (squares(net, grain.x, grain.y), len(grain)), batch)
        shown.append(engine.rate)
    expected = train_plainly(6, one_cycle)
    for name, tensor in net.state_dict().items():
        torch.testing.assert_close(tensor, expected[name])
    assert scheduler.last_epoch == 6
    assert shown[0] == pytest.approx(0.05 / 25)


class Scheduled(OwnTask):
    """A task with a scheduler that is given to it."""

    def __init__(self, make: Callable[[torch.optim.Optimizer], Any]) -> None:
        super().__init__()
        self._make = make

    def scheduler(self, optimizer: torch.optim.Optimizer, num_steps: int | None) -> Any:
        return self._make(optimizer)


class Squared(lr_scheduler.LRScheduler):
    """A scheduler that fails at its fourth step."""

    def get_lr(self) -> list[float]:
        if self.last_epoch == 4:
            raise ValueError("no more steps")
        return [float(group["lr"]) for group in self.optimizer.param_groups]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda each: lr_scheduler.OneCycleLR(each, 0.2, total_steps=5),
            "OneCycleLR ends after 5 steps, but the run has 6",
        ),
        (Squared, "the Squared failed when it was stepped: ValueError: no more steps"),
        (lambda each: 5, "`scheduler` of task Scheduled returned int, not a torch scheduler"),
    ],
)
def test_schedulers_that_cannot_be_stepped_are_named(make: Any, message: str) -> None:
    with pytest.raises(paceline.PacelineError, match=message):
        paceline.fit(Scheduled(make), epochs=2, **PLAIN)


def test_a_scheduler_that_waits_for_validations_is_told_that_there_are_none(capsys: Any) -> None:
    settings = {**PLAIN, "progress": "lines"}
    paceline.fit(Scheduled(lr_scheduler.ReduceLROnPlateau), epochs=1, **settings)
    assert "ReduceLROnPlateau moves it after validations, and there are none" in capsys.readouterr().out
    paceline.fit(Scheduled(lambda optimizer: None), epochs=1, **settings)  # the settings' schedule after all


def test_an_optimizer_that_needs_a_closure_is_refused() -> None:
    class Newton(OwnTask):
        def optimizer(self, groups: Any, settings: Any, device: torch.device) -> torch.optim.Optimizer:
            return torch.optim.LBFGS(self.net.parameters())

    with pytest.raises(paceline.PacelineError, match="`LBFGS.step` needs a closure"):
        paceline.fit(Newton(), epochs=1, **PLAIN)
