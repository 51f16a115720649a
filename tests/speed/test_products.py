"""Several products of one input at once, beside products that share it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.speed.products import branches, stacked

SIZES = (6, 2, 3)


def tensors(sizes: Sequence[int] = SIZES) -> tuple[Tensor, list[Tensor], Tensor]:
    torch.manual_seed(1)
    x, *weights, last = torch.randn(3, 5, 4), *(torch.randn(size, 4, 1) for size in sizes), torch.randn(2, 4)
    x, *weights, last = (each.double().requires_grad_() for each in (x, *weights, last))
    return x, weights, last


def gradients(sizes: Sequence[int], uses: Sequence[bool], *, has_last: bool, at_once: bool) -> list[Tensor | None]:
    """Of products of which some are used, and of what takes the input after them."""
    x, weights, last = tensors(sizes)
    handed, products = branches(x, weights, stacked([weights], x.dtype)[0] if at_once else None)
    total = torch.zeros((), dtype=torch.float64)
    for product, is_used in zip(products, uses, strict=True):
        total = total + product.square().sum() if is_used else total
    if has_last:
        total = total + F.linear(handed, last).sin().sum()
    total.backward()
    return [each.grad for each in (x, *weights, last)]


@pytest.mark.parametrize("has_last", [True, False])
@pytest.mark.parametrize("uses", [(True, True, True), (True, False, True), (False, True, False), (True,)])
def test_same_gradients(uses: tuple[bool, ...], has_last: bool) -> None:
    sizes = SIZES[: len(uses)]
    found, expected = (gradients(sizes, uses, has_last=has_last, at_once=at_once) for at_once in (True, False))
    for one, other in zip(found, expected, strict=True):
        if one is None or other is None:
            assert one is None or not one.any()  # a product that nobody used
            assert other is None
        else:
            assert torch.allclose(one, other, rtol=1e-13, atol=1e-13)


def test_only_the_input_is_used() -> None:
    found, expected = (gradients(SIZES, 3 * [False], has_last=True, at_once=at_once) for at_once in (True, False))
    assert torch.equal(found[0], expected[0])
    assert found[1:4] == expected[1:4] == [None] * 3


def test_gradients_in_the_place_of_their_products_are_used_as_they_lie() -> None:
    x, weights, _ = tensors()
    _, products = branches(x, weights, stacked([weights], x.dtype)[0])
    expected = torch.autograd.grad(products, [x, *weights], [product.detach().cos() for product in products], True)
    places = [product.data for product in products]
    pointers = [each.data_ptr() for each in places]
    assert pointers == [places[0].data_ptr() + 8 * before for before in (0, 6, 8)]
    for place in places:
        place.cos_()
    joins = []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(torch, "cat", lambda *args: joins.append(args))
        found = torch.autograd.grad(products, [x, *weights], places)
    assert not joins
    for one, other in zip(found, expected, strict=True):
        assert torch.allclose(one, other, rtol=1e-13, atol=1e-13)


def test_a_gradient_that_does_not_lie_in_order_is_left_as_it_is() -> None:
    x, (weight, *_), _ = tensors()
    handed, (y,) = branches(x, [weight], stacked([[weight]], x.dtype)[0])
    kept = torch.randn(4, 5, 3, dtype=torch.float64).permute(2, 1, 0)
    before = kept.clone()
    (found,) = torch.autograd.grad([y, handed], [x], [torch.ones_like(y), kept])
    assert torch.equal(kept, before)
    assert torch.allclose(found, before + torch.ones_like(y) @ weight.squeeze(2))


@pytest.mark.parametrize("frozen", ["input", "weight"])
def test_what_needs_no_gradient_gets_none(frozen: str) -> None:
    x, weights, last = tensors()
    (x if frozen == "input" else weights[1]).requires_grad_(False)
    handed, products = branches(x, weights, stacked([weights], x.dtype)[0])
    (sum(product.sum() for product in products) + F.linear(handed, last).sum()).backward()
    for name, tensor in (("input", x), ("weight", weights[1])):
        assert (tensor.grad is None) == (name == frozen)
    assert weights[0].grad is not None


def test_no_gradient_of_a_gradient() -> None:
    """It may have taken a product's place: said, not computed wrong."""
    x, weights, _ = tensors()
    _, products = branches(x, weights, stacked([weights], x.dtype)[0])
    (found,) = torch.autograd.grad(products[0].square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        found.sum().backward()


def test_stacked_in_another_dtype() -> None:
    _, weights, last = tensors()
    first, none, second = stacked([weights, [], [last]], torch.bfloat16)
    assert none is None
    assert torch.equal(first, torch.cat(weights).squeeze(2).bfloat16())
    assert torch.equal(second, last.bfloat16())
    assert stacked([[]], torch.bfloat16) == [None]
