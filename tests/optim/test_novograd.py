"""NovoGrad against a float64 reference written from its formulas."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from paceline.optim.layerwise import OutOfRange
from paceline.optim.novograd import NovoGrad
from tests.optim.reference import NovoGradReference, follow, in_two_groups, weights

VARIANTS: list[dict[str, Any]] = [
    {},
    {"betas": (0.95, 0.98)},
    {"betas": (0.95, 0.0)},
    {"betas": (0.0, 0.5)},
    {"grad_averaging": True},
    {"betas": (0.9, 0.5), "amsgrad": True},
    {"luc": True, "luc_trust": 0.05},
    {"luc": True, "luc_trust": 10.0},  # never below lr
    {"betas": (0.8, 0.9), "eps": 0.1, "grad_averaging": True, "amsgrad": True, "luc": True},
]


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_as_the_formulas_say(variant: dict[str, Any], weight_decay: float) -> None:
    """Two groups, 12 steps, a weight that has no gradient in every other one."""
    for dtype, allowed in [(torch.float64, 1e-13), (torch.float32, 5e-6)]:
        parameters = weights(dtype)
        optimizer = NovoGrad(in_two_groups(parameters, 0.02, weight_decay), **variant)
        options = {"betas": (0.95, 0.25), **variant}
        references = [
            NovoGradReference(lr=0.02, weight_decay=weight_decay, **options),
            NovoGradReference(lr=0.04, weight_decay=0.0, **options),
        ]
        assert follow(optimizer, parameters, references, 12) < allowed


def test_first_update_has_the_length_of_the_rate() -> None:
    """v = |g|^2 at first, so that the first update is a unit vector times lr, however large the gradient."""
    for size in (1e-6, 1.0, 1e6):
        weight = torch.zeros(50, dtype=torch.float64, requires_grad=True)
        weight.grad = size * torch.randn(50, dtype=torch.float64)
        NovoGrad([weight], lr=0.3, eps=0.0).step()
        assert float(weight.detach().norm()) == pytest.approx(0.3, rel=1e-12)


def test_a_gradient_of_zero_is_no_first_step() -> None:
    """A layer that is not used at first would otherwise take steps that are too long by 1 / sqrt(1 - beta2)."""
    weight = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    optimizer = NovoGrad([weight], lr=0.1, betas=(0.0, 0.98))
    weight.grad = torch.zeros_like(weight)
    optimizer.step()
    assert torch.equal(weight, torch.zeros_like(weight))
    weight.grad = torch.tensor([3.0, 4.0, 0.0], dtype=torch.float64)
    optimizer.step()
    torch.testing.assert_close(weight.detach(), -0.1 * torch.tensor([0.6, 0.8, 0.0], dtype=torch.float64))


def test_state_is_one_number_per_tensor_beside_the_momentum() -> None:
    (weight,) = weights(torch.float32, shapes=[(3, 4)])
    optimizer = NovoGrad([weight], amsgrad=True)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    shapes = {name: tuple(value.shape) for name, value in optimizer.state[weight].items()}
    assert shapes == {"step": (), "exp_avg": (3, 4), "exp_avg_sq": (), "max_exp_avg_sq": ()}
    assert optimizer.state[weight]["step"] == 1
    assert optimizer.state[weight]["exp_avg_sq"] == 12


def test_a_rate_that_is_a_tensor() -> None:
    as_number, as_tensor = weights(torch.float64), weights(torch.float64)
    for parameters, lr in ((as_number, 0.5), (as_tensor, torch.tensor(0.5))):
        optimizer = NovoGrad(parameters, lr=lr)
        for parameter in parameters:
            parameter.grad = parameter.detach().clone()
        optimizer.step()
    assert all(torch.equal(one, other) for one, other in zip(as_number, as_tensor, strict=True))


def test_luc_needs_a_momentum() -> None:
    with pytest.raises(OutOfRange, match=r"betas\[0\]"):
        NovoGrad(weights(torch.float32), betas=(0.0, 0.5), luc=True)
