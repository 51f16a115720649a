"""Several products of one input at once, beside products that share it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.speed.layers.products import branches, stacked, taken

SIZES = (6, 2, 3)


def tensors(sizes: Sequence[int] = SIZES) -> tuple[Tensor, list[Tensor], Tensor]:
    torch.manual_seed(1)
    x, *weights, last = torch.randn(3, 5, 4), *(torch.randn(size, 4, 1) for size in sizes), torch.randn(2, 4)
    x, *weights, last = (each.double().requires_grad_() for each in (x, *weights, last))
    return x, weights, last


KINDS = [{"at_once": True}, {"at_once": True, "is_sent": True}]


def outcomes(x: Tensor, weights: list[Tensor], stack: Tensor | None, *, is_sent: bool) -> tuple[Tensor, list[Tensor]]:
    """As `branches`, with every product taken at once."""
    handed, products = branches(x, weights, stack, is_sent=is_sent)
    pairs = zip(products, weights, strict=True)
    return handed, [taken(each, x, weight) for each, weight in pairs] if is_sent else products


def gradients(
    sizes: Sequence[int], uses: Sequence[bool], *, has_last: bool, at_once: bool = False, is_sent: bool = False
) -> list[Tensor | None]:
    """Of products of which some are used, and of what takes the input after them."""
    x, weights, last = tensors(sizes)
    stack = stacked([weights], x.dtype)[0] if at_once else None
    handed, products = outcomes(x, weights, stack, is_sent=is_sent)
    total = torch.zeros((), dtype=torch.float64)
    for product, is_used in zip(products, uses, strict=True):
        total = total + product.square().sum() if is_used else total
    if has_last:
        total = total + F.linear(handed, last).sin().sum()
    total.backward()
    return [each.grad for each in (x, *weights, last)]


@pytest.mark.parametrize("kind", KINDS, ids=["at once", "sent"])
@pytest.mark.parametrize("has_last", [True, False])
@pytest.mark.parametrize("uses", [(True, True, True), (True, False, True), (False, True, False), (True,)])
def test_same_gradients(uses: tuple[bool, ...], has_last: bool, kind: dict[str, bool]) -> None:
    sizes = SIZES[: len(uses)]
    found, expected = (gradients(sizes, uses, has_last=has_last, **each) for each in (kind, {}))
    for one, other in zip(found, expected, strict=True):
        if one is None or other is None:
            assert one is None or not one.any()  # a product that nobody used
            assert other is None
        else:
            assert torch.allclose(one, other, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("kind", KINDS, ids=["at once", "sent"])
def test_only_the_input_is_used(kind: dict[str, bool]) -> None:
    found, expected = (gradients(SIZES, 3 * [False], has_last=True, **each) for each in (kind, {}))
    assert torch.equal(found[0], expected[0])
    assert found[1:4] == expected[1:4] == [None] * 3


@pytest.mark.parametrize("is_sent", [False, True])
def test_gradients_in_the_place_of_their_products_are_used_as_they_lie(is_sent: bool) -> None:
    x, weights, _ = tensors()
    _, products = outcomes(x, weights, stacked([weights], x.dtype)[0], is_sent=is_sent)
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
    turned = torch.randn(4, 5, 3, dtype=torch.float64).permute(2, 1, 0)
    before = turned.clone()
    (found,) = torch.autograd.grad([y, handed], [x], [torch.ones_like(y), turned])
    assert torch.equal(turned, before)
    assert torch.allclose(found, before + torch.ones_like(y) @ weight.squeeze(2))


@pytest.mark.parametrize("is_sent", [False, True])
def test_gradients_that_are_sent_come_in_the_order_of_layers(is_sent: bool) -> None:
    """Each with the layer that takes its product, which is what is sent beside it; else all of them at the end."""
    x, weights, _ = tensors((4, 4, 4))
    order: list[int] = []
    for number, weight in enumerate(weights):
        weight.register_post_accumulate_grad_hook(lambda _, number=number: order.append(number))
    hidden, products = branches(x, weights, stacked([weights], x.dtype)[0], is_sent=is_sent)
    for number, (product, weight) in enumerate(zip(products, weights, strict=True)):
        own = torch.eye(4, dtype=torch.float64, requires_grad=True)
        own.register_post_accumulate_grad_hook(lambda _, number=number: order.append(10 + number))
        hidden = F.linear(hidden, own).sin() + (taken(product, x, weight) if is_sent else product)
    hidden.sum().backward()
    if is_sent:
        assert [number for number in order if number < 10] == [2, 1, 0]
        assert order.index(2) < order.index(11)
        assert order.index(1) < order.index(10)
    else:
        assert order[:3] == [12, 11, 10]


@pytest.mark.parametrize("is_sent", [False, True])
@pytest.mark.parametrize("frozen", ["input", "weight"])
def test_what_needs_no_gradient_gets_none(frozen: str, is_sent: bool) -> None:
    x, weights, last = tensors()
    (x if frozen == "input" else weights[1]).requires_grad_(False)
    handed, products = outcomes(x, weights, stacked([weights], x.dtype)[0], is_sent=is_sent)
    assert handed.requires_grad == x.requires_grad
    (sum(product.sum() for product in products) + F.linear(handed, last).sum()).backward()
    for name, tensor in (("input", x), ("weight", weights[1])):
        assert (tensor.grad is None) == (name == frozen)
    assert weights[0].grad is not None


@pytest.mark.parametrize("is_sent", [False, True])
def test_no_gradient_of_a_gradient(is_sent: bool) -> None:
    """It may have taken a product's place: said, not computed wrong."""
    x, weights, _ = tensors()
    _, products = outcomes(x, weights, stacked([weights], x.dtype)[0], is_sent=is_sent)
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
