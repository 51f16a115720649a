"""Cost of training an acoustic network: multiplications and additions of its convolutions, per second of audio."""

from __future__ import annotations

import math

from paceline.recipes.speech.head import head_of
from paceline.recipes.speech.network.config import BlockSettings, NetworkSettings
from paceline.recipes.speech.network.conformer.settings import KERNEL, ConformerSettings
from paceline.recipes.speech.network.frames import strided_length
from paceline.recipes.speech.text.pieces import are_subwords

PASSES = 3
"""Forward, and backward for the inputs and for the weights, which cost about as much each."""

ATTENTION_S = 10.0
"""Length of an utterance whose attention is counted; those of LibriSpeech have 12 seconds on average."""


CHARACTERS_PER_S, SUBWORDS_PER_S = 15.0, 6.0
"""Labels that are spoken in a second, about: of a transducer's scores there are as many as frames times labels."""


def training_flops(network: NetworkSettings) -> float:
    """Return the operations per second of audio; the front end, norms and the loss are left out, as is usual."""
    if network.conformer is not None:
        return PASSES * (_conformer(network, network.conformer) + _decoder(network))
    frames_per_s = 1 / network.features.stride_s
    total = 0.0
    chain: list[int] = []  # channels of the inputs of the dense blocks directly before
    for block, channels in zip(network.blocks, network.channels, strict=False):
        chain = [*chain, channels] if block.residual_dense else []
        residuals = (chain or [channels]) if block.residual else []
        frames_per_s /= block.stride
        per_frame = _layers(block, channels) + sum(2 * width * block.filters for width in residuals)
        total += frames_per_s * per_frame
    return PASSES * (total + _decoder(network))


def _decoder(network: NetworkSettings) -> float:
    """Return the operations of a forward pass of the head per second of audio."""
    many = 1 << 20
    rate = network.output_length(many) / many / network.features.stride_s
    labels = SUBWORDS_PER_S if are_subwords(network.labels) else CHARACTERS_PER_S
    return head_of(network).flops(rate, labels, ATTENTION_S)


def _conformer(network: NetworkSettings, conformer: ConformerSettings) -> float:
    """Return the operations of a forward pass per second of audio. Attention over the utterance, whose cost per frame
    grows with its length, is counted for `ATTENTION_S` seconds."""
    rate, mels = 1 / network.features.stride_s, network.features.num_mels
    channels, width = conformer.conv_channels, conformer.d_model
    total = 0.0
    for number in range(conformer.num_strides):
        rate, mels = rate / 2, strided_length(mels, 2)
        taps, inputs = KERNEL**2, 1 if number == 0 else channels
        is_separable = conformer.subsampling == "dw_striding" and number > 0
        total += rate * mels * 2 * channels * (taps + inputs if is_separable else taps * inputs)
    total += rate * 2 * channels * mels * width
    seen = min(_window(conformer), rate * ATTENTION_S)
    is_relative = conformer.self_attention_model != "abs_pos"
    # Feed-forward modules, projections, products with keys, values and positions, gate, convolution, product.
    layer = 2 * 2 * 2 * width * conformer.d_ff + 4 * 2 * width * width + (3 if is_relative else 2) * 2 * seen * width
    layer += 2 * 2 * width * width + 2 * conformer.conv_kernel_size * width + 2 * width * width
    return total + rate * conformer.n_layers * layer


def _window(conformer: ConformerSettings) -> float:
    """Return the frames that one sees, as far as attention spares the others."""
    if conformer.self_attention_model != "rel_pos_local_attn":
        return math.inf
    return 2 * conformer.att_context_size[0][0] + 1


def _layers(block: BlockSettings, channels: int) -> float:
    """Return the operations of all sub-blocks per output frame."""
    total = 0.0
    for number in range(block.repeat):
        width = channels if number == 0 else block.filters
        over_channels = 2 * width * block.filters / block.groups
        total += 2 * block.kernel * width + over_channels if block.separable else block.kernel * over_channels
    return total
