"""Attention over packed sequences against one sequence at a time in float64, and against padded rows."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline.core.errors import Conflict, InvalidData
from paceline.layers import Packing, packed_attention
from paceline.speed.layers.kernels.ways import MEASURED, using
from paceline.speed.layers.packed_attention import SequencesDiffer
from tests.recipes.speech.kernels.quartznet.separable import distance

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


@settings(max_examples=25)
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
    with pytest.raises(InvalidData, match="`key` has 6 tokens, but its packing 7"):
        packed_attention(inputs[0], inputs[1][:6], inputs[2], packing)
    with pytest.raises(Conflict, match="causal attention looks back"):
        packed_attention(*inputs, packing, key_packing=Packing.of([4, 3]), is_causal=True)
    with pytest.raises(SequencesDiffer, match="`key_packing` has 1 sequence, but the packing 2"):
        packed_attention(*inputs, packing, key_packing=Packing.of([7]))
    rows = torch.zeros(3, 5)
    with pytest.raises(SequencesDiffer, match="the tensor has 3 sequences, but the packing 2"):
        packing.pack(rows)
    with pytest.raises(InvalidData, match="rows have room for 3 tokens, but a sequence has 4"):
        packing.pack(rows[:2, :3])
    assert Packing.of([4, 3], longest=9).pack(rows[:2]).shape == (7,)


@pytest.fixture
def kernels(interpreted: None) -> Any:
    from paceline.speed.layers.kernels import packed_rows

    return packed_rows


@pytest.mark.parametrize(
    ("sizes", "keys", "is_causal"),
    [([3, 7, 1, 16], None, True), ([3, 5, 2], [9, 1, 0], False), ([70, 5], None, True), ([70, 30], [10, 81], False)],
    ids=["one block, causal", "one block, other keys", "blocks, causal", "blocks, other keys"],
)
def test_kernels(
    kernels: Any, sizes: list[int], keys: list[int] | None, is_causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In fp32, where the interpreter multiplies exactly; with an empty sequence at the end, as graphs have them."""
    monkeypatch.setattr(kernels, "LARGEST", 64)  # then more than 64 tokens are several blocks
    packing, others = Packing.of(sizes), Packing.of(keys or sizes)
    dice = torch.Generator().manual_seed(3)
    inputs = [torch.randn(of.num_tokens, 2, 16, generator=dice) for of in (packing, others, others)]
    exact = [each.double().requires_grad_() for each in inputs]
    expected = packed_attention(*exact, packing, key_packing=None if keys is None else others, is_causal=is_causal)
    g = torch.randn(expected.shape, generator=dice)
    offsets = [F.pad(of.offsets, (0, 2), value=of.num_tokens) for of in (packing, others)]
    given = *offsets, max(packing.longest, others.longest), is_causal, 0.25
    out, logs = kernels.forward(*inputs, *given)
    assert distance(out, expected.detach()) < 1e-6
    found = [torch.full_like(each, torch.nan) for each in inputs]
    kernels.backward(g, *inputs, out, logs, *found, *given)
    for one, other in zip(found, torch.autograd.grad(expected, exact, g.double()), strict=True):
        assert distance(one, other) < 1e-6


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("is_ours", [False, True], ids=["torch", "ours"])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("sizes", [[17, 1, 30], [70, 1, 33, 128], [300, 20, 7]], ids=str)
def test_on_a_gpu_against_float64(sizes: list[int], is_causal: bool, is_ours: bool) -> None:
    """Forward and backward, and the same bits whatever lies beside a sequence."""
    dice = torch.Generator().manual_seed(5)
    inputs = [torch.randn(sum(sizes), 4, 64, generator=dice).bfloat16() for _ in range(3)]
    packing, longest = Packing.of(sizes).to("cuda"), max(sizes)
    leaves = [each.cuda().requires_grad_() for each in inputs]
    with using(replace(MEASURED, packed=is_ours)):
        found = packed_attention(*leaves, packing, is_causal=is_causal)
        first = [each.cuda()[: sizes[0]] for each in inputs]
        alone = packed_attention(*first, Packing.of(sizes[:1], longest).to("cuda"), is_causal=is_causal)
    assert torch.equal(alone, found[: sizes[0]])
    rows = [packing.unpack(each.cuda().double()).transpose(1, 2).requires_grad_() for each in inputs]
    mask = packing.mask()[:, None, None, :]
    if is_causal:
        mask = mask & torch.ones(longest, longest, dtype=torch.bool, device="cuda").tril()
    expected = packing.pack(F.scaled_dot_product_attention(*rows, mask).transpose(1, 2))
    assert distance(found.detach(), expected.detach()) < 5e-3
    g = torch.randn(found.shape, generator=dice).bfloat16().cuda()
    ours = torch.autograd.grad(found, leaves, g)
    for one, other in zip(ours, torch.autograd.grad(expected, rows, g.double()), strict=True):
        assert distance(one, packing.pack(other.transpose(1, 2))) < 1e-2
