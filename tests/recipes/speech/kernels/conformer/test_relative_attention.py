"""Attention with relative positions: the functions against autograd, the kernels against the functions."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from paceline.recipes.speech.kernels.conformer.relative_attention import attend, attend_backward, places_backward
from paceline.recipes.speech.kernels.conformer.residual_norm import kept
from paceline.speed.layers.kernels.row_norm import factor, threshold
from tests.recipes.speech.kernels.quartznet.separable import distance

BF16 = 8e-3
TRUNCATED = 5e-2
"""Triton's interpreter cuts bfloat16 off where hardware rounds, here three times in a row."""


class Case(NamedTuple):
    """Inputs, and a gradient of the output."""

    qkv: Tensor
    p: Tensor
    bias_u: Tensor
    bias_v: Tensor
    lengths: Tensor
    seed: Tensor | None
    g: Tensor
    heads: int

    def to(self, dtype: torch.dtype, device: str = "cpu") -> Case:
        floats = [each.to(device, dtype) for each in (self.qkv, self.p, self.bias_u, self.bias_v)]
        seed = None if self.seed is None else self.seed.to(device)
        return Case(*floats, self.lengths.to(device), seed, self.g.to(device, dtype), self.heads)


def make_case(
    batch: int, time: int, heads: int, head: int, *, dropout: bool = True, lengths: list[int] | None = None
) -> Case:
    dice = torch.Generator().manual_seed(batch + time)
    width = heads * head
    qkv = torch.randn(batch, time, 3 * width, generator=dice).bfloat16()
    p = torch.randn(2 * time - 1, 2 * width, generator=dice).bfloat16()[:, width:]
    biases = [torch.randn(width, generator=dice) for _ in range(2)]
    drawn = torch.randint(1, time + 1, (batch,), generator=dice, dtype=torch.int32)
    if lengths is not None:
        drawn = torch.tensor(lengths, dtype=torch.int32)
    seed = torch.randint(-(2**31), 2**31 - 1, (2,), generator=dice, dtype=torch.int32) if dropout else None
    g = torch.randn(batch, time, width, generator=dice).bfloat16()
    # Nothing reads what is behind a length; there a gradient is zero.
    g = g * (torch.arange(time) < drawn[:, None])[..., None]
    return Case(qkv, p, *biases, drawn, seed, g, heads)


def plainly(case: Case, dropout: float) -> tuple[Tensor, tuple[Tensor, ...]]:
    """As NeMo computes it: pad, view and cut to shift the scores by position."""
    leaves = [each.detach().clone().requires_grad_() for each in case[:4]]
    qkv, p, u, v = leaves
    batch, time, _ = qkv.shape
    q, k, values = qkv.unflatten(2, (3, case.heads, -1)).unbind(2)
    by_content = ((q + u.view(case.heads, -1)).transpose(1, 2)) @ k.permute(0, 2, 3, 1)
    by_place = ((q + v.view(case.heads, -1)).transpose(1, 2)) @ p.unflatten(1, (case.heads, -1)).permute(1, 2, 0)
    padded = torch.nn.functional.pad(by_place, (1, 0))
    shifted = padded.view(batch, case.heads, 2 * time, time)[:, :, 1:].reshape(by_place.shape)[..., :time]
    scores = (by_content + shifted) * q.shape[-1] ** -0.5
    held = torch.arange(time, device=qkv.device) < case.lengths[:, None]
    seen = (held[:, None] & held[..., None])[:, None]
    shares = torch.softmax(scores.masked_fill(~seen, -10000.0), -1).masked_fill(~seen, 0.0)
    if case.seed is not None:
        shares = shares * kept(case.seed, shares.shape, dropout) * factor(dropout)
    out = (shares @ values.transpose(1, 2)).transpose(1, 2).flatten(2)
    return out.detach(), torch.autograd.grad(out, leaves, case.g)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_functions_are_what_autograd_says(dropout: float) -> None:
    case = make_case(3, 11, 2, 4, dropout=dropout > 0, lengths=[11, 1, 6]).to(torch.float64)
    out, *saved = attend(*case[:6], dropout, case.heads)
    expected, gradients = plainly(case, dropout)
    assert distance(out, expected) < 1e-12
    of_qkv, of_biases, slopes = attend_backward(case.g, *case[:6], dropout, case.heads, out, *saved)
    of_p = places_backward(slopes, case.qkv, case.bias_v, case.lengths, case.heads)
    for found, wanted in zip((of_qkv, of_p, *of_biases), gradients, strict=True):
        assert distance(found, wanted) < 1e-10


@pytest.fixture
def kernels(interpreted: None, monkeypatch: pytest.MonkeyPatch) -> Any:
    from paceline.recipes.speech.kernels.conformer import relative

    small = {name: relative.Tile(16, 32) for name in relative.TILES}
    monkeypatch.setattr(relative, "TILES", {**small, "places": relative.Tile(32, 16)})
    monkeypatch.setattr(relative, "PROGRAMS", 12)
    monkeypatch.setattr(relative, "LEAST_PARTS", 1)
    return relative


@pytest.mark.parametrize(
    ("batch", "time", "heads", "head", "dropout"), [(3, 37, 2, 16, 0.3), (1, 16, 1, 11, 0.0), (2, 5, 2, 16, 0.1)]
)
def test_kernels(kernels: Any, batch: int, time: int, heads: int, head: int, dropout: float) -> None:
    case = make_case(batch, time, heads, head, dropout=dropout > 0)
    exact = case.to(torch.float64)
    expected, gradients = plainly(exact, dropout)
    least, times = threshold(dropout), factor(dropout)
    out, *saved = kernels.forward(*case[:6], least, times, heads)
    assert distance(out, expected) < TRUNCATED
    of_qkv, of_biases, slopes = kernels.backward(case.g, *case[:6], least, times, heads, out, *saved)
    of_p = kernels.backward_places(slopes, case.qkv, case.bias_v, case.lengths, heads)
    for found, wanted in zip((of_qkv, of_p, *of_biases), gradients, strict=True):
        assert distance(found, wanted) < TRUNCATED


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("shape", [(3, 209, 4, 64), (1, 64, 8, 64), (5, 333, 4, 44), (2, 5, 1, 16)], ids=str)
@pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS")  # in autograd's thread, before it has a CUDA context
def test_on_a_gpu_against_float64(shape: tuple[int, int, int, int]) -> None:
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        for dropout in (0.0, 0.2):
            made = make_case(*shape, dropout=dropout > 0)
            case = made.to(torch.bfloat16, "cuda")._replace(bias_u=made.bias_u.cuda(), bias_v=made.bias_v.cuda())
            expected, gradients = plainly(made.to(torch.float64, "cuda"), dropout)
            out, *saved = attend(*case[:6], dropout, case.heads)
            assert distance(out, expected) < BF16
            of_qkv, of_biases, slopes = attend_backward(case.g, *case[:6], dropout, case.heads, out, *saved)
            of_p = places_backward(slopes, case.qkv, case.bias_v, case.lengths, case.heads)
            for found, wanted in zip((of_qkv, of_p, *of_biases), gradients, strict=True):
                assert distance(found, wanted) < 2 * BF16
            assert torch.equal(attend(*case[:6], dropout, case.heads)[0], out)
    finally:
        torch.use_deterministic_algorithms(False)
