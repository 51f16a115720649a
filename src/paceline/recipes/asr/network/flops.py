"""Cost of training an acoustic network: multiplications and additions of its convolutions, per second of audio."""

from __future__ import annotations

from paceline.recipes.asr.network.config import BlockSettings, NetworkSettings

PASSES = 3
"""Forward, and backward for the inputs and for the weights, which cost about as much each."""


def training_flops(network: NetworkSettings) -> float:
    """Return the operations per second of audio; the front end, norms and the loss are left out, as is usual."""
    frames_per_s = 1 / network.features.stride_s
    total = 0.0
    chain: list[int] = []  # channels of the inputs of the dense blocks directly before
    for block, channels in zip(network.blocks, network.channels, strict=False):
        chain = [*chain, channels] if block.residual_dense else []
        residuals = (chain or [channels]) if block.residual else []
        frames_per_s /= block.stride
        per_frame = _layers(block, channels) + sum(2 * width * block.filters for width in residuals)
        total += frames_per_s * per_frame
    return PASSES * (total + frames_per_s * 2 * network.channels[-1] * network.num_classes)


def _layers(block: BlockSettings, channels: int) -> float:
    """Return the operations of all sub-blocks per output frame."""
    total = 0.0
    for number in range(block.repeat):
        width = channels if number == 0 else block.filters
        over_channels = 2 * width * block.filters / block.groups
        total += 2 * block.kernel * width + over_channels if block.separable else block.kernel * over_channels
    return total
