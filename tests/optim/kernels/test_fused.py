"""NovoGrad and LARC by kernels over many tensors, in Triton's interpreter, against torch's kernels and float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline.optim.clip import ClipNorm
from paceline.optim.kernels.pointers import KEPT, Tables, layout
from paceline.optim.larc import Larc, Rule
from paceline.optim.novograd import NovoGrad
from tests.optim.reference import NovoGradReference, follow, give, gradients, in_two_groups, snapshot, weights

pytest.importorskip("triton", reason="the kernels need Triton")
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the kernels run there")
pytestmark = interpreted
VARIANTS: list[dict[str, Any]] = [
    {},
    {"betas": (0.0, 0.5)},
    {"betas": (0.9, 0.5), "amsgrad": True, "grad_averaging": True, "eps": 0.1},
    {"luc": True, "luc_trust": 0.05},
]
RULES = [
    Rule("clip", 0.02),
    Rule("scale", 0.5, 1e-3, 0.01),
    Rule("clip", 0.5, 1e-8, 0.0, decay_inside=True, zero="skip"),
    Rule("scale", 0.02, decay_inside=True, exclude_vectors=True),
]


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_novograd_as_the_formulas_say(variant: dict[str, Any]) -> None:
    parameters = weights(torch.float32)
    optimizer = NovoGrad(in_two_groups(parameters, 0.02, 0.1), **variant, fused=True)
    assert optimizer.way == "Triton"
    options = {"betas": (0.95, 0.25), **variant}
    references = [
        NovoGradReference(lr=0.02, weight_decay=0.1, **options),
        NovoGradReference(lr=0.04, weight_decay=0.0, **options),
    ]
    assert follow(optimizer, parameters, references, 6) < 5e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)  # bfloat16: the interpreter cuts it off
def test_novograd_goes_on_from_the_state_of_torchs_kernels(dtype: torch.dtype) -> None:
    """Either way from the other's checkpoint; weights and state stay within rounding of each other."""
    ours, theirs = weights(dtype), weights(dtype)
    first = NovoGrad(in_two_groups(ours, 0.02, 0.1), fused=True)
    second = NovoGrad(in_two_groups(theirs, 0.02, 0.1), fused=False)
    assert second.way == "torch foreach"
    for step in range(5):
        for optimizer, parameters in ((first, ours), (second, theirs)):
            give(parameters, gradients(step, dtype))
            optimizer.step()
        if step == 2:
            first_state, second_state = first.state_dict(), second.state_dict()
            first.load_state_dict(second_state)
            second.load_state_dict(first_state)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)
        assert first.state[mine].keys() == second.state[other].keys()
        for name, value in first.state[mine].items():
            torch.testing.assert_close(value, second.state[other][name], rtol=1e-4, atol=1e-6)


def test_a_step_that_is_skipped_changes_no_bit() -> None:
    parameters = weights(torch.float32)
    optimizer = NovoGrad(parameters, lr=0.1, luc=True, amsgrad=True, fused=True)
    give(parameters, gradients(0, torch.float32))
    optimizer.step()
    before = snapshot(optimizer, parameters)
    optimizer.found_inf = torch.ones(1)  # type: ignore[attr-defined]
    give(parameters, [torch.full_like(parameter, torch.nan) for parameter in parameters])
    optimizer.step()
    assert snapshot(optimizer, parameters) == before


@pytest.mark.parametrize("with_larc", [False, True])
def test_the_rate_and_the_scale_may_be_on_the_device(with_larc: bool) -> None:
    """A rate that is filled anew is the one of the next step, as a captured graph needs it."""
    numbers, tensors = weights(torch.float32), weights(torch.float32)
    rate, scale = torch.tensor(0.5), 1.0 if with_larc else 8.0
    first, second = NovoGrad(numbers, lr=0.5, fused=True), NovoGrad(tensors, lr=rate, fused=True)
    if with_larc:
        Larc(first, Rule("clip", 0.02), fused=True)
        Larc(second, Rule("clip", 0.02), fused=True)
    else:
        second.grad_scale = torch.tensor(scale)  # type: ignore[attr-defined]
    for step, lr in enumerate((0.5, 0.03)):
        first.param_groups[0]["lr"] = lr
        rate.fill_(lr)
        give(numbers, gradients(2 * step, torch.float32))
        give(tensors, [None if each is None else each * scale for each in gradients(2 * step, torch.float32)])
        first.step()
        second.step()
    for one, other in zip(numbers, tensors, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_larc_as_torchs_kernels(rule: Rule, dtype: torch.dtype) -> None:
    ours, theirs = weights(dtype), weights(dtype)
    for parameters in (ours, theirs):
        parameters[1].detach().zero_()
    pair = [torch.optim.SGD(in_two_groups(each, 0.3, 0.05), momentum=0.9) for each in (ours, theirs)]
    larcs = [Larc(pair[0], rule, fused=True), Larc(pair[1], rule, fused=False)]
    for step in range(3):
        found = gradients(step, dtype)
        if step == 0:
            found[0] = torch.zeros_like(ours[0])
        for parameters, optimizer in zip((ours, theirs), pair, strict=True):
            give(parameters, [None if each is None else each.clone() for each in found])
            optimizer.step()
        for mine, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(mine, other, rtol=2 * torch.finfo(dtype).eps, atol=1e-7)
            torch.testing.assert_close(mine.grad, other.grad, rtol=2 * torch.finfo(dtype).eps, atol=1e-7)
        names = [{weight: str(index) for index, weight in enumerate(each)} for each in (ours, theirs)]
        rates = [larc.rates(each) for larc, each in zip(larcs, names, strict=True)]
        assert rates[0].keys() == rates[1].keys()
        assert rates[0] == pytest.approx(rates[1], rel=1e-5)


def test_tensors_of_many_chunks() -> None:
    """Norms over several programs, a last chunk that is not full, weights that lie at odd addresses."""
    shapes = [(3, 4096), (9001,), (5,), (4096,)]
    flat = torch.randn(sum(int(np.prod(shape)) for shape in shapes) + 1)[1:]
    begin, parameters, exact = 0, [], []
    for shape in shapes:
        size = int(np.prod(shape))
        piece = flat[begin : begin + size].view(shape)
        begin += size
        exact.append(piece.double().numpy().copy())
        parameters.append(torch.nn.Parameter(piece))
    optimizer = NovoGrad(parameters, lr=0.1, weight_decay=0.01, fused=True)
    references = [NovoGradReference(lr=0.1, betas=(0.95, 0.25), weight_decay=0.01) for _ in shapes]
    for _ in range(2):
        for index, parameter in enumerate(parameters):
            parameter.grad = torch.randn(parameter.shape)
            exact[index] = references[index].step(0, exact[index], parameter.grad.double().numpy())
        optimizer.step()
    for parameter, wanted in zip(parameters, exact, strict=True):
        np.testing.assert_allclose(parameter.detach().numpy(), wanted, rtol=1e-5, atol=1e-6)


def test_what_the_kernels_do_not_know_goes_through_torchs() -> None:
    """float64 keeps its digits; channels last keep their layout."""
    exact = torch.ones(3, dtype=torch.float64, requires_grad=True)
    turned = torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last).requires_grad_()
    optimizer = NovoGrad([exact, turned], lr=1e-9, fused=True)
    assert optimizer.way == "torch foreach"
    exact.grad, turned.grad = torch.ones_like(exact), torch.ones_like(turned)
    optimizer.step()
    assert float(exact.detach()[0]) == pytest.approx(1 - 1e-9 / 3**0.5, abs=1e-15)
    assert turned.is_contiguous(memory_format=torch.channels_last)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=20), st.integers(1, 16))
@settings(max_examples=50)
def test_chunks_cover_every_tensor_once(sizes: list[int], chunk: int) -> None:
    owners, numbers, firsts, own_sizes = layout(sizes, chunk)
    covered = [[] for _ in sizes]  # type: list[list[int]]
    for place, (owner, number) in enumerate(zip(owners.tolist(), numbers.tolist(), strict=True)):
        assert firsts[owner] <= place < firsts[owner + 1]
        covered[owner] += range(number * chunk, min((number + 1) * chunk, int(own_sizes[owner])))
    assert covered == [list(range(size)) for size in sizes]


def test_tables_are_made_anew_only_where_a_tensor_moved() -> None:
    tables, tensors = Tables(), [torch.zeros(3), torch.zeros(5)]
    first = tables.of([tensors], 4, [torch.float32])
    assert first is not None
    assert tables.of([tensors], 4, [torch.float32]) is first
    assert first.columns.tolist() == [[each.data_ptr() for each in tensors]]
    others: list[list[Tensor]] = [[torch.zeros(3), tensors[1]] for _ in range(KEPT)]
    assert len({id(tables.of([each], 4, [torch.float32])) for each in others}) == KEPT
    assert tables.of([tensors], 4, [torch.float32]) is not first  # the one not used for longest was given up
    smaller = [tensors[0][:2], tensors[1]]
    other = tables.of([smaller], 4, [torch.float32])
    assert other is not None
    assert other.sizes.tolist() == [2, 5]  # another tensor at the same place


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # numpy, of inf * 0 in the interpreter
@pytest.mark.parametrize("max_norm", [0.5, 1e6])
def test_clipping_is_torchs(max_norm: float) -> None:
    """Bitwise nothing where the norm is small enough; inf and nan as in torch."""
    clip = ClipNorm(max_norm, fused=True)
    for spoil in (1.0, torch.inf, torch.nan):
        gradients = [torch.randn(shape) for shape in [(5000,), (3, 4), (0,), (1,)]]
        gradients[1][0, 0] *= spoil
        ours, theirs = ([torch.nn.Parameter(torch.zeros_like(each)) for each in gradients] for _ in range(2))
        give([*ours, *theirs], [each.clone() for each in [*gradients, *gradients]])
        expected = torch.nn.utils.clip_grad_norm_(theirs, max_norm)
        norm = clip.norm([parameter.grad for parameter in ours if parameter.grad is not None])
        torch.testing.assert_close(norm, expected, equal_nan=True)
        clip.scale(ours, norm)
        for mine, other, old in zip(ours, theirs, gradients, strict=True):
            assert mine.grad is not None
            torch.testing.assert_close(mine.grad, other.grad, equal_nan=True)
            assert max_norm == 0.5 or spoil != 1.0 or torch.equal(mine.grad, old)
