"""Outer optimizers against torch's SGD on the same gradients, and against BMUF's formula."""

from __future__ import annotations

import pytest
import torch

from paceline.config.settings import ReduceSettings
from paceline.parallel.averaged.outer_optimizer import build


def averages(num: int) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(3)
    return [torch.randn(50, generator=random, dtype=torch.float64) for _ in range(num)]


@pytest.mark.parametrize(
    ("outer", "given", "lr", "momentum", "nesterov"),
    [
        ("nesterov", {}, 0.7, 0.9, True),
        ("nesterov", {"outer_lr": 0.5, "outer_momentum": 0.8}, 0.5, 0.8, True),
        ("momentum", {}, 1.0, 0.75, False),
        ("momentum", {"outer_momentum": 0.0}, 1.0, 0.0, False),
    ],
)
def test_is_sgd_over_averages(outer: str, given: dict[str, float], lr: float, momentum: float, nesterov: bool) -> None:
    ours = build(ReduceSettings(outer=outer, **given), ranks=4)  # type: ignore[arg-type]
    assert ours is not None
    model = torch.ones(50, dtype=torch.float64)
    theirs = torch.nn.Parameter(model.clone())
    sgd = torch.optim.SGD([theirs], lr=lr, momentum=momentum, nesterov=nesterov)
    for average in averages(6):
        theirs.grad = theirs.detach() - average
        sgd.step()
        ours.step(model, average)
        torch.testing.assert_close(model, theirs.detach(), rtol=1e-13, atol=1e-13)


def test_momentum_is_bmuf() -> None:
    """W_t = W_{t-1} + D_t with D_t = eta D_{t-1} + zeta (average - W_{t-1})."""
    ours = build(ReduceSettings(outer="momentum", outer_lr=1.0, outer_momentum=0.6), ranks=2)
    assert ours is not None
    model, theirs, delta = torch.zeros(50).double(), torch.zeros(50).double(), torch.zeros(50).double()
    for average in averages(5):
        ours.step(model, average)
        delta = 0.6 * delta + (average - theirs)
        theirs = theirs + delta
        torch.testing.assert_close(model, theirs, rtol=1e-13, atol=1e-13)


def test_plain_needs_none() -> None:
    assert build(ReduceSettings(), ranks=4) is None
