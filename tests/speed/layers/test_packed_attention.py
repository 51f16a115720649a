"""Attention over packed sequences against one sequence at a time in float64, and against padded rows."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline.layers import Packing, packed_attention
from paceline.speed.layers.packed_attention import CausalAcross, PackingMisfit

HEADS, WIDTH = 2, 8


def drawn(number: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(number, HEADS, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(
        dtype
    )


def one_by_one(
    query: Tensor, key: Tensor, value: Tensor, lengths: list[int], keys: list[int], is_causal: bool
) -> Tensor:
    """Softmax of scores, written out."""
    parts = []
    of_keys = zip(key.split(keys), value.split(keys), strict=True)
    for q, (k, v) in zip(query.split(lengths), of_keys, strict=True):
        scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(WIDTH)
        if is_causal:
            scores = scores.masked_fill(~torch.ones(len(q), len(k)).tril().bool(), -math.inf)
        parts.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), v))
    return torch.cat(parts)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 7)), min_size=1, max_size=6))
def test_packed_is_one_by_one(sizes: list[tuple[int, int]]) -> None:
    lengths, others = [size for size, _ in sizes], [size for _, size in sizes]
    packing, memory = Packing.of(lengths), Packing.of(others)
    for of_keys, is_causal in ((lengths, False), (lengths, True), (others, False)):
        inputs = [drawn(sum(lengths), 1), drawn(sum(of_keys), 2), drawn(sum(of_keys), 3)]
        leaves = [each.clone().requires_grad_() for each in inputs]
        key_packing = memory if of_keys is others else None
        found = packed_attention(*leaves, packing, key_packing=key_packing, is_causal=is_causal)
        exact = [each.double().requires_grad_() for each in inputs]
        expected = one_by_one(*exact, lengths, of_keys, is_causal)
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)
        if len(found):
            g = drawn(len(found), 4)
            ours, theirs = torch.autograd.grad(found, leaves, g), torch.autograd.grad(expected, exact, g.double())
            for one, other in zip(ours, theirs, strict=True):
                torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-5)


def test_packed_is_padded() -> None:
    """fp32, to rounding: the rows of a padded batch under a mask."""
    lengths = [5, 9, 1]
    packing = Packing.of(torch.tensor(lengths))
    rows = [packing.unpack(drawn(15, seed)) for seed in range(3)]
    assert rows[0].shape == (3, 9, HEADS, WIDTH)
    mask = torch.arange(9) < torch.tensor(lengths)[:, None]
    padded = F.scaled_dot_product_attention(*(each.transpose(1, 2) for each in rows), mask[:, None, None, :])
    packed = packed_attention(*(packing.pack(each) for each in rows), packing)
    torch.testing.assert_close(packed, packing.pack(padded.transpose(1, 2)), rtol=1e-5, atol=1e-6)
    wider = F.pad(rows[0], (0, 0, 0, 0, 0, 4))  # rows that are padded to more than the longest
    assert torch.equal(packing.pack(wider), packing.pack(rows[0]))
    assert torch.equal(packing.mask(), mask)


@given(st.lists(st.integers(0, 6), max_size=6))
def test_packing_there_and_back(lengths: list[int]) -> None:
    packing = Packing.of(lengths)
    tokens = torch.arange(sum(lengths), dtype=torch.float32)
    rows = packing.unpack(tokens)
    assert torch.equal(packing.pack(rows), tokens)
    assert packing.offsets.tolist() == [sum(lengths[:number]) for number in range(len(lengths) + 1)]
    assert packing.offsets.dtype == torch.int32


def test_dropout_is_fair_and_mistakes_are_told() -> None:
    packing = Packing.of([4, 3])
    inputs = [drawn(7, seed) for seed in range(3)]
    torch.manual_seed(0)
    mean = torch.stack([packed_attention(*inputs, packing, dropout=0.3) for _ in range(4000)]).mean(0)
    torch.testing.assert_close(mean, packed_attention(*inputs, packing), atol=0.1, rtol=0.1)
    with pytest.raises(PackingMisfit, match="`key` has 6 tokens, but its packing 7"):
        packed_attention(inputs[0], inputs[1][:6], inputs[2], packing)
    with pytest.raises(CausalAcross):
        packed_attention(*inputs, packing, key_packing=Packing.of([4, 3]), is_causal=True)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("is_causal", [False, True])
def test_on_a_gpu_against_float64(is_causal: bool) -> None:
    """torch's varlen attention, forward and backward, and the same bits whatever lies beside a sequence."""
    lengths = [70, 1, 33, 128]
    dice = torch.Generator().manual_seed(5)
    inputs = [torch.randn(sum(lengths), 4, 64, generator=dice).bfloat16() for _ in range(3)]
    packing = Packing.of(lengths).to("cuda")
    leaves = [each.cuda().requires_grad_() for each in inputs]
    found = packed_attention(*leaves, packing, is_causal=is_causal)
    alone = [each.cuda()[:70] for each in inputs]
    assert torch.equal(packed_attention(*alone, Packing.of([70]).to("cuda"), is_causal=is_causal), found[:70])
    rows = [packing.unpack(each.cuda().double()).transpose(1, 2).requires_grad_() for each in inputs]
    mask = packing.mask()[:, None, None, :]
    if is_causal:
        mask = mask & torch.ones(128, 128, dtype=torch.bool, device="cuda").tril()
    expected = packing.pack(F.scaled_dot_product_attention(*rows, mask).transpose(1, 2))
    assert float((found.double() - expected).norm() / expected.norm()) < 5e-3
    g = torch.randn(found.shape, generator=dice).bfloat16().cuda()
    ours = torch.autograd.grad(found, leaves, g)
    for one, other in zip(ours, torch.autograd.grad(expected, rows, g.double()), strict=True):
        wanted = packing.pack(other.transpose(1, 2))
        assert float((one.double() - wanted).norm() / wanted.norm()) < 1e-2
