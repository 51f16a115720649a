"""Strided convolutions before a Conformer: kernels against autograd in float64."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.recipes.speech.kernels.conformer.subsampling import first, first_backward, second, second_backward
from tests.recipes.speech.kernels.quartznet.separable import distance

BF16 = 4e-3
TRUNCATED = 1.6e-2
"""Triton's interpreter cuts bfloat16 off where hardware rounds."""


class Case(NamedTuple):
    """Mels, an activation in the middle, lengths of the mels, weights, and gradients of both outputs."""

    mels: Tensor
    x: Tensor
    lengths: Tensor
    weight: Tensor
    depth: list[tuple[Tensor, Tensor]]
    gradients: list[Tensor]

    def to(self, dtype: torch.dtype, device: str = "cpu") -> Case:
        wide = torch.float64 if dtype is torch.float64 else torch.float32
        depth = [(weight.to(device, wide), bias.to(device, wide)) for weight, bias in self.depth]
        mels, x, weight, *gradients = (
            each.to(device, dtype) for each in (self.mels, self.x, self.weight, *self.gradients)
        )
        return Case(mels, x, self.lengths.to(device), weight, depth, gradients)


def make_case(batch: int, time: int, mels: int, channels: int) -> Case:
    dice = torch.Generator().manual_seed(time)
    lengths = torch.randint(1, time + 1, (batch,), generator=dice, dtype=torch.int32)
    lengths[0] = time
    weight = torch.randn(16, channels, generator=dice)
    weight[10:] = 0.0
    sizes = [(time, mels)]
    for _ in range(3):
        sizes.append(tuple((size + 1) // 2 for size in sizes[-1]))  # type: ignore[arg-type]
    depth = [(torch.randn(9, channels, generator=dice), torch.randn(channels, generator=dice)) for _ in range(2)]
    x = torch.randn(batch, *sizes[2], channels, generator=dice)
    gradients = [torch.randn(batch, *size, channels, generator=dice).bfloat16() for size in sizes[2:]]
    heard = torch.randn(batch, mels, time, generator=dice)
    return Case(heard.bfloat16(), x.bfloat16(), lengths, weight.bfloat16(), depth, gradients)


def held(x: Tensor, lengths: Tensor) -> Tensor:
    return x * (torch.arange(x.shape[2], device=x.device) < lengths[:, None])[:, None, :, None]


def plainly(case: Case) -> tuple[list[Tensor], list[Tensor]]:
    """Both outputs, and gradients of all weights and of the activation in the middle, by autograd."""
    leaves = [each.clone().requires_grad_() for each in (case.weight, *case.depth[0], case.x, *case.depth[1])]
    weight, *depth, x, weight_2, bias_2 = leaves
    channels = weight.shape[1]
    lengths = [case.lengths]
    for _ in range(3):
        lengths.append((lengths[-1] + 1) // 2)

    def depthwise(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.conv2d(x, weight.T.reshape(channels, 1, 3, 3), bias, stride=2, padding=1, groups=channels)

    heard = held(case.mels.mT[:, None], lengths[0])
    h = F.conv2d(heard, weight[:9].T.reshape(channels, 1, 3, 3), weight[9], stride=2, padding=1)
    out = held(depthwise(held(h.relu(), lengths[1]), *depth), lengths[2]).permute(0, 2, 3, 1)
    inner = held(x.permute(0, 3, 1, 2).relu(), lengths[2])
    out_2 = held(depthwise(inner, weight_2, bias_2), lengths[3]).permute(0, 2, 3, 1)
    found = torch.autograd.grad([out, out_2], leaves, case.gradients)
    return [out.detach(), out_2.detach()], list(found)


def check(case: Case, functions: tuple[Any, ...], expected: tuple[list[Tensor], list[Tensor]], allowed: float) -> None:
    one, one_back, two, two_back = functions
    outs, gradients = expected
    assert distance(one(case.mels, case.lengths, case.weight, *case.depth[0]), outs[0]) < allowed
    sums = one_back(case.gradients[0], case.mels, case.lengths, case.weight, case.depth[0][0])
    assert distance(sums[:10], gradients[0][:10]) < allowed
    assert distance(sums[16:25], gradients[1]) < allowed
    assert distance(sums[25], gradients[2]) < allowed
    assert distance(two(case.x, case.lengths, *case.depth[1]), outs[1]) < allowed
    of_x, sums = two_back(case.gradients[1], case.x, case.lengths, case.depth[1][0])
    assert distance(of_x, gradients[3]) < allowed
    assert distance(sums[:9], gradients[4]) < allowed
    assert distance(sums[9], gradients[5]) < allowed
    assert distance(sums[10], gradients[3].sum((0, 1, 2))) < allowed


FUNCTIONS = (first, first_backward, second, second_backward)


def test_functions_are_what_autograd_says() -> None:
    case = make_case(3, 21, 13, 4).to(torch.float64)
    check(case, FUNCTIONS, plainly(case), 1e-10)


@pytest.mark.parametrize("shape", [(3, 21, 13, 16), (1, 8, 16, 32)], ids=str)
def test_kernels(interpreted: None, monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int, int, int]) -> None:
    from paceline.recipes.speech.kernels.conformer import striding

    for name, value in (("PLACES", 16), ("PLACES_BACK", 16), ("PROGRAMS", 2), ("CHANNELS_BACK", 16)):
        monkeypatch.setattr(striding, name, value)
    case = make_case(*shape)
    functions = (striding.first, striding.first_backward, striding.second, striding.second_backward)
    check(case, functions, plainly(case.to(torch.float64)), TRUNCATED)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("shape", [(3, 333, 80, 256), (1, 57, 64, 128), (2, 9, 80, 512)], ids=str)
def test_on_a_gpu_against_float64(shape: tuple[int, int, int, int]) -> None:
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        made = make_case(*shape)
        case = made.to(torch.bfloat16, "cuda")
        check(case, FUNCTIONS, plainly(made.to(torch.float64, "cuda")), BF16)
        again = [first_backward(case.gradients[0], *case[0:1], *case[2:4], case.depth[0][0]) for _ in range(2)]
        assert torch.equal(*again)
    finally:
        torch.use_deterministic_algorithms(False)
