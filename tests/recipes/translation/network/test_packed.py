"""The Transformer without padding against the padded one: the same loss and gradients, in fp32 to rounding."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.recipes.translation.network.packed import PackedPairs, packed_loss
from paceline.recipes.translation.network.shape import Shape
from paceline.recipes.translation.network.transformer import Transformer
from paceline.recipes.translation.task import smoothed_loss
from paceline.recipes.translation.text.vocabulary import BEGIN, END, PAD

SHAPE = Shape(width=16, ffn_width=32, heads=2, encoder_layers=2, decoder_layers=2, dropout=0.0)
VOCABULARY = 40


def padded(lengths: list[tuple[int, int]]) -> tuple[Tensor, Tensor, Tensor]:
    """Sources, targets with begin marks, and what follows; padded further than the longest."""
    dice = torch.Generator().manual_seed(1)
    sizes = len(lengths), 2 + max(max(pair) for pair in lengths)
    source, target, truth = (torch.full(sizes, PAD) for _ in range(3))
    for row, (num_source, num_target) in enumerate(lengths):
        source[row, :num_source] = torch.randint(5, VOCABULARY, (num_source,), generator=dice)
        words = torch.randint(5, VOCABULARY, (num_target - 1,), generator=dice)
        target[row, :num_target] = torch.cat([torch.tensor([BEGIN]), words])
        truth[row, :num_target] = torch.cat([words, torch.tensor([END])])
    return source, target, truth


@pytest.mark.parametrize("changes", [{}, {"norm": "post"}, {"share": "none"}, {"share": "target"}], ids=str)
@pytest.mark.parametrize(("dtype", "allowed"), [(torch.float32, 2e-5), (torch.float64, 1e-11)])
def test_packed_is_padded(changes: Any, dtype: torch.dtype, allowed: float) -> None:
    torch.manual_seed(0)
    model = Transformer(replace(SHAPE, **changes), VOCABULARY).to(dtype)
    batch = padded([(7, 5), (1, 9), (11, 1), (4, 4)])
    expected = smoothed_loss(model(batch[0], batch[1]), batch[2], 0.1)
    wanted = torch.autograd.grad(expected, list(model.parameters()))
    pairs = PackedPairs.of(*batch)
    assert pairs.num_tokens == 23 + 19
    total, count = packed_loss(model, pairs, 0.1)
    assert int(count) == 19
    assert total.item() == pytest.approx(expected.item(), rel=allowed)
    for one, other in zip(torch.autograd.grad(total, list(model.parameters())), wanted, strict=True):
        assert float((one - other).norm()) <= allowed * max(1.0, float(other.norm()))


def test_dropout_is_drawn_from_torchs_generator() -> None:
    model = Transformer(replace(SHAPE, dropout=0.3, attention_dropout=0.1), VOCABULARY)
    pairs = PackedPairs.of(*padded([(7, 5), (3, 9)]))
    totals = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        totals.append(packed_loss(model, pairs)[0].item())
    assert totals[0] == totals[1] != totals[2]
