"""QuartzNet and Jasper: blocks of masked convolutions over mel frames; and the parts that a network's settings ask for.

Lengths are exact: a stride of s leaves ceil(length / s) frames, and no output of an utterance depends on how far its
batch was padded. In training the batch statistics count padded frames as zeros, as in NeMo.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from paceline.recipes.speech.network.acoustic_encoder import AcousticEncoder
from paceline.recipes.speech.network.config import BlockSettings, NetworkSettings
from paceline.recipes.speech.network.conformer.encoder import ConformerEncoder
from paceline.recipes.speech.network.ctc_decoder import Decoder
from paceline.recipes.speech.network.frames import Frames, frames_of
from paceline.recipes.speech.network.separable import PlainConv, SeparableConv, batch_norm
from paceline.recipes.speech.network.transducer.decoder import Shares, TransducerDecoder

_INITIALIZERS: dict[str, Callable[[Tensor], Tensor]] = {
    "xavier_uniform": nn.init.xavier_uniform_,
    "xavier_normal": nn.init.xavier_normal_,
    "kaiming_uniform": partial(nn.init.kaiming_uniform_, nonlinearity="relu"),
    "kaiming_normal": partial(nn.init.kaiming_normal_, nonlinearity="relu"),
}


class Encoder(AcousticEncoder):
    """Features of mels to features of letters, at a lower rate."""

    def __init__(self, settings: NetworkSettings) -> None:
        super().__init__(settings)
        self.blocks = nn.ModuleList()
        chain: list[int] = []  # channels of the inputs of the dense blocks directly before
        for block, channels in zip(settings.blocks, settings.channels, strict=False):
            chain = [*chain, channels] if block.residual_dense else []
            self.blocks.append(Block(settings, block, channels, chain or [channels]))
        _initialize(self, settings.init_mode)

    def forward(self, features: Tensor, lengths: Tensor, capture: tuple[int, ...] = ()) -> tuple[Tensor, Tensor]:
        assert not capture, "blocks have widths of their own, so that no decoder reads them all"
        frames = frames_of(lengths, features.shape[-1])
        x = features
        chain: list[Tensor] = []
        for block, settings in zip(self.blocks, self.settings.blocks, strict=True):
            chain = [*chain, x] if settings.residual_dense else []
            x, frames = block(chain or [x], frames)
        return x, frames.lengths


class Block(nn.Module):
    """Sub-blocks in a row, and what is added to the last one before its activation."""

    def __init__(
        self, network: NetworkSettings, settings: BlockSettings, channels: int, residual_channels: Sequence[int]
    ) -> None:
        super().__init__()
        self.stride = settings.stride
        kind = SeparableConv if settings.separable else PlainConv
        self.layers = nn.ModuleList(
            kind(
                channels if number == 0 else settings.filters,
                settings,
                network.activation,
                is_masked=network.conv_mask,
                is_last=number == settings.repeat - 1,
            )
            for number in range(settings.repeat)
        )
        self.residuals = nn.ModuleList(
            Residual(width, settings.filters, is_masked=network.conv_mask)
            for width in residual_channels
            if settings.residual
        )

    def forward(self, inputs: Sequence[Tensor], frames: Frames) -> tuple[Tensor, Frames]:
        """`inputs` end with the block's own; those before it, of a dense block, are only added."""
        x, after = inputs[-1], frames.strided(self.stride)
        residual = self._residual(inputs, frames)
        last = len(self.layers) - 1
        for number, layer in enumerate(self.layers):
            # Only a block of one sub-block may have a stride.
            x = layer(x, frames, after, residual if number == last else None)
        return x, after

    def _residual(self, inputs: Sequence[Tensor], frames: Frames) -> Tensor | None:
        total: Tensor | None = None
        for residual, x in zip(self.residuals, inputs, strict=False):
            y = residual(x, frames)
            total = y if total is None else total + y
        return total


class Residual(nn.Module):
    """A block's input brought to the width of its output."""

    def __init__(self, channels: int, filters: int, *, is_masked: bool) -> None:
        super().__init__()
        self.is_masked = is_masked
        self.conv = nn.Conv1d(channels, filters, 1, bias=False)
        self.norm = batch_norm(filters)

    def forward(self, x: Tensor, frames: Frames) -> Tensor:
        if self.is_masked:
            x = frames.masked(x)
        y: Tensor = self.norm(self.conv(x))
        return y


def make_encoder(network: NetworkSettings) -> AcousticEncoder:
    """Return the encoder that the settings describe: a Conformer, or blocks of convolutions."""
    return Encoder(network) if network.conformer is None else ConformerEncoder(network)


def make_decoder(network: NetworkSettings, shares: Shares | None = None) -> Decoder | TransducerDecoder:
    """Return the decoder that the settings describe: for CTC, or a transducer with these shares of its loss."""
    channels, classes = network.channels[-1], network.num_classes
    if network.transducer is None:
        return Decoder(channels, classes)
    return TransducerDecoder(network.transducer, channels, classes, shares or Shares())


def weight_shapes(network: NetworkSettings) -> dict[str, torch.Size]:
    """Name and shape of everything that a model of this network keeps, without making it."""
    with torch.device("meta"):
        parts = {"encoder": make_encoder(network), "decoder": make_decoder(network)}
    return {
        f"{part}.{name}": tensor.shape for part, module in parts.items() for name, tensor in module.state_dict().items()
    }


def _initialize(module: nn.Module, mode: str) -> None:
    for layer in module.modules():
        if isinstance(layer, nn.Conv1d | nn.Linear):
            _INITIALIZERS[mode](layer.weight)
