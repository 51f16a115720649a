"""What a network costs, against torch's own count of what it does."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from paceline.recipes.speech.network.config import BlockSettings, NetworkSettings, read_network
from paceline.recipes.speech.network.encoder import Decoder, Encoder
from paceline.recipes.speech.network.flops import PASSES, training_flops

SMALL = NetworkSettings(
    blocks=(
        BlockSettings(filters=32, kernel=5, stride=2, separable=True),
        BlockSettings(filters=48, kernel=7, repeat=2, residual=True, separable=True, groups=2),
        BlockSettings(filters=40, kernel=3, repeat=2, residual=True, residual_dense=True),
        BlockSettings(filters=24, kernel=3, residual=True, residual_dense=True),
        BlockSettings(filters=16, kernel=9, dilation=2),
    )
)


@pytest.mark.parametrize("network", [SMALL, read_network("quartznet15x5")], ids=["small", "quartznet15x5"])
def test_the_forward_pass_is_what_torch_counts(network: NetworkSettings) -> None:
    frames = 64
    with torch.device("meta"):
        encoder, decoder = Encoder(network), Decoder(network.channels[-1], network.num_classes)
        features = torch.empty(1, network.features.num_mels, frames)
        lengths = torch.empty(1, dtype=torch.int64)
    with FlopCounterMode(display=False) as counted, torch.no_grad():
        decoder(encoder(features, lengths)[0])
    seconds = frames * network.features.stride_s
    assert training_flops(network) * seconds / PASSES == pytest.approx(counted.get_total_flops(), rel=1e-9)


def test_an_utterance_of_quartznet_costs_what_the_literature_says() -> None:
    assert training_flops(read_network("quartznet15x5")) * 16.7 == pytest.approx(94.4e9, rel=0.005)
