"""Products of one input that hand it on, beside products that share it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.speed.branches import branch

Branch = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def shared(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return F.linear(x, weight), x


def tensors() -> tuple[Tensor, list[Tensor], Tensor]:
    torch.manual_seed(1)
    x, last = torch.randn(3, 5, 4), torch.randn(2, 4)
    made = (x, *(torch.randn(filters, 4) for filters in (6, 2, 3)), last)
    x, *weights, last = (each.double().requires_grad_() for each in made)
    return x, weights, last


def gradients(split: Branch, uses: tuple[bool, ...], *, has_last: bool) -> list[Tensor | None]:
    """Of three products in turn, of which some are used, and of what takes the input after them."""
    x, weights, last = tensors()
    handed, total = x, torch.zeros((), dtype=torch.float64)
    for weight, is_used in zip(weights, uses, strict=True):
        y, handed = split(handed, weight)
        total = total + y.square().sum() if is_used else total
    if has_last:
        total = total + F.linear(handed, last).sin().sum()
    total.backward()
    return [each.grad for each in (x, *weights, last)]


@pytest.mark.parametrize("has_last", [True, False])
@pytest.mark.parametrize("uses", [(True, True, True), (True, False, True), (False, True, False), (True, True, False)])
def test_same_gradients(uses: tuple[bool, ...], has_last: bool) -> None:
    found, expected = (gradients(split, uses, has_last=has_last) for split in (branch, shared))
    for one, other in zip(found, expected, strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            assert torch.allclose(one, other, rtol=1e-13, atol=1e-13)


def test_a_gradient_that_does_not_lie_in_order_is_left_as_it_is() -> None:
    x, (weight, *_), _ = tensors()
    y, handed = branch(x, weight)
    kept = torch.randn(4, 5, 3, dtype=torch.float64).permute(2, 1, 0)
    before = kept.clone()
    (found,) = torch.autograd.grad([y, handed], [x], [torch.ones_like(y), kept])
    assert torch.equal(kept, before)
    assert torch.allclose(found, before + torch.ones_like(y) @ weight)


@pytest.mark.parametrize("frozen", ["input", "weight"])
def test_what_needs_no_gradient_gets_none(frozen: str) -> None:
    x, (weight, *_), last = tensors()
    (x if frozen == "input" else weight).requires_grad_(False)
    y, handed = branch(x, weight)
    (y.sum() + F.linear(handed, last).sum()).backward()
    for name, tensor in (("input", x), ("weight", weight)):
        assert (tensor.grad is None) == (name == frozen)


def test_no_gradient_of_a_gradient() -> None:
    """It was added to in place, so that there is none: said, not computed wrong."""
    x, (weight, *_), _ = tensors()
    y, _ = branch(x, weight)
    (found,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        found.sum().backward()
