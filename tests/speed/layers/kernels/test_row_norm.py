"""Batch norm, sum, ReLU, dropout and mask of rows: the operator against autograd, its kernels against the operator."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.core.errors import TaskContract
from paceline.speed.layers.kernels.row_norm import (
    kept,
    kept_of_pairs,
    row_norm,
    row_norm_backward,
    short_factor,
    short_threshold,
    threshold,
)
from tests.recipes.speech.kernels.quartznet.separable import distance

SUMS, BF16 = 1e-5, 2e-3
TRUNCATED = 1.6e-2
"""Triton's interpreter cuts bfloat16 off where hardware rounds."""
EPS = 1e-3


class Case(NamedTuple):
    """Inputs of the operator, and a gradient of its output."""

    ys: list[Tensor]
    weights: list[Tensor]
    biases: list[Tensor]
    lengths: Tensor | None
    seed: Tensor | None
    g: Tensor

    def exact(self) -> Case:
        ys, weights, biases = ([each.double() for each in many] for many in self[:3])
        return Case(ys, weights, biases, self.lengths, self.seed, self.g.double())

    def side_by_side(self) -> Case:
        """All inputs but the first as parts of one tensor."""
        first, *others = self.ys
        parts = torch.cat(others, -1).split(first.shape[-1], -1) if others else ()
        return self._replace(ys=[first, *parts])

    def on(self, device: str) -> Case:
        moved = [[each.to(device) for each in many] for many in self[:3]]
        return Case(*moved, *(None if each is None else each.to(device) for each in self[3:]))


def make_case(
    num: int, shape: tuple[int, int, int], *, is_masked: bool = True, is_dropped: bool = True, level: float = 3.0
) -> Case:
    dice = torch.Generator().manual_seed(num)
    batch, time, channels = shape
    lengths = torch.randint(0, time + 1, (batch,), generator=dice, dtype=torch.int32)
    seed = torch.randint(-(2**31), 2**31 - 1, (2,), generator=dice, dtype=torch.int32)
    ys = [(torch.randn(shape, generator=dice) + level).bfloat16() for _ in range(num)]
    weights, biases = ([torch.randn(channels, generator=dice) for _ in range(num)] for _ in range(2))
    g = torch.randn(shape, generator=dice).bfloat16()
    return Case(ys, weights, biases, lengths if is_masked else None, seed if is_dropped else None, g)


def plainly(case: Case, dropout: float) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Output, gradients and variances by PyTorch's own parts."""
    leaves = [each.clone().requires_grad_() for many in case[:3] for each in many]
    num, channels = len(case.ys), case.g.shape[-1]
    total, variances = torch.zeros_like(case.g), []
    for y, weight, bias in zip(leaves[:num], leaves[num : 2 * num], leaves[2 * num :], strict=True):
        mean, variance = torch.zeros(channels).to(y), torch.zeros(channels).to(y)
        normed = F.batch_norm(y.flatten(0, 1), mean, variance, weight, bias, True, 1.0, EPS)
        total = total + normed.view_as(y)
        variances.append(variance)
    out = total.relu()
    if case.lengths is not None:
        out = out * (torch.arange(out.shape[1], device=out.device) < case.lengths[:, None])[..., None]
    if case.seed is not None:
        out = out * kept_of_pairs(case.seed, out.shape, dropout) * short_factor(dropout)
    return out.detach(), list(torch.autograd.grad(out, leaves, case.g)), variances


@pytest.mark.parametrize("num", [1, 3])
@pytest.mark.parametrize(("is_masked", "is_dropped"), [(True, True), (False, False)])
def test_operator_is_what_its_parts_are(num: int, is_masked: bool, is_dropped: bool) -> None:
    case = make_case(num, (3, 17, 8), is_masked=is_masked, is_dropped=is_dropped).exact()
    leaves = [[each.clone().requires_grad_() for each in many] for many in case[:3]]
    out, _, moments = row_norm(*leaves, case.lengths, case.seed, 0.3, EPS, False)
    expected, gradients, variances = plainly(case, 0.3)
    assert distance(out.detach(), expected) < 1e-12
    assert distance(moments[:, 2].detach(), torch.stack(variances)) < 1e-12
    for found, wanted in zip(torch.autograd.grad(out, sum(leaves, []), case.g), gradients, strict=True):
        assert distance(found, wanted) < 1e-10


@pytest.mark.parametrize(("num", "takes_places"), [(2, True), (4, True), (4, False)])
def test_gradients_of_inputs_side_by_side_take_their_places_if_they_may(num: int, takes_places: bool) -> None:
    case = make_case(num, (3, 17, 8)).exact().side_by_side()
    before = [y.clone() for y in case.ys]
    _, gradients, _ = plainly(case, 0.3)
    leaves = [[each.detach().requires_grad_() for each in many] for many in case[:3]]
    out, _, _ = row_norm(*leaves, case.lengths, case.seed, 0.3, EPS, takes_places)
    first = case.ys[0].clone()
    found = torch.autograd.grad(out, sum(leaves, []), case.g, retain_graph=True)
    for gradient, wanted in zip(found, gradients, strict=True):
        assert distance(gradient, wanted) < 1e-10
    is_there = [gradient.data_ptr() == y.data_ptr() for gradient, y in zip(found, case.ys, strict=False)]
    is_taken = takes_places and num > 2  # one alone fills its tensor
    assert is_there == [False] + [is_taken] * (num - 1)
    assert torch.equal(case.ys[0], first)
    assert all(map(torch.equal, case.ys, before)) != is_taken
    if is_taken:
        with pytest.raises(TaskContract, match="backward again"):
            torch.autograd.grad(out, sum(leaves, []), case.g)
    else:
        torch.autograd.grad(out, sum(leaves, []), case.g)


def test_no_gradient_of_gradients_that_take_places() -> None:
    case = make_case(3, (3, 17, 8)).exact().side_by_side()
    leaves = [[each.detach().requires_grad_() for each in many] for many in case[:3]]
    out, _, _ = row_norm(*leaves, case.lengths, case.seed, 0.3, EPS, True)
    with pytest.raises(TaskContract, match="backward again"):
        torch.autograd.grad(out, sum(leaves, []), case.g, create_graph=True)


def test_operators_keep_their_word() -> None:
    case = make_case(2, (2, 5, 8))
    leaves = [[each.clone().requires_grad_() for each in many] for many in case[:3]]
    torch.library.opcheck(row_norm.overload, (*leaves, case.lengths, case.seed, 0.3, EPS, False))
    out, affine, moments = row_norm(*case[:5], 0.3, EPS, False)
    given = (case.g, case.ys, out, affine, moments, case.lengths, 0.3)
    torch.library.opcheck(row_norm_backward.overload, given, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("dropout", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("kept", [kept, kept_of_pairs])
def test_dropout_is_fair(kept: Any, dropout: float) -> None:
    """As many as it should be, row by row and column by column, and others for another seed."""
    seeds = torch.tensor([[1, 2], [1, 3], [2, 2], [-1, 2**31 - 1]], dtype=torch.int32)
    masks = torch.stack([kept(seed, torch.Size((500, 400)), dropout) for seed in seeds]).double()
    deviation = (dropout * (1 - dropout)) ** 0.5
    for dims, count in (((1, 2), 200_000), ((1,), 500), ((2,), 400)):
        assert ((masks.mean(dims) - (1 - dropout)).abs() < 5.5 * deviation / count**0.5).all()  # of 4,000
    apart = (masks.flatten(1) - (1 - dropout)) / deviation
    correlation = apart @ apart.T / apart.shape[1] - torch.eye(4)
    assert correlation.abs().max() < 5 / 200_000**0.5
    along = (apart[:, 1:] * apart[:, :-1]).mean(1)
    assert along.abs().max() < 5 / 200_000**0.5
    assert 0 <= threshold(dropout) < 2**32


def test_pairs_of_an_odd_number_of_channels() -> None:
    """The last channel of a row has no neighbour; the next row begins with bits of its own."""
    seed = torch.tensor([3, 4], dtype=torch.int32)
    odd, even = (kept_of_pairs(seed, torch.Size((50, channels)), 0.5) for channels in (7, 8))
    assert torch.equal(odd, even[:, :7])


@pytest.mark.parametrize("dropout", [0.0, 0.1, 0.2, 0.5, 0.99999, 1.0])
def test_what_is_kept_is_as_much_as_before(dropout: float) -> None:
    share = short_threshold(dropout) / 2**16
    assert abs(share - dropout) <= 2**-16
    assert short_factor(dropout) * (1 - share) == pytest.approx(1.0, abs=1e-15)


@pytest.fixture
def kernels(interpreted: None, monkeypatch: pytest.MonkeyPatch) -> Any:
    from paceline.speed.layers.kernels import rows

    monkeypatch.setattr(rows, "MULTIPROCESSORS", 1)  # several tiles for each
    return rows


@pytest.mark.parametrize(
    ("num", "shape", "dropout"), [(1, (3, 70, 64), 0.3), (2, (2, 50, 80), 0.0), (4, (5, 9, 16), 0.6)], ids=str
)
def test_kernels(kernels: Any, num: int, shape: tuple[int, int, int], dropout: float) -> None:
    case = make_case(num, shape, is_masked=num != 2, is_dropped=dropout > 0, level=30.0).side_by_side()
    out, affine, moments = row_norm(*case[:5], dropout, EPS, False)
    scales, found = torch.empty_like(affine), torch.empty_like(moments)
    kernels.statistics(*case[:3], EPS, scales, found)
    assert distance(scales, affine) < SUMS
    assert distance(found, moments) < SUMS
    joined = kernels.join(case.ys, affine, case.lengths, case.seed, short_threshold(dropout), short_factor(dropout))
    assert distance(joined, out) < TRUNCATED
    assert torch.equal(joined == 0, out == 0)
    *expected, of_weights, of_biases = row_norm_backward(case.g, case.ys, out, affine, moments, case.lengths, dropout)
    gradients = [torch.empty_strided(y.shape, y.stride(), dtype=y.dtype) for y in case.ys] if num < 4 else case.ys
    found = kernels.join_backward(case.g, out, case.ys, affine, moments, case.lengths, short_factor(dropout), gradients)
    for of_norms, wanted in zip(found, (of_weights, of_biases), strict=True):
        assert distance(of_norms, wanted) < SUMS
    for gradient, wanted in zip(gradients, expected, strict=True):
        assert distance(gradient, wanted) < TRUNCATED


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("num", [1, 2, 3, 11])
@pytest.mark.parametrize("shape", [(3, 70, 64), (16, 333, 384), (1, 5, 40)], ids=str)
@pytest.mark.parametrize("is_beside", [False, True])
def test_on_a_gpu_against_float64(num: int, shape: tuple[int, int, int], is_beside: bool) -> None:
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        for dropout in (0.0, 0.3, 0.6):
            case = make_case(num, shape, is_masked=dropout != 0.3, is_dropped=dropout > 0).on("cuda")
            expected, gradients, variances = plainly(case.exact(), dropout)
            again, _, _ = row_norm(*case[:5], dropout, EPS, False)
            case = case.side_by_side() if is_beside else case
            leaves = [[each.detach().requires_grad_() for each in many] for many in case[:3]]
            out, _, moments = row_norm(*leaves, case.lengths, case.seed, dropout, EPS, is_beside)
            found = torch.autograd.grad(out, sum(leaves, []), case.g)
            rounding = distance(expected.bfloat16(), expected)  # of few numbers it may be more than usual
            assert distance(out.detach(), expected) <= max(BF16, 1.1 * rounding)
            assert distance(moments[:, 2].detach(), torch.stack(variances)) <= SUMS
            for gradient, wanted in zip(found, gradients, strict=True):
                assert distance(gradient, wanted) <= 2 * BF16
            assert torch.equal(again, out)
    finally:
        torch.use_deterministic_algorithms(False)
