from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from paceline.recipes.translation.network.lstm import Lstm, TwoWays, turn
from paceline.recipes.translation.network.shape import Shape
from paceline.recipes.translation.text.vocabulary import PAD
from tests.recipes.translation.network.test_transformer import sentences

SMALL = Shape("lstm", width=12, heads=1, encoder_layers=2, decoder_layers=3, dropout=0.0)


def test_two_ways_equal_torchs_bidirectional_layer() -> None:
    torch.manual_seed(0)
    layer = TwoWays(12).double()
    reference = nn.LSTM(12, 6, batch_first=True, bidirectional=True, dtype=torch.float64)
    for name, parameter in layer.named_parameters():
        way, _, weight = name.partition(".")
        nn.init.normal_(parameter)
        reference.get_parameter(weight + ("_reverse" if way == "back" else "")).data.copy_(parameter.data)
    lengths = torch.tensor([5, 2, 4])
    x = torch.randn(3, 5, 12, dtype=torch.float64)
    is_token = torch.arange(5) < lengths.unsqueeze(1)
    out = layer(x, turn(is_token))
    packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
    expected, _ = pad_packed_sequence(reference(packed)[0], batch_first=True)
    torch.testing.assert_close(out[is_token], expected[is_token], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("share", ["all", "none"])
def test_writing_token_by_token_equals_the_whole(layers: int, share: str) -> None:
    torch.manual_seed(1)
    model = Lstm(replace(SMALL, decoder_layers=layers, share=share), 20).double().eval()  # type: ignore[arg-type]
    source, target = sentences(5, 2, 4), sentences(6, 6, 6)
    whole = model(source, target)
    state = model.begin(source)
    for place in range(3):
        torch.testing.assert_close(model.step(target[:, place], state), whole[:, place], rtol=1e-9, atol=1e-9)
    rows = torch.tensor([2, 0, 0])
    state.select(rows)
    torch.testing.assert_close(model.step(target[rows, 3], state), whole[rows, 3], rtol=1e-9, atol=1e-9)


def test_padding_changes_nothing() -> None:
    torch.manual_seed(2)
    model = Lstm(SMALL, 20).double().eval()
    source, target = sentences(3), sentences(4)
    wide = torch.nn.functional.pad(source, (0, 5), value=PAD), torch.nn.functional.pad(target, (0, 2), value=PAD)
    torch.testing.assert_close(model(*wide)[:, :4], model(source, target), rtol=1e-10, atol=1e-10)
