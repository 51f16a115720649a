"""The convolution module between its products: functions against autograd, kernels against float64."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.recipes.speech.kernels.conformer import gated_conv
from tests.recipes.speech.kernels.quartznet.separable import distance

EPS = 1e-5
BF16 = 6e-3
TRUNCATED = 3e-2
"""Triton's interpreter cuts bfloat16 off where hardware rounds."""


class Case(NamedTuple):
    """Input, lengths, weights of convolution and batch norm, and a gradient of the output."""

    y: Tensor
    lengths: Tensor
    weight: Tensor
    bias: Tensor
    norm: tuple[Tensor, Tensor]
    g: Tensor

    def to(self, dtype: torch.dtype, device: str = "cpu") -> Case:
        wide = torch.float64 if dtype is torch.float64 else torch.float32
        weight, bias, *norm = (each.to(device, wide) for each in (self.weight, self.bias, *self.norm))
        return Case(
            self.y.to(device, dtype),
            self.lengths.to(device),
            weight,
            bias,
            (norm[0], norm[1]),
            self.g.to(device, dtype),
        )


def make_case(batch: int, time: int, channels: int, kernel: int) -> Case:
    dice = torch.Generator().manual_seed(time)
    lengths = torch.randint(1, time + 1, (batch,), generator=dice, dtype=torch.int32)
    y = torch.randn(batch, time, 2 * channels, generator=dice).bfloat16()
    weight = torch.randn(kernel, channels, generator=dice)
    bias, *norm = (torch.randn(channels, generator=dice) for _ in range(3))
    g = torch.randn(batch, time, channels, generator=dice).bfloat16()
    g = g * (torch.arange(time) < lengths[:, None])[..., None]
    return Case(y, lengths, weight, bias, (norm[0], norm[1]), g)


def plainly(case: Case, counts_all: bool) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """Output at frames that count, unbiased variance, gradients of y, weight, bias and the norm's weight and bias."""
    leaves = [each.clone().requires_grad_() for each in (case.y, case.weight, case.bias, *case.norm)]
    y, weight, bias, scale, shift = leaves
    kernel, channels = weight.shape
    held = (torch.arange(y.shape[1], device=y.device) < case.lengths[:, None])[..., None]
    u = F.glu(y, -1) * held
    z = F.conv1d(u.mT, weight.T[:, None], bias, padding=kernel // 2, groups=channels).mT
    counted = z.flatten(0, 1) if counts_all else z[held.squeeze(-1)]
    variance = counted.var(0)
    normed = (z - counted.mean(0)) * torch.rsqrt(counted.var(0, correction=0) + EPS) * scale + shift
    out = F.silu(normed) * held
    return out.detach(), variance.detach(), torch.autograd.grad(out, leaves, case.g)


def check(case: Case, counts_all: bool, exact: Case, allowed: float, module: Any = gated_conv) -> None:
    expected, variance, (of_y, of_weight, of_bias, of_scale, of_shift) = plainly(exact, counts_all)
    held = (torch.arange(case.y.shape[1], device=case.y.device) < case.lengths[:, None])[..., None]
    u = module.gate(case.y, case.lengths)
    z, affine, moments = module.depthwise(u, case.lengths, case.weight, case.bias, case.norm, EPS, counts_all)
    out = module.swished(z, affine)
    assert out.isfinite().all()
    assert distance(out * held, expected) < allowed
    assert distance(moments[2], variance) < allowed
    of_z, sums = module.norm_backward(case.g, z, affine, moments, case.lengths, counts_all)
    assert distance(sums[0], of_shift) < 2 * allowed
    assert distance(sums[1] * moments[1], of_scale) < 2 * allowed
    kernel, channels = case.weight.shape
    from paceline.recipes.speech.kernels.conformer import residual_norm

    wide = torch.promote_types(case.y.dtype, torch.float32)
    parts = torch.full((residual_norm.GROUPS, (kernel + 3) * channels), float("nan"), dtype=wide, device=case.y.device)
    module.taps_backward(of_z, u, case.lengths, kernel, parts[:, : kernel * channels])
    found = module.depthwise_backward(of_z, case.y, case.lengths, case.weight, parts[:, kernel * channels :])
    assert distance(found, of_y) < 2 * allowed
    columns = parts.sum(0).view(kernel + 3, channels)
    assert distance(columns[:kernel], of_weight) < 2 * allowed
    # A batch norm takes away what a bias adds: its gradient is zero, but for rounding.
    assert (columns[kernel] - of_bias).abs().max() < allowed * of_weight.abs().max()
    assert distance(columns[kernel + 1 :].flatten(), of_y.sum((0, 1))) < 2 * allowed


@pytest.mark.parametrize("counts_all", [False, True])
def test_functions_are_what_autograd_says(counts_all: bool) -> None:
    case = make_case(3, 17, 6, 5).to(torch.float64)
    check(case, counts_all, case, 1e-10)


@pytest.mark.parametrize(("shape", "counts_all"), [((3, 37, 24, 9), False), ((1, 16, 16, 11), True)], ids=str)
def test_kernels(
    interpreted: None, monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int, int, int], counts_all: bool
) -> None:
    from paceline.recipes.speech.kernels.conformer import gated_rows, residual_norm

    monkeypatch.setattr(gated_rows, "GROUPS", 3)
    monkeypatch.setattr(residual_norm, "GROUPS", 3)
    case = make_case(*shape)
    check(case, counts_all, case.to(torch.float64), TRUNCATED, gated_rows)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("shape", [(5, 209, 256, 9), (1, 33, 512, 31), (2, 40, 176, 9)], ids=str)
@pytest.mark.parametrize("counts_all", [False, True])
def test_on_a_gpu_against_float64(shape: tuple[int, int, int, int], counts_all: bool) -> None:
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        made = make_case(*shape)
        check(made.to(torch.bfloat16, "cuda"), counts_all, made.to(torch.float64, "cuda"), BF16)
    finally:
        torch.use_deterministic_algorithms(False)
