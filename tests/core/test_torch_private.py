"""Every fallback of public names gives what torch's private function gives; a step without torch's wrapper is the same
step, and whoever listens is heard."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from paceline.core import torch_private
from paceline.core.torch_private import FALLBACKS, bind, plain_step

MANY: dict[str, Callable[[list[Tensor], list[Tensor]], tuple[tuple[Any, ...], dict[str, Any]]]] = {
    "_foreach_add_": lambda xs, ys: ((xs, ys), {"alpha": 0.3}),
    "_foreach_mul_": lambda xs, ys: ((xs, ys), {}),
    "_foreach_maximum_": lambda xs, ys: ((xs, 0.25), {}),
    "_foreach_lerp_": lambda xs, ys: ((xs, ys, 0.1), {}),
    "_foreach_copy_": lambda xs, ys: ((xs, ys), {"non_blocking": True}),
    "_foreach_zero_": lambda xs, ys: ((xs,), {}),
    "_foreach_norm": lambda xs, ys: ((xs, 2, torch.float64), {}),
}


def tensors(seed: int) -> list[Tensor]:
    torch.manual_seed(seed)
    return [torch.randn(3, 4), torch.randn(7), torch.randn(())]


@pytest.mark.parametrize("name", MANY)
def test_many_tensors_one_by_one(name: str) -> None:
    outcomes = []
    for function in (bind(torch, name), FALLBACKS[name]):
        values = tensors(0)
        arguments, options = MANY[name](values, tensors(1))
        result = function(*arguments, **options)
        outcomes.append(result if name == "_foreach_norm" else values)
    for ours, theirs in zip(*outcomes, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0 if name != "_foreach_norm" else 1e-12)


def test_many_tensors_by_one_number_of_the_device() -> None:
    """As the engine divides gradients by a count that stays on the device."""
    factor = torch.tensor(0.7, dtype=torch.float64)
    private, public = tensors(0), tensors(0)
    torch_private.foreach_mul_(private, factor)
    FALLBACKS["_foreach_mul_"](public, factor)
    assert all(torch.equal(left, right) for left, right in zip(private, public, strict=True))


@pytest.mark.parametrize("is_skipped", [False, True])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("nesterov", [False, True])
def test_fused_sgd(is_skipped: bool, momentum: float, nesterov: bool) -> None:
    if nesterov and not momentum:
        nesterov = False
    outcomes = []
    for function in (torch_private.fused_sgd_, FALLBACKS["_fused_sgd_"]):
        weights, momenta = tensors(0), tensors(1) if momentum else []
        options = {"weight_decay": 0.01, "momentum": momentum, "lr": 0.1, "dampening": 0.0, "nesterov": nesterov}
        found_inf = torch.tensor(float(is_skipped))
        function(weights, tensors(2), momenta, **options, maximize=False, is_first_step=False, found_inf=found_inf)
        outcomes.append([*weights, *momenta])
    for ours, theirs in zip(*outcomes, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)
    if is_skipped:
        assert all(torch.equal(weight, before) for weight, before in zip(outcomes[1], tensors(0), strict=False))


@pytest.mark.parametrize("is_skipped", [False, True])
def test_fused_adam(is_skipped: bool) -> None:
    outcomes = []
    for function in (torch_private.fused_adam_, FALLBACKS["_fused_adam_"]):
        weights, means, squares = tensors(0), tensors(1), [value.square() for value in tensors(2)]
        steps = [torch.tensor(3.0) for _ in weights]
        options = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.01, "eps": 1e-8, "amsgrad": False}
        scale, found_inf = torch.tensor(4.0), torch.tensor(float(is_skipped))
        scaled = {"maximize": False, "grad_scale": scale, "found_inf": found_inf}
        function(weights, tensors(3), means, squares, [], steps, **options, **scaled)
        outcomes.append([*weights, *means, *squares])
    for ours, theirs in zip(*outcomes, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("value", [1.0, float("inf"), float("nan")])
def test_unscaling_and_the_check_for_numbers_that_are_not_finite(value: float) -> None:
    outcomes = []
    name = "_amp_foreach_non_finite_check_and_unscale_"
    for function in (bind(torch, name), FALLBACKS[name]):
        gradients, found_inf = tensors(0), torch.zeros(1)
        gradients[1][2] = value
        function(gradients, found_inf, torch.tensor(0.125))
        outcomes.append([*gradients, found_inf])
    for ours, theirs in zip(*outcomes, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


def test_the_loss_scale_over_many_steps() -> None:
    overflows = [0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 0.0]
    outcomes = []
    for function in (torch_private.update_scale_, FALLBACKS["_amp_update_scale_"]):
        scale, clean_steps, seen = torch.tensor(64.0), torch.zeros((), dtype=torch.int32), []
        for overflow in overflows:
            function(scale, clean_steps, torch.tensor([overflow]), 2.0, 0.5, 3)
            seen.append((float(scale), int(clean_steps)))
        outcomes.append(seen)
    assert outcomes[0] == outcomes[1]


def test_a_name_that_torch_has_dropped() -> None:
    class NoTorch:
        pass

    assert bind(NoTorch(), "_foreach_add_") is FALLBACKS["_foreach_add_"]


# -- modules -----------------------------------------------------------------------------------------------------------


def test_the_base_of_all_batch_norms() -> None:
    kinds = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
    assert all(issubclass(kind, torch_private.BatchNorm) for kind in kinds)
    assert not issubclass(nn.LayerNorm, torch_private.BatchNorm)


def test_trees() -> None:
    Pair = namedtuple("Pair", "left right")
    tree = {"a": [1, (2, 3)], "b": Pair(4, OrderedDict(c=5))}
    private, public = (
        function(lambda leaf: 10 * leaf, tree) for function in (torch_private.tree_map, FALLBACKS["tree_map"])
    )
    assert private == public == {"a": [10, (20, 30)], "b": Pair(40, OrderedDict(c=50))}
    assert type(public["b"]) is Pair


def test_views() -> None:
    whole = torch.randn(4, requires_grad=True) * 2
    for is_view in (torch_private.is_view, FALLBACKS["_is_view"]):
        assert is_view(whole[:2])
        assert not is_view(whole)


def test_without_the_compiler_nothing_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_private.sys, "modules", {})
    assert torch_private.compile_counters() == (0, 0, 0.0)


# -- an optimizer's step -----------------------------------------------------------------------------------------------

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


def test_a_relu_behind_a_product() -> None:
    bias, first, second = torch.randn(4), torch.randn(5, 3), torch.randn(3, 4)
    for function in (torch_private.relu_of_product, FALLBACKS["_addmm_activation"]):
        torch.testing.assert_close(function(bias, first, second), torch.relu(bias + first @ second))
