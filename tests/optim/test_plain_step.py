"""A step without torch's wrapper: the same weights, and whoever listens is heard."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from paceline.optim.plain_step import plain_step

OPTIMIZERS: list[Callable[[Any], torch.optim.Optimizer]] = [
    lambda weights: torch.optim.SGD(weights, lr=0.1, momentum=0.9),
    lambda weights: torch.optim.AdamW(weights, lr=0.1),
]


def run(make: Callable[[Any], torch.optim.Optimizer], step: Callable[[torch.optim.Optimizer], None]) -> torch.Tensor:
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(5))
    optimizer = make([weight])
    for _ in range(4):
        weight.grad = torch.randn(5)
        step(optimizer)
    assert weight.requires_grad
    return weight.detach()


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_the_same_weights(make: Callable[[Any], torch.optim.Optimizer]) -> None:
    assert torch.equal(run(make, plain_step), run(make, lambda optimizer: optimizer.step()))


def test_torch_s_wrapper_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def record(name: str) -> None:
        raise AssertionError(f"{name} was annotated")

    run(OPTIMIZERS[0], plain_step)
    monkeypatch.setattr(torch.autograd.profiler, "record_function", record)
    run(OPTIMIZERS[0], plain_step)


def test_hooks_are_called() -> None:
    weight = torch.nn.Parameter(torch.randn(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    weight.grad = torch.ones(2)
    heard: list[str] = []
    handles = [
        optimizer.register_step_pre_hook(lambda *_: heard.append("before")),
        optimizer.register_step_post_hook(lambda *_: heard.append("after")),
        register_optimizer_step_pre_hook(lambda *_: heard.append("any")),
    ]
    plain_step(optimizer)
    assert sorted(heard) == ["after", "any", "before"]
    for handle in handles:
        handle.remove()
    plain_step(optimizer)
    assert len(heard) == 3


def test_a_profiler_sees_it() -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        run(OPTIMIZERS[0], plain_step)
    assert "Optimizer.step#SGD.step" in {event.key for event in profiler.key_averages()}


def test_a_step_that_was_replaced_is_taken() -> None:
    """As learning-rate schedulers of torch do."""
    weight = torch.nn.Parameter(torch.randn(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    weight.grad = torch.ones(2)
    plain_step(optimizer)
    scheduler.step()  # warns, and so fails, if it has not seen the optimizer's step
