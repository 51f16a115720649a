"""LAMB against a float64 reference written from its formulas, and against torch's Adam where it is that."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from paceline.optim.lamb import Lamb
from paceline.optim.layerwise import OutOfRange
from tests.optim.reference import LambReference, follow, give, gradients, in_two_groups, weights

VARIANTS: list[dict[str, Any]] = [
    {},
    {"betas": (0.0, 0.9)},
    {"betas": (0.8, 0.0), "eps": 0.1},
    {"trust_range": (0.9, 1.1)},
    {"adapt_undecayed": False},
    {"betas": (0.8, 0.95), "trust_range": (0.0, 0.5), "adapt_undecayed": False},
]


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_as_the_formulas_say(variant: dict[str, Any], weight_decay: float) -> None:
    """Two groups, 12 steps, a weight that has no gradient in every other one."""
    for dtype, allowed in [(torch.float64, 1e-13), (torch.float32, 5e-6)]:
        parameters = weights(dtype)
        optimizer = Lamb(in_two_groups(parameters, 0.02, weight_decay), **variant)
        options = {"betas": (0.9, 0.999), **variant}
        references = [
            LambReference(lr=0.02, weight_decay=weight_decay, **options),
            LambReference(lr=0.04, weight_decay=0.0, **options),
        ]
        assert follow(optimizer, parameters, references, 12) < allowed


def test_without_ratio_and_decay_it_is_adam() -> None:
    ours, raw = weights(torch.float64), weights(torch.float64)
    first = Lamb(ours, lr=0.02, eps=1e-8, adapt_undecayed=False)
    second = torch.optim.Adam(raw, lr=0.02, eps=1e-8)
    for step in range(8):
        give(ours, gradients(step, torch.float64))
        give(raw, gradients(step, torch.float64))
        first.step()
        second.step()
    for one, other in zip(ours, raw, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-13, atol=1e-14)


def test_a_step_is_as_long_as_the_weights_are_large() -> None:
    for size in (1e-3, 1.0, 1e3):
        weight = (size * torch.randn(40, dtype=torch.float64)).requires_grad_()
        before = weight.detach().clone()
        weight.grad = torch.randn(40, dtype=torch.float64)
        Lamb([weight], lr=0.25, weight_decay=0.1).step()
        assert float((weight.detach() - before).norm()) == pytest.approx(0.25 * float(before.norm()), rel=1e-12)


def test_the_ratio_is_1_where_a_norm_is_0() -> None:
    """Weights that start at 0 move as in Adam; a gradient of 0 moves nothing, and makes no nan."""
    zero, still = (torch.zeros(3, dtype=torch.float64).requires_grad_() for _ in range(2))
    unmoved = torch.ones(3, dtype=torch.float64, requires_grad=True)
    zero.grad, still.grad, unmoved.grad = torch.ones(3).double(), torch.zeros(3).double(), torch.zeros(3).double()
    Lamb([zero, still, unmoved], lr=0.1, eps=1e-12).step()
    torch.testing.assert_close(zero.detach(), torch.full((3,), -0.1, dtype=torch.float64))
    assert torch.equal(still, torch.zeros_like(still))
    assert torch.equal(unmoved, torch.ones_like(unmoved))


def test_a_range_without_room_is_refused() -> None:
    with pytest.raises(OutOfRange, match="trust_range"):
        Lamb(weights(torch.float32), trust_range=(2.0, 1.0))
