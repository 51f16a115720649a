"""Dropout, residual and layer norm: the operator against autograd, its kernels against the operator."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.layers import DropoutAddNorm, dropout_add_norm
from paceline.speed.layers.added_norm import added_norm, added_norm_backward
from paceline.speed.layers.kernels.row_norm import factor, kept, threshold
from tests.recipes.speech.kernels.quartznet.separable import distance

EPS = 1e-5


def case(rows: int, width: int, dtype: torch.dtype) -> tuple[list[Tensor], Tensor, list[Tensor]]:
    """x, shift, residual, weight, bias; a seed; gradients of both outputs."""
    dice = torch.Generator().manual_seed(rows + width)
    drawn = [torch.randn(rows, width, generator=dice) + 1.0 for _ in range(2)]
    shift, *affine = (torch.randn(width, generator=dice) for _ in range(3))
    seed = torch.randint(-(2**31), 2**31 - 1, (2,), generator=dice, dtype=torch.int32)
    gradients = [torch.randn(rows, width, generator=dice).to(dtype) for _ in range(2)]
    wide = torch.promote_types(dtype, torch.float32)
    x, residual = (each.to(dtype) for each in drawn)
    return [x, shift.to(wide), residual, *(each.to(wide) for each in affine)], seed, gradients


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("uses", ["both", "normed", "total"])
def test_operator_is_what_its_parts_are(dropout: float, uses: str) -> None:
    inputs, seed, gradients = case(7, 12, torch.float64)
    leaves = [each.clone().requires_grad_() for each in inputs]
    given = seed if dropout else None
    normed, total, _ = added_norm(*leaves, given, dropout, EPS)
    mask = kept(seed, leaves[0].shape, dropout) * factor(dropout) if dropout else 1.0
    wanted_total = leaves[2] + (leaves[0] + leaves[1]) * mask
    wanted = F.layer_norm(wanted_total, (12,), leaves[3], leaves[4], EPS)
    torch.testing.assert_close(normed, wanted)
    torch.testing.assert_close(total, wanted_total)
    chosen = {"both": [0, 1], "normed": [0], "total": [1]}[uses]
    ours = sum((each * gradients[n]).sum() for n, each in enumerate((normed, total)) if n in chosen)
    theirs = sum((each * gradients[n]).sum() for n, each in enumerate((wanted, wanted_total)) if n in chosen)
    found = torch.autograd.grad(ours, leaves, allow_unused=True)  # type: ignore[arg-type]
    expected = torch.autograd.grad(theirs, leaves, allow_unused=True)  # type: ignore[arg-type]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(torch.zeros(()).double() if one is None else one.sum(), _or_zero(other).sum())
        if one is not None and other is not None:
            torch.testing.assert_close(one, other)


def _or_zero(tensor: Tensor | None) -> Tensor:
    return torch.zeros(1, dtype=torch.float64) if tensor is None else tensor


def test_operators_keep_their_word() -> None:
    inputs, seed, gradients = case(5, 8, torch.float32)
    torch.library.opcheck(added_norm.overload, (*inputs, seed, 0.3, EPS), test_utils=("test_schema", "test_faketensor"))
    _, total, moments = added_norm(*inputs, seed, 0.3, EPS)
    given = (*gradients, total, moments, inputs[3], seed, 0.3)
    torch.library.opcheck(added_norm_backward.overload, given, test_utils=("test_schema", "test_faketensor"))


def test_plain_parts_where_there_is_no_kernel() -> None:
    """On a CPU PyTorch's own, from its generator: what a grain draws is keyed by the engine."""
    module = DropoutAddNorm(8, dropout=0.4)
    assert set(module.state_dict()) == set(torch.nn.LayerNorm(8).state_dict())
    x, residual = torch.randn(3, 5, 8), torch.randn(3, 5, 8)
    torch.manual_seed(3)
    normed, total = module(x, residual)
    torch.manual_seed(3)
    expected = residual + F.dropout(x, 0.4)
    assert torch.equal(total, expected)
    assert torch.equal(normed, F.layer_norm(expected, (8,)))
    module.eval()
    assert torch.equal(module(x, residual)[1], residual + x)
    assert torch.equal(
        dropout_add_norm(x, residual, module.weight, module.bias, dropout=0.5, training=False)[1], residual + x
    )


@pytest.fixture
def kernels(interpreted: None, monkeypatch: pytest.MonkeyPatch) -> Any:
    from paceline.speed.layers.kernels import added_rows

    monkeypatch.setattr(added_rows, "MOST_PROGRAMS", 3)  # several rows for each
    return added_rows


@pytest.mark.parametrize(
    ("rows", "width", "dropout", "has_total"), [(7, 64, 0.3, True), (10, 80, 0.0, False), (1, 33, 0.6, True)]
)
def test_kernels(kernels: Any, rows: int, width: int, dropout: float, has_total: bool) -> None:
    for dtype, allowed in ((torch.float32, 1e-5), (torch.bfloat16, 1.6e-2)):  # the interpreter cuts bfloat16 off
        inputs, seed, gradients = case(rows, width, dtype)
        given = seed if dropout else None
        least, scale = threshold(dropout), factor(dropout)
        normed, total, moments = added_norm(*inputs, given, dropout, EPS)
        found = kernels.forward(*inputs, given, least, scale, EPS)
        for one, other in zip(found, (normed, total, moments), strict=True):
            assert distance(one, other) < allowed
        further = gradients[1] if has_total else None
        expected = added_norm_backward(gradients[0], further, total, moments, inputs[3], given, dropout)
        ours = kernels.backward(gradients[0], further, total, moments, inputs[3], given, least, scale)
        for one, other in zip(ours, expected, strict=True):
            assert distance(one, other) < allowed
        if dropout:
            assert torch.equal(ours[0] == 0, expected[0] == 0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("shape", [(7, 64), (4000, 512), (513, 1024), (33, 80)], ids=str)
def test_on_a_gpu_against_float64(shape: tuple[int, int]) -> None:
    for dtype, allowed in ((torch.float32, 1e-5), (torch.bfloat16, 4e-3)):
        for dropout in (0.0, 0.3):
            inputs, seed, gradients = case(*shape, dtype)
            exact = [each.double().requires_grad_() for each in inputs]
            given = seed if dropout else None
            normed, total, _ = added_norm(*exact, given, dropout, EPS)
            expected = torch.autograd.grad([normed, total], exact, [each.double() for each in gradients])
            leaves = [each.cuda().requires_grad_() for each in inputs]
            ours = added_norm(*leaves, None if given is None else given.cuda(), dropout, EPS)
            found = torch.autograd.grad(ours[:2], leaves, [each.cuda() for each in gradients])
            assert distance(ours[0].detach().cpu(), normed.detach()) < allowed
            for one, other in zip(found, expected, strict=True):
                assert distance(one.cpu(), other) < 2 * allowed


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_residual_of_another_shape_is_left_to_torch() -> None:
    """One row for all, as a table of positions has it: the kernel reads a row of the residual for each of x."""
    x, residual = torch.randn(5000, 7, 64, device="cuda"), torch.randn(7, 64, device="cuda")
    weight, bias = torch.ones(64, device="cuda"), torch.zeros(64, device="cuda")
    normed, total = dropout_add_norm(x, residual, weight, bias)
    torch.testing.assert_close(total, x + residual)
    torch.testing.assert_close(normed, F.layer_norm(x + residual, (64,)))
