from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from paceline.recipes.translation.data.packed import CollatePacked
from paceline.recipes.translation.data.pairs import Collate, Pair
from paceline.recipes.translation.network.scores import smoothed_loss
from paceline.recipes.translation.network.shape import SIZES, Shape
from paceline.recipes.translation.network.transformer import KNOWN_POSITIONS, Transformer, sinusoids, source_mask
from paceline.recipes.translation.text.vocabulary import PAD

SMALL = Shape(width=16, ffn_width=24, heads=4, encoder_layers=2, decoder_layers=3, dropout=0.0)


def sentences(*lengths: int, vocabulary: int = 20) -> torch.Tensor:
    """Return random tokens, padded."""
    rows = torch.randint(4, vocabulary, (len(lengths), max(lengths)))
    for row, length in enumerate(lengths):
        rows[row, length:] = PAD
    return rows


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
@pytest.mark.parametrize("norm", ["pre", "post"])
def test_equals_torchs_own_with_copied_weights(norm: str) -> None:
    torch.manual_seed(0)
    model = Transformer(replace(SMALL, norm=norm), 20).double()  # type: ignore[arg-type]
    reference = nn.Transformer(
        16, 4, 2, 3, 24, dropout=0.0, batch_first=True, norm_first=norm == "pre", dtype=torch.float64
    )
    reference.encoder.enable_nested_tensor = False
    own = {name: tensor for name, tensor in model.state_dict().items() if name.startswith(("encoder.", "decoder."))}
    assert {name: tensor.shape for name, tensor in own.items()} == {
        name: tensor.shape for name, tensor in reference.state_dict().items()
    }
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    reference.load_state_dict(model.state_dict(), strict=False)
    source, target = sentences(5, 3, 1), sentences(4, 6, 2)
    x, y = (torch.randn(*tokens.shape, 16, dtype=torch.float64, requires_grad=True) for tokens in (source, target))
    mask = source_mask(source)
    memory = model.encoder(x, mask)
    out = model.decoder(y, memory, mask)
    later = torch.ones(6, 6, dtype=torch.bool).triu(1)
    expected = reference(x, y, None, later, None, source == PAD, None, source == PAD)
    for row, length in enumerate((4, 6, 2)):
        torch.testing.assert_close(out[row, :length], expected[row, :length], rtol=1e-10, atol=1e-10)
    is_token = (target != PAD).unsqueeze(2)
    mine = torch.autograd.grad((out * is_token).square().sum(), [x, y, *model.decoder.parameters()])
    theirs = torch.autograd.grad((expected * is_token).square().sum(), [x, y, *reference.decoder.parameters()])
    for ours, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(ours, other, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("share", ["all", "target", "none"])
def test_writing_token_by_token_equals_the_whole(norm: str, share: str) -> None:
    torch.manual_seed(1)
    model = Transformer(replace(SMALL, norm=norm, share=share), 20).double().eval()  # type: ignore[arg-type]
    source, target = sentences(5, 2, 4), sentences(6, 6, 6)
    whole = model(source, target)
    state = model.begin(source)
    for place in range(6):
        torch.testing.assert_close(model.step(target[:, place], state), whole[:, place], rtol=1e-9, atol=1e-9)
    rows = torch.tensor([2, 0, 0])
    state = model.begin(source)
    model.step(target[:, 0], state)
    state.select(rows)
    torch.testing.assert_close(model.step(target[rows, 1], state), whole[rows, 1], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_packed_equals_padded(norm: str) -> None:
    """In fp32, to rounding: losses and all gradients."""
    torch.manual_seed(3)
    model = Transformer(replace(SMALL, norm=norm), 20)  # type: ignore[arg-type]
    numbers = np.random.default_rng(4)
    pairs = [
        Pair(*(numbers.integers(4, 20, length).astype(np.int32) for length in lengths))
        for lengths in [(5, 3), (1, 6), (4, 4)]
    ]
    gradients = []
    for collate in (Collate(), CollatePacked()):
        grain = collate(pairs)
        total = model(grain["source"], grain["target"], grain["truth"], 0.1, grain.get("packings"))
        gradients.append([total.detach(), *torch.autograd.grad(total, list(model.parameters()))])
    for padded, packed in zip(*gradients, strict=True):
        torch.testing.assert_close(packed, padded, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("share", ["all", "none"])
def test_loss_in_chunks_equals_the_loss_of_scores(share: str) -> None:
    torch.manual_seed(4)
    model = Transformer(replace(SMALL, share=share), 24)  # type: ignore[arg-type]
    source, target, truth = (sentences(5, 3, vocabulary=24) for _ in range(3))
    gradients = []
    for model.is_chunked in (False, True):
        total = model(source, target, truth, 0.1)
        gradients.append([total.detach(), *torch.autograd.grad(total, list(model.parameters()))])
    for plain, chunked in zip(*gradients, strict=True):
        torch.testing.assert_close(chunked, plain, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(total, smoothed_loss(model(source, target), truth, 0.1), rtol=1e-5, atol=1e-5)


def test_padding_changes_nothing() -> None:
    torch.manual_seed(2)
    model = Transformer(SMALL, 20).double().eval()
    source, target = sentences(3), sentences(4)
    wide = torch.nn.functional.pad(source, (0, 5), value=PAD), torch.nn.functional.pad(target, (0, 2), value=PAD)
    torch.testing.assert_close(model(*wide)[:, :4], model(source, target), rtol=1e-10, atol=1e-10)


def test_positions_beyond_those_that_are_known() -> None:
    torch.testing.assert_close(sinusoids(KNOWN_POSITIONS + 3, 16)[:KNOWN_POSITIONS], sinusoids(KNOWN_POSITIONS, 16))
    model = Transformer(SMALL, 20).eval()
    assert model(sentences(KNOWN_POSITIONS + 1), sentences(2)).shape == (1, 2, 20)


@pytest.mark.parametrize(
    ("size", "vocabulary", "millions"),
    # Vaswani et al. 2017 count 65 and 213 millions with a vocabulary of 37,000; Wu et al. 2021 2.6 with 9,712.
    [("base", 37_000, 65), ("big", 37_000, 213), ("tiny", 9_712, 2.6)],
)
def test_sizes_are_the_published_ones(size: str, vocabulary: int, millions: float) -> None:
    with torch.device("meta"):
        model = Transformer(SIZES["transformer", size], vocabulary)  # type: ignore[index]
    number = sum(parameter.numel() for parameter in model.parameters())
    assert number / 1e6 == pytest.approx(millions, rel=0.04)
