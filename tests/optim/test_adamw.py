"""AdamW by our kernel, in Triton's interpreter: against float64, beside torch's, with torch's state."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from paceline.optim.adamw import AdamW
from paceline.optim.finite import FiniteCheck
from tests.optim.reference import Array, follow, give, gradients, in_two_groups, snapshot, weights

pytest.importorskip("triton", reason="the kernels need Triton")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the kernels run there")


@dataclass
class AdamWReference:
    lr: float
    weight_decay: float
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    state: dict[int, dict[str, Any]] = field(default_factory=dict)

    def step(self, index: int, w: Array, g: Array) -> Array:
        state = self.state.setdefault(index, {"m": np.zeros_like(w), "v": np.zeros_like(w), "t": 0})
        state["t"] += 1
        beta1, beta2 = self.betas
        state["m"] = beta1 * state["m"] + (1 - beta1) * g
        state["v"] = beta2 * state["v"] + (1 - beta2) * g * g
        m_hat, v_hat = state["m"] / (1 - beta1 ** state["t"]), state["v"] / (1 - beta2 ** state["t"])
        return (1 - self.lr * self.weight_decay) * w - self.lr * m_hat / (np.sqrt(v_hat) + self.eps)


def by_kernel(groups: Any, **options: Any) -> AdamW:
    optimizer = AdamW(groups, **options)
    optimizer.by_kernel = True
    return optimizer


@pytest.mark.parametrize("variant", [{}, {"betas": (0.0, 0.9)}, {"betas": (0.8, 0.0), "eps": 0.1}], ids=str)
def test_as_the_formulas_say(variant: dict[str, Any]) -> None:
    parameters = weights(torch.float32)
    references = [AdamWReference(0.02, 0.1, **variant), AdamWReference(0.04, 0.0, **variant)]
    assert follow(by_kernel(in_two_groups(parameters, 0.02, 0.1), **variant), parameters, references, 6) < 5e-6


def test_goes_on_from_the_state_of_torchs_kernels() -> None:
    """Either way from the other's checkpoint: the same names, the same shapes, within rounding of each other."""
    ours, theirs = weights(torch.float32), weights(torch.float32)
    first, second = by_kernel(in_two_groups(ours, 0.02, 0.1)), torch.optim.AdamW(in_two_groups(theirs, 0.02, 0.1))
    for step in range(5):
        for optimizer, parameters in ((first, ours), (second, theirs)):
            give(parameters, gradients(step, torch.float32))
            optimizer.step()
        if step == 2:
            saved = copy.deepcopy(first.state_dict()), copy.deepcopy(second.state_dict())
            assert saved[0].keys() == saved[1].keys()
            assert saved[0]["param_groups"] == saved[1]["param_groups"]
            first.load_state_dict(saved[1])
            second.load_state_dict(saved[0])
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-6)
        assert first.state[mine].keys() == second.state[other].keys()
        for name, value in first.state[mine].items():
            torch.testing.assert_close(value, second.state[other][name], rtol=1e-5, atol=1e-9)


def test_corrections_after_many_steps() -> None:
    """0.999 to the power of the count, for counts that a float32 power would miss."""
    for count in (1, 2, 1000, 10_000_000):
        ours, theirs = torch.ones(3, requires_grad=True), torch.ones(3, dtype=torch.float64, requires_grad=True)
        pair = by_kernel([ours], lr=0.01), torch.optim.AdamW([theirs], lr=0.01)
        for optimizer, parameter in zip(pair, (ours, theirs), strict=True):
            parameter.grad = torch.full_like(parameter, 0.5)
            optimizer.step()
            optimizer.state[parameter]["step"].fill_(count - 1)
            optimizer.step()
        torch.testing.assert_close(ours.double(), theirs, rtol=2e-7, atol=0.0)
        assert float(pair[0].state[ours]["step"]) == count


def test_a_step_that_is_skipped_changes_no_bit() -> None:
    parameters = weights(torch.float32)
    optimizer = by_kernel(parameters, lr=0.1)
    give(parameters, gradients(0, torch.float32))
    optimizer.step()
    before = snapshot(optimizer, parameters)
    optimizer.found_inf = torch.ones(1)  # type: ignore[attr-defined]
    give(parameters, [torch.full_like(parameter, torch.nan) for parameter in parameters])
    optimizer.step()
    assert snapshot(optimizer, parameters) == before
    optimizer.found_inf, optimizer.grad_scale = torch.zeros(1), torch.tensor(4.0)  # type: ignore[attr-defined]
    plain = [parameter.detach().clone().requires_grad_() for parameter in parameters]
    other = torch.optim.AdamW(plain, lr=0.1)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    give(parameters, [4.0 * parameter.detach() for parameter in parameters])
    give(plain, [parameter.detach().clone() for parameter in plain])
    optimizer.step()
    other.step()
    for mine, theirs in zip(parameters, plain, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-6)


def test_what_the_kernel_does_not_know_goes_torchs_way() -> None:
    """To the bit: other dtypes, `amsgrad`, and tensors of no elements, whose steps are counted."""
    cases: list[tuple[torch.dtype, dict[str, Any]]] = [
        (torch.float64, {}),
        (torch.float32, {"amsgrad": True}),
        (torch.float32, {"maximize": True}),
    ]
    for dtype, options in cases:
        ours, theirs = weights(dtype), weights(dtype)
        for optimizer, parameters in (
            (by_kernel(ours, **options), ours),
            (torch.optim.AdamW(theirs, **options), theirs),
        ):
            give(parameters, gradients(0, dtype))
            optimizer.step()
        assert all(map(torch.equal, ours, theirs))
    empty, full = torch.zeros(0, requires_grad=True), torch.ones(2, requires_grad=True)
    optimizer = by_kernel([empty, full])
    empty.grad, full.grad = torch.zeros(0), torch.ones(2)
    optimizer.step()
    assert [float(optimizer.state[each]["step"]) for each in (empty, full)] == [1.0, 1.0]


def test_hooks_run_once_and_copies_go_on() -> None:
    (weight,) = parameters = [torch.ones(3, requires_grad=True)]
    optimizer = by_kernel(parameters)
    calls: list[int] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append(1))
    torch.optim.AdamW([torch.ones(1, requires_grad=True)])  # wraps torch's own `step`
    weight.grad = torch.ones(3)
    optimizer.step()
    assert calls == [1]
    twin = copy.deepcopy(optimizer)
    twin.by_kernel = True
    (other,) = twin.param_groups[0]["params"]
    weight.grad, other.grad = torch.ones(3), torch.ones(3)
    optimizer.step()
    twin.step()
    assert torch.equal(weight, other)


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan, 3.4e38])
def test_finds_inf_and_nan(bad: float) -> None:
    check = FiniteCheck(fused=True)
    tensors: list[Tensor] = [torch.zeros(5000), torch.zeros(0), torch.ones(3, 7)]
    found_inf = torch.zeros(())
    assert check.find_inf(tensors, found_inf)
    assert not found_inf
    tensors[0][4999] = bad
    before = tensors[0].clone()
    assert check.find_inf(tensors, found_inf)
    assert bool(found_inf) == (not np.isfinite(bad))
    assert torch.equal(tensors[0].nan_to_num(), before.nan_to_num())
    assert not check.find_inf([tensors[0].double()], found_inf)
    assert not FiniteCheck().find_inf(tensors, found_inf)
