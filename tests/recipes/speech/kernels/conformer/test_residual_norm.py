"""Dropout, residual, layer norms and swish of rows: functions against autograd, kernels against float64."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.recipes.speech.kernels.conformer import residual_norm
from paceline.speed.layers.kernels.row_norm import factor, threshold
from tests.recipes.speech.kernels.quartznet.separable import distance

EPS, SCALE = 1e-5, 0.5
BF16 = 4e-3
TRUNCATED = 2.4e-2
"""Triton's interpreter cuts bfloat16 off where hardware rounds."""


class Case(NamedTuple):
    """Inputs, and gradients of the outputs."""

    x: Tensor
    residual: Tensor | None
    norms: list[tuple[Tensor, Tensor]]
    seed: Tensor | None
    g: Tensor
    g_more: Tensor | None

    def to(self, dtype: torch.dtype, device: str = "cpu") -> Case:
        wide = torch.float64 if dtype is torch.float64 else torch.float32
        norms = [(weight.to(device, wide), bias.to(device, wide)) for weight, bias in self.norms]
        x, residual, g, g_more = (
            None if each is None else each.to(device, dtype) for each in (self.x, self.residual, self.g, self.g_more)
        )
        assert x is not None
        assert g is not None
        return Case(x, residual, norms, None if self.seed is None else self.seed.to(device), g, g_more)


def make_case(rows: int, width: int, *, num: int, dropout: bool, residual: bool, more: bool) -> Case:
    dice = torch.Generator().manual_seed(rows)
    seed = torch.randint(-(2**31), 2**31 - 1, (2,), generator=dice, dtype=torch.int32) if dropout else None
    x, other, g, g_more = (torch.randn(1, rows, width, generator=dice).bfloat16() for _ in range(4))
    norms = [(torch.randn(width, generator=dice), torch.randn(width, generator=dice)) for _ in range(num)]
    return Case(x, other if residual else None, norms, seed, g, g_more if more else None)


def plainly(case: Case, dropout: float) -> tuple[list[Tensor], list[Tensor | None]]:
    """All outputs, and gradients of x, residual, and of each norm's weight and bias."""
    x = case.x.clone().requires_grad_()
    residual = None if case.residual is None else case.residual.clone().requires_grad_()
    norms = [(weight.clone().requires_grad_(), bias.clone().requires_grad_()) for weight, bias in case.norms]
    total = SCALE * x
    if case.seed is not None:
        total = total * residual_norm.kept(case.seed, x.shape, dropout) * factor(dropout)
    if residual is not None:
        total = total + residual
    outs = [total]
    for weight, bias in norms:
        outs.append(F.layer_norm(outs[-1], total.shape[-1:], weight, bias, EPS))
    above = [outs[-1]] if case.g_more is None else [outs[-1], outs[-2]]
    gradients = [case.g] if case.g_more is None else [case.g, case.g_more]
    leaves = [x, *([] if residual is None else [residual]), *(each for norm in norms for each in norm)]
    found: list[Tensor | None] = list(torch.autograd.grad(above, leaves, gradients))
    if residual is None:
        found.insert(1, None)
    return [each.detach() for each in outs], found


def check(case: Case, dropout: float, expected: tuple[list[Tensor], list[Tensor | None]], allowed: float) -> None:
    outs, gradients = expected
    total, moments, *normed = residual_norm.forward(case.x, case.residual, case.norms, case.seed, dropout, SCALE, EPS)
    for found, wanted in zip((total, *normed), outs, strict=True):
        assert distance(found, wanted) < allowed
    width = case.x.shape[-1]
    count = 1 + 2 * len(case.norms)
    # Columns of a wider matrix; rows and columns beside them belong to others.
    parts = torch.full((residual_norm.GROUPS, count * width + 3), float("nan"), device=case.x.device).to(moments.dtype)
    of_x, of_residual = residual_norm.backward(
        case.g, case.g_more, total, moments, case.norms, case.seed, dropout, SCALE, case.residual is not None,
        parts[:, : count * width],
    )  # fmt: skip
    assert gradients[0] is not None
    assert distance(of_x, gradients[0]) < 2 * allowed
    assert (of_residual is None) == (gradients[1] is None)
    if of_residual is not None and gradients[1] is not None:
        assert distance(of_residual, gradients[1]) < 2 * allowed
    assert parts[:, count * width :].isnan().all()
    sums = parts[:, : count * width].sum(0).view(count, width)
    assert distance(sums[2], gradients[0].sum((0, 1))) < 2 * allowed
    for row, wanted in zip((0, 1, 3, 4), gradients[2:], strict=False):
        assert wanted is not None
        assert distance(sums[row], wanted) < 2 * allowed


def check_swish(case: Case, dropout: float, allowed: float) -> None:
    exact = case.to(torch.float64, case.x.device.type)
    x = exact.x.clone().requires_grad_()
    expected = F.silu(x)
    if case.seed is not None:
        expected = expected * residual_norm.kept(case.seed, x.shape, dropout) * factor(dropout)
    (wanted,) = torch.autograd.grad(expected, x, exact.g)
    assert distance(residual_norm.swish(case.x, case.seed, dropout), expected.detach()) < allowed
    width = case.x.shape[-1]
    wide = torch.promote_types(case.x.dtype, torch.float32)
    parts = torch.full((residual_norm.GROUPS, 2 * width), float("nan"), dtype=wide, device=case.x.device)
    found = residual_norm.swish_backward(case.g, case.x, case.seed, dropout, parts[:, :width])
    assert distance(found, wanted) < allowed
    assert distance(parts[:, :width].sum(0), wanted.sum((0, 1))) < allowed
    residual_norm.column_sums(case.g, parts[:, width:])
    assert distance(parts[:, width:].sum(0), exact.g.sum((0, 1))) < allowed


CASES = [
    {"num": 1, "dropout": True, "residual": True, "more": True},
    {"num": 2, "dropout": True, "residual": True, "more": True},
    {"num": 1, "dropout": False, "residual": False, "more": False},
    {"num": 2, "dropout": False, "residual": True, "more": False},
]


@pytest.mark.parametrize("kind", CASES, ids=str)
def test_functions_are_what_autograd_says(kind: dict[str, Any]) -> None:
    case = make_case(7, 12, **kind).to(torch.float64)
    check(case, 0.3, plainly(case, 0.3), 1e-10)
    check_swish(case, 0.3, 1e-10)


@pytest.fixture
def _through_kernels(interpreted: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The functions call kernels on a CPU as they do on a GPU."""
    from paceline.recipes.speech.kernels.conformer import residual_rows

    monkeypatch.setattr(residual_rows, "GROUPS", 3)
    monkeypatch.setattr(residual_norm, "GROUPS", 3)

    def forward(x: Tensor, residual: Any, norms: Any, seed: Any, dropout: float, scale: float, eps: float) -> Any:
        times = scale * (factor(dropout) if seed is not None else 1.0)
        return residual_rows.forward(x, residual, norms, seed, threshold(dropout), times, eps)

    def backward(
        g: Tensor, more: Any, total: Any, moments: Any, norms: Any, seed: Any, dropout: float, scale: float,
        has: bool, parts: Any,
    ) -> Any:  # fmt: skip
        times = scale * (factor(dropout) if seed is not None else 1.0)
        return residual_rows.backward(g, more, total, moments, norms, seed, threshold(dropout), times, has, parts)

    def swish(x: Tensor, seed: Any, dropout: float) -> Any:
        return residual_rows.swish(x, seed, threshold(dropout), factor(dropout) if seed is not None else 1.0)

    def swish_backward(g: Tensor, x: Tensor, seed: Any, dropout: float, parts: Any) -> Any:
        times = factor(dropout) if seed is not None else 1.0
        return residual_rows.swish_backward(g, x, seed, threshold(dropout), times, parts)

    for function in (forward, backward, swish, swish_backward):
        monkeypatch.setattr(residual_norm, function.__name__, function)
    monkeypatch.setattr(residual_norm, "column_sums", residual_rows.column_sums)


@pytest.mark.usefixtures("_through_kernels")
@pytest.mark.parametrize("kind", CASES, ids=str)
def test_kernels(kind: dict[str, Any]) -> None:
    case = make_case(37, 44, **kind)
    exact = plainly(case.to(torch.float64), 0.3)
    check(case, 0.3, exact, TRUNCATED)
    check_swish(case, 0.3, TRUNCATED)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("shape", [(4001, 256), (7, 512), (999, 176), (1, 2048)], ids=str)
@pytest.mark.parametrize("kind", CASES, ids=str)
def test_on_a_gpu_against_float64(shape: tuple[int, int], kind: dict[str, Any]) -> None:
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        made = make_case(*shape, **kind)
        case = made.to(torch.bfloat16, "cuda")
        check(case, 0.3, plainly(made.to(torch.float64, "cuda"), 0.3), BF16)
        check_swish(case, 0.3, BF16)
    finally:
        torch.use_deterministic_algorithms(False)
