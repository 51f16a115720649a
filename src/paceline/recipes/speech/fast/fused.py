"""Training an encoder of separable convolutions through our own kernels: same parameters, same state dict, other way.

Activations travel as (channel, batch, time), rows padded to 16 frames, in bfloat16; batch norm, ReLU and length mask
are applied by whoever reads them next. Evaluation, and whatever is not bfloat16 autocast, goes the plain way.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import MethodType
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.core.torch_private import BatchNorm, foreach_copy_
from paceline.core.units import counted
from paceline.recipes.speech.fast.running import Seen, track
from paceline.recipes.speech.kernels import tiles
from paceline.recipes.speech.kernels.quartznet import ops
from paceline.recipes.speech.kernels.quartznet.joining import join
from paceline.recipes.speech.kernels.tiles import padded_frames
from paceline.recipes.speech.network.config import BlockSettings
from paceline.recipes.speech.network.encoder import Block, Encoder, Residual
from paceline.recipes.speech.network.frames import frames_of, strided_length
from paceline.recipes.speech.network.separable import BATCH_NORM_MOMENTUM, PlainConv, SeparableConv
from paceline.speed.autotune.choice import CannotRun
from paceline.speed.layers.kernels import ways


def accelerate(encoder: Encoder) -> list[str]:
    """Train through the kernels from now on; or leave the encoder as it is and return every reason why."""
    reasons = obstacles(encoder)
    if not reasons:
        encoder.forward = MethodType(_forward, encoder)  # type: ignore[method-assign]
    return reasons


def restore(encoder: Encoder) -> None:
    """Train through the plain modules again."""
    encoder.__dict__.pop("forward", None)


def obstacles(encoder: Encoder) -> list[str]:
    """Return what of this network the kernels cannot do."""
    reasons = []
    if encoder.settings.activation != "relu":
        reasons.append(f"activation {encoder.settings.activation}: the kernels know relu")
    for number, settings in enumerate(encoder.settings.blocks):
        reasons += [f"block {number}: {reason}" for reason in _block_obstacles(settings)]
    for name, module in encoder.named_modules():
        if isinstance(module, BatchNorm) and type(module) is not nn.BatchNorm1d:
            reasons.append(f"{name} is a {type(module).__name__}")
        elif isinstance(module, nn.BatchNorm1d) and module.momentum != BATCH_NORM_MOMENTUM:
            reasons.append(f"{name} has momentum {module.momentum}")
    return reasons


def _block_obstacles(settings: BlockSettings) -> Iterator[str]:
    if not settings.separable and settings.kernel * settings.stride > 1:
        yield f"kernel {settings.kernel} over all channels at once, not separable"
    if settings.groups > 1:
        yield f"{settings.groups} groups of channels"
    if settings.se:
        yield "squeeze and excite"
    if settings.dropout > 0:
        yield f"dropout {settings.dropout}"
    if settings.residual_dense:
        yield "residuals of several blocks"
    if settings.filters % 16:
        yield f"{settings.filters} filters, no multiple of 16"
    if settings.stride not in (1, 2, 4):
        yield f"stride {settings.stride}"


Matrices = dict[nn.Conv1d, Tensor]
"""Weights of the products over channels: (filter, channel), in the dtype of the activations."""


class Signal(NamedTuple):
    """Tensors that go from block to block."""

    values: Tensor
    """(channel, batch, row) bfloat16: activations, or raw values whose batch norm is still to be applied."""
    affine: Tensor | None
    moments: Tensor | None
    lengths: Tensor
    """(batch,) int32."""
    frames: int
    tiles: Tensor | None
    """Those that utterances reach, for products over channels: see `ops.listed`."""

    def activated(self) -> Signal:
        """Return the signal with activations in full."""
        if self.affine is None or self.moments is None:
            return self
        values = join(self.values, self.affine, self.moments, None, None, None, self.lengths, None, None)
        return self._replace(values=values, affine=None, moments=None)

    def unpacked(self, order: Tensor | None) -> Tensor:
        """(batch, channel, frames): activations as everybody else has them, utterance `i` at place `order[i]`."""
        if self.affine is None or self.moments is None:
            values = self.values[..., : self.frames].transpose(0, 1)
            return values if order is None else values[torch.argsort(order)]
        out: Tensor = join(self.values, self.affine, self.moments, None, None, None, self.lengths, self.frames, order)
        return out


def _forward(self: Encoder, features: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    if not self.trains_in_bfloat16(features.device):
        return Encoder.forward(self, features, lengths)
    return encode(self, features.to(torch.bfloat16), lengths)


def encode(encoder: Encoder, features: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """The encoder's training pass, in the dtype of its features: bfloat16, or float64 to check it on a CPU."""
    frames = features.shape[-1]
    valid = lengths if encoder.settings.conv_mask else torch.full_like(lengths, frames)
    order = None
    if ways.in_use().sorted and len(lengths) > tiles.STREAM_ROWS:
        # Utterances of like lengths share a group, so that kernels that end at the longest of a group have less to do.
        valid, order = valid.sort(descending=True, stable=True)
        features = features.index_select(0, order)
        order = order.to(torch.int32)
    beyond = frames_of(valid, frames).beyond
    values = features.detach().masked_fill(beyond, 0.0).transpose(0, 1)
    values = F.pad(values, (0, padded_frames(frames) - frames))
    check_size(max(encoder.settings.channels), len(lengths), padded_frames(frames))
    signal = Signal(values.contiguous(), None, None, valid.to(torch.int32), frames, None)
    seen: Seen = []
    matrices = _matrices(encoder, features.dtype)
    for block in encoder.blocks:
        assert isinstance(block, Block)
        signal = _through(block, signal, matrices, seen)
        if block.stride > 1:  # else three kernels that change nothing
            lengths = strided_length(lengths, block.stride)
    track(seen)
    return signal.unpacked(order), lengths


def check_size(channels: int, batch: int, frames: int) -> None:
    """Refuse what kernels cannot count in 32 bits. The contest of ways tries the largest grains of a run, and takes
    another way; a run that goes on with larger ones ends with this."""
    if channels * batch * frames >= 2**31:
        raise CannotRun(
            f"{counted(batch, 'utterance')} of {frames} frames in {channels} channels are past 2^31 elements",
            "the kernels of `-O4` count no further: set more `--grains` or a smaller batch, or `-O2`",
        )


@torch.no_grad()
def _matrices(encoder: Encoder, dtype: torch.dtype) -> Matrices:
    """Round all weights of a pass in one kernel, for forward and backward."""
    products = [module for module in encoder.modules() if isinstance(module, nn.Conv1d) and module.kernel_size[0] == 1]
    weights = [product.weight.detach() for product in products]
    if dtype not in {weight.dtype for weight in weights}:
        rounded = [torch.empty_like(weight, dtype=dtype) for weight in weights]
        foreach_copy_(rounded, weights)
        weights = rounded
    return {product: weight.squeeze(2) for product, weight in zip(products, weights, strict=True)}


def _through(block: Block, signal: Signal, matrices: Matrices, seen: Seen) -> Signal:
    shortcut = block.residuals[0] if block.residuals else None
    assert isinstance(shortcut, Residual | None)
    residual = None
    for layer in block.layers:
        if isinstance(layer, SeparableConv):
            # The residual starts where the first sub-block does, so that both gradients meet in one kernel.
            signal, found = _separable(signal, layer, shortcut, matrices, seen)
            residual = found or residual
        else:
            assert isinstance(layer, PlainConv)
            signal = signal.activated()
            if shortcut is not None:
                residual = _across(signal, shortcut.conv, shortcut.norm, matrices, seen)
            signal = _across(signal, layer.conv, layer.norm, matrices, seen)
        shortcut = None
    if residual is None:
        return signal
    assert signal.affine is not None
    assert signal.moments is not None
    joined = join(
        signal.values,
        signal.affine,
        signal.moments,
        residual.values,
        residual.affine,
        residual.moments,
        signal.lengths,
        None,
        None,
    )
    return signal._replace(values=joined, affine=None, moments=None)


def _separable(
    signal: Signal, layer: SeparableConv, shortcut: Residual | None, matrices: Matrices, seen: Seen
) -> tuple[Signal, Signal | None]:
    stride, dilation = layer.depthwise.stride[0], layer.depthwise.dilation[0]
    frames, lengths, tiles = signal.frames, signal.lengths, signal.tiles
    if stride > 1:
        frames, lengths, tiles = strided_length(frames, stride), strided_length(lengths, stride), None
    if tiles is None:
        tiles = ops.listed(signal.values, lengths, frames)
    of_shortcut: tuple[Tensor | None, ...] = (None, None, None)
    if shortcut is not None:
        signal = signal.activated()
        of_shortcut = (shortcut.conv.weight, shortcut.norm.weight, shortcut.norm.bias)
    y, affine, moments, _, other, other_affine, other_moments = ops.separable(
        signal.values,
        signal.affine,
        signal.moments,
        signal.lengths,
        lengths,
        layer.depthwise.weight,
        layer.pointwise.weight,
        layer.norm.weight,
        layer.norm.bias,
        *of_shortcut,
        matrices[layer.pointwise],
        None if shortcut is None else matrices[shortcut.conv],
        tiles,
        frames,
        stride,
        dilation,
        layer.norm.eps,
    )
    seen.append((layer.norm, moments))
    if shortcut is None:
        return Signal(y, affine, moments, lengths, frames, tiles), None
    seen.append((shortcut.norm, other_moments))
    return (
        Signal(y, affine, moments, lengths, frames, tiles),
        Signal(other, other_affine, other_moments, lengths, frames, tiles),
    )


def _across(signal: Signal, conv: nn.Conv1d, norm: nn.BatchNorm1d, matrices: Matrices, seen: Seen) -> Signal:
    """A product over channels and its batch norm."""
    y, affine, moments = ops.pointwise(
        signal.values,
        signal.lengths,
        conv.weight,
        norm.weight,
        norm.bias,
        matrices[conv],
        signal.tiles,
        signal.frames,
        norm.eps,
    )
    seen.append((norm, moments))
    return signal._replace(values=y, affine=affine, moments=moments)
