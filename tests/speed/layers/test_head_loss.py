"""Head and loss in chunks against PyTorch's own parts in float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.core.errors import InvalidData, InvalidSetting
from paceline.layers import LinearCrossEntropy, linear_cross_entropy
from paceline.speed.layers.head_loss import _head_loss
from paceline.speed.layers.kernels.ways import MEASURED, using

TOKENS, WIDTH, VOCABULARY, IGNORED = (3, 7), 8, 29, 1


def case(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden, weight, bias and target of which some do not count."""
    dice = torch.Generator().manual_seed(0)
    hidden, weight, bias = (
        torch.randn(shape, generator=dice, dtype=torch.float64).to(dtype).requires_grad_()
        for shape in ((*TOKENS, WIDTH), (VOCABULARY, WIDTH), (VOCABULARY,))
    )
    target = torch.randint(0, VOCABULARY, TOKENS, generator=dice)
    target[0, 3:] = IGNORED
    return hidden, weight, bias, target


def plainly(hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, smoothing: float) -> Tensor:
    logits = F.linear(hidden, weight, bias).flatten(0, 1)
    return F.cross_entropy(logits, target.flatten(), ignore_index=IGNORED, reduction="sum", label_smoothing=smoothing)


@pytest.mark.parametrize("chunk", [1, 4, 21, None])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("has_bias", [True, False])
def test_loss_and_gradients_are_float64s(chunk: int | None, smoothing: float, has_bias: bool) -> None:
    for dtype, allowed in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        hidden, weight, bias, target = case(dtype)
        leaves = [hidden, weight, *([bias] if has_bias else [])]
        total, count = linear_cross_entropy(
            hidden,
            weight,
            target,
            bias=bias if has_bias else None,
            label_smoothing=smoothing,
            ignore_index=IGNORED,
            chunk=chunk,
        )
        assert int(count) == int((target != IGNORED).sum())
        found = torch.autograd.grad(3.0 * total, leaves)
        exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
        expected = plainly(exact[0], exact[1], exact[2] if has_bias else None, target, smoothing)
        assert total.item() == pytest.approx(expected.item(), rel=allowed)
        for one, other in zip(found, torch.autograd.grad(3.0 * expected, exact), strict=True):
            assert one.dtype == dtype
            torch.testing.assert_close(one.double(), other, rtol=allowed, atol=10 * allowed)


def test_autocasts_dtype_and_sums_of_fp32() -> None:
    """bf16 products, float32 gradients of float32 weights, as close as PyTorch's own parts under autocast."""
    hidden, weight, _, target = case(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        total, _ = linear_cross_entropy(hidden, weight, target, ignore_index=IGNORED, chunk=5)
    ours = torch.autograd.grad(total, [hidden, weight])
    exact = [each.detach().double().requires_grad_() for each in (hidden, weight)]
    expected = plainly(*exact, None, target, 0.0)
    assert total.dtype == torch.float32
    assert total.item() == pytest.approx(expected.item(), rel=5e-3)
    for one, other in zip(ours, torch.autograd.grad(expected, exact), strict=True):
        assert one.dtype == torch.float32
        torch.testing.assert_close(one.double(), other, rtol=0.05, atol=0.05)


def test_a_module_with_the_weights_of_an_embedding() -> None:
    embedding = torch.nn.Embedding(VOCABULARY, WIDTH)
    head = LinearCrossEntropy(WIDTH, VOCABULARY, label_smoothing=0.1, ignore_index=IGNORED)
    assert list(head.state_dict()) == ["weight"]
    head.weight = embedding.weight
    hidden, _, _, target = case(torch.float32)
    total, _ = head(hidden, target)
    total.backward()
    logits = head.logits(hidden)
    assert logits.shape == (*TOKENS, VOCABULARY)
    assert total.item() == pytest.approx(plainly(hidden, embedding.weight, None, target, 0.1).item(), rel=1e-5)
    assert embedding.weight.grad is not None
    with torch.no_grad():
        assert torch.equal(head(hidden, target)[0], total)


def test_only_what_is_wanted_has_a_gradient() -> None:
    hidden, weight, bias, target = case(torch.float64)
    total, _ = linear_cross_entropy(hidden.detach(), weight, target, bias=bias.detach())
    (found,) = torch.autograd.grad(total, [weight])
    assert found.shape == weight.shape
    assert not linear_cross_entropy(hidden.detach(), weight.detach(), target)[0].requires_grad


def test_nothing_counts() -> None:
    hidden, weight, _, target = case(torch.float64)
    total, count = linear_cross_entropy(hidden, weight, torch.full_like(target, IGNORED), ignore_index=IGNORED)
    assert (total.item(), int(count)) == (0.0, 0)
    assert not torch.autograd.grad(total, [weight])[0].any()


def test_autocast_leaves_float64_alone() -> None:
    """As PyTorch's own layers do."""
    hidden, weight, _, target = case(torch.float64)
    with torch.autocast("cpu", torch.bfloat16):
        total, _ = linear_cross_entropy(hidden, weight, target, ignore_index=IGNORED)
        expected = plainly(hidden, weight, None, target, 0.0)
    assert total.dtype == expected.dtype == torch.float64
    assert total.item() == pytest.approx(expected.item(), rel=1e-12)


def test_one_token_without_a_batch() -> None:
    hidden, weight, _, _ = case(torch.float64)
    label = torch.tensor(2)
    total, count = linear_cross_entropy(hidden[0, 0], weight, label)
    assert total.item() == pytest.approx(F.cross_entropy(F.linear(hidden[0, 0], weight), label).item())
    assert int(count) == 1


def test_mistakes_are_told() -> None:
    hidden, weight, _, target = case(torch.float32)
    for labels, number in ((target[:, :-1], "18 labels"), (target[:1, :1], "1 label")):
        with pytest.raises(InvalidData, match=f"`hidden` has 21 tokens, but `target` {number}"):
            linear_cross_entropy(hidden, weight, labels)
    for chunk in (0, -1):
        with pytest.raises(InvalidSetting, match=f"`chunk` is {chunk}"):
            linear_cross_entropy(hidden, weight, target, chunk=chunk)
    with pytest.raises(InvalidSetting, match="`label_smoothing` is 10.0"):
        linear_cross_entropy(hidden, weight, target, label_smoothing=10.0)


def test_operator_keeps_its_word() -> None:
    hidden, weight, bias, target = (each.detach() for each in case(torch.float32))
    flat: tuple[Any, ...] = hidden.flatten(0, 1), weight, bias, target.flatten(), torch.float32, 0.1, IGNORED, 4
    for wants in (True, False):
        torch.library.opcheck(_head_loss.overload, (*flat, wants), test_utils=("test_schema", "test_faketensor"))


@pytest.fixture
def kernel(interpreted: None, monkeypatch: pytest.MonkeyPatch) -> Any:
    from paceline.speed.layers.kernels import score_rows

    monkeypatch.setattr(score_rows, "BLOCK", 8)  # several to a row
    return score_rows


@pytest.mark.parametrize("has_gradients", [True, False])
def test_kernel(kernel: Any, has_gradients: bool) -> None:
    dice = torch.Generator().manual_seed(2)
    scores = torch.randn(6, VOCABULARY, generator=dice)
    target = torch.tensor([1, 0, VOCABULARY - 1, IGNORED, 2, IGNORED])
    exact = scores.double().requires_grad_()
    wanted = F.cross_entropy(exact, target, ignore_index=IGNORED, label_smoothing=0.1, reduction="none")
    losses, before = torch.full((6,), torch.nan), scores.clone()
    kernel.cross_entropy(scores, target, losses, 0.1, IGNORED, has_gradients)
    torch.testing.assert_close(losses.double(), wanted.detach())
    expected = torch.autograd.grad(wanted.sum(), exact)[0] if has_gradients else before.double()
    torch.testing.assert_close(scores.double(), expected)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("is_fused", [False, True])
def test_on_a_gpu_against_float64(is_fused: bool) -> None:
    dice = torch.Generator().manual_seed(4)
    hidden, weight = torch.randn(500, 64, generator=dice), torch.randn(10_007, 64, generator=dice) / 4
    target = torch.randint(0, 10_007, (500,), generator=dice)
    target[::7] = 0
    exact = [each.bfloat16().double().requires_grad_() for each in (hidden, weight)]
    expected = F.cross_entropy(exact[0] @ exact[1].T, target, ignore_index=0, label_smoothing=0.1, reduction="sum")
    leaves = [each.cuda().requires_grad_() for each in (hidden, weight)]
    with torch.autocast("cuda", torch.bfloat16), using(replace(MEASURED, scores=is_fused)):
        total, _ = linear_cross_entropy(*leaves, target.cuda(), label_smoothing=0.1, ignore_index=0, chunk=200)
    assert total.item() == pytest.approx(expected.item(), rel=1e-3)
    found = torch.autograd.grad(total, leaves)
    for one, other in zip(found, torch.autograd.grad(expected, exact), strict=True):
        assert float((one.double().cpu() - other).norm() / other.norm()) < 1e-2
