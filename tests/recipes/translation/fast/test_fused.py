"""The Transformer without padding, by our operators, against the plain one on padded rows."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from paceline.data.grain import map_tensors
from paceline.recipes.translation.data.packed import CollatePacked, PackedLadder, PackedShape
from paceline.recipes.translation.data.pairs import Collate, Pair
from paceline.recipes.translation.fast import fused
from paceline.recipes.translation.network.shape import Shape
from paceline.recipes.translation.network.transformer import Transformer
from paceline.recipes.translation.text.vocabulary import PAD
from paceline.speed.layers.kernels.ways import MEASURED, using

SHAPE = Shape(width=16, ffn_width=32, heads=2, encoder_layers=2, decoder_layers=2, dropout=0.0)
VOCABULARY = 40


def sentences(sizes: list[tuple[int, int]]) -> list[Pair]:
    dice = np.random.default_rng(1)
    return [Pair(*(dice.integers(5, VOCABULARY, size).astype(np.int32) for size in pair)) for pair in sizes]


LARGE = PackedLadder(shapes=(PackedShape(96, 64, 16, 32),))
"""More padding than sentences."""
PAIRS = sentences([(7, 5), (1, 9), (11, 1), (4, 4)])


@pytest.mark.parametrize("changes", [{}, {"norm": "post"}, {"share": "none"}, {"share": "target"}], ids=str)
@pytest.mark.parametrize(("dtype", "allowed"), [(torch.float32, 2e-5), (torch.float64, 1e-11)])
@pytest.mark.parametrize("collate", [CollatePacked(), PackedLadder(), LARGE])
def test_packed_is_padded(changes: Any, dtype: torch.dtype, allowed: float, collate: Any) -> None:
    torch.manual_seed(0)
    model = Transformer(replace(SHAPE, **changes), VOCABULARY).to(dtype)
    padded, packed = Collate()(PAIRS), collate(PAIRS)
    expected = model(padded["source"], padded["target"], padded["truth"], 0.1)
    wanted = torch.autograd.grad(expected, list(model.parameters()))
    assert int((packed["truth"] != PAD).sum()) == int((padded["truth"] != PAD).sum())
    given = [packed[name] for name in ("source", "target", "truth")]
    for total in (
        fused.packed_loss(model, *given, 0.1, packed["packings"], dtype),
        model(*given, 0.1, packed["packings"]),
    ):
        assert total.item() == pytest.approx(expected.item(), rel=allowed)
        for one, other in zip(torch.autograd.grad(total, list(model.parameters())), wanted, strict=True):
            assert float((one - other).norm()) <= allowed * max(1.0, float(other.norm()))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("changes", [{}, {"norm": "post"}, {"share": "none"}, {"heads": 4, "width": 128}], ids=str)
@pytest.mark.parametrize("has_kernels", [True, False])
def test_on_a_gpu_against_float64(changes: Any, has_kernels: bool) -> None:
    torch.manual_seed(0)
    shape = replace(SHAPE, **{"width": 64, "ffn_width": 128, **changes})
    model = Transformer(shape, VOCABULARY)
    pairs = sentences([(7, 5), (40, 39), (11, 1), (4, 4), (30, 31)])
    padded, packed = Collate()(pairs), PackedLadder()(pairs)
    exact = copy.deepcopy(model).double()
    expected = exact(padded["source"], padded["target"], padded["truth"], 0.1)
    wanted = torch.autograd.grad(expected, list(exact.parameters()))
    model.cuda()
    assert not fused.accelerate(model)
    given = [packed[name].cuda() for name in ("source", "target", "truth")]
    packings = map_tensors(torch.Tensor.cuda, packed["packings"])
    way = replace(MEASURED, packed=has_kernels, scores=has_kernels)
    with torch.autocast("cuda", torch.bfloat16), using(way):
        totals = [model(*given, 0.1, packings) for _ in range(2)]
    assert totals[0].item() == pytest.approx(expected.item(), rel=5e-3)
    found, again = (torch.autograd.grad(total, list(model.parameters())) for total in totals)
    for one, other, more in zip(found, wanted, again, strict=True):
        assert one.dtype == torch.float32
        assert torch.equal(one, more)  # nothing depends on what ran first
        # 45 tokens through a narrow network: under autocast the plain one is off by 5 %, too
        assert float((one.double().cpu() - other).norm()) <= 0.1 * float(other.norm()) + 1e-3
