"""Training an encoder that our kernels do not know (Jasper) in the layout that the library's convolutions want.

Activations travel as (batch, time, channels), so that the library multiplies them as they lie, where it would else copy
every input and output of a convolution into that order and back. What follows a convolution (batch norm, the residuals'
too, their sum, ReLU, dropout, mask) is one operator of ours, `row_norm`, for the usual kind of layer. Every block hands
on frames that are zero behind each length. Parameters and state dict are the plain modules'; evaluation, and whatever
is not training in bfloat16 autocast, goes the plain way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import MethodType

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.recipes.speech.fast.fused import check_size
from paceline.recipes.speech.fast.running import Seen, track
from paceline.recipes.speech.kernels.time_conv import time_conv
from paceline.recipes.speech.network.encoder import Block, Encoder, Residual
from paceline.recipes.speech.network.frames import Frames, frames_of
from paceline.recipes.speech.network.separable import BATCH_NORM_MOMENTUM, PlainConv, SeparableConv, SubBlock
from paceline.speed.layers.kernels.row_norm import row_norm
from paceline.speed.layers.products import branches, stacked, taken


def accelerate(encoder: Encoder) -> None:
    """Train with channels last from now on."""
    encoder.forward = MethodType(_forward, encoder)  # type: ignore[method-assign]


def _forward(self: Encoder, features: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    if not self.trains_in_bfloat16(features.device):
        return Encoder.forward(self, features, lengths)
    return encode(self, features.to(torch.bfloat16), lengths)


@dataclass
class Pass:
    """What the layers of one pass share."""

    seeds: list[Tensor]
    """One for each layer's dropout."""
    is_sent: bool
    """Gradients of weights go to other ranks, as soon as they are there."""
    products: dict[Residual, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """Inputs of blocks brought to the width of one behind them, until it takes them; and these inputs."""
    seen: Seen = field(default_factory=list)


def encode(encoder: Encoder, features: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """The encoder's training pass, in the dtype of its features."""
    frames = frames_of(lengths.to(torch.int32), features.shape[-1])  # as the kernels want them
    layers = [module for module in encoder.modules() if isinstance(module, SubBlock)]
    is_compiled = torch.compiler.is_compiling()
    shared = Pass(_seeds(layers, features.device), is_sent=_has_peers() and not is_compiled)
    fans = residuals_of_inputs(encoder)
    weights = [[residual.conv.weight for residual in fan] for fan in fans]
    if features.is_cuda:
        check_size(max(encoder.settings.channels), features.shape[0], features.shape[2])
    x = _masked(features.transpose(1, 2), frames, encoder.settings.conv_mask).contiguous()
    stacks = [None] * len(weights) if is_compiled else stacked(weights, x.dtype)
    for number, (block, fan, stack) in enumerate(zip(encoder.blocks, fans, stacks, strict=True)):
        assert isinstance(block, Block)
        if stack is not None and x.is_cuda:
            check_size(len(stack), *x.shape[:2])
        if fan:
            source, (x, products) = x, branches(x, weights[number], stack, is_sent=shared.is_sent)
            shared.products |= {residual: (each, source) for residual, each in zip(fan, products, strict=True)}
        x, frames = _through(block, x, frames, shared)
    if shared.seen:
        track(shared.seen)
    return x.transpose(1, 2), frames.lengths.to(lengths.dtype)


def residuals_of_inputs(encoder: Encoder) -> list[list[Residual]]:
    """Return the residuals that each block's input goes into: of this block and of those behind it."""
    fans: list[list[Residual]] = []
    chain: list[int] = []
    for number, (block, settings) in enumerate(zip(encoder.blocks, encoder.settings.blocks, strict=True)):
        assert isinstance(block, Block)
        fans.append([])
        inputs = [*chain, number] if settings.residual_dense else [number]
        for residual, source in zip(block.residuals, inputs, strict=False):
            assert isinstance(residual, Residual)
            fans[source].append(residual)
        chain = inputs if settings.residual_dense else []
    return fans


def _has_peers() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _seeds(layers: Sequence[SubBlock], device: torch.device) -> list[Tensor]:
    """Drawn at once; nothing is drawn for a network without dropout."""
    num = sum(isinstance(layer.dropout, nn.Dropout) for layer in layers)
    if not num:
        return []
    return list(torch.randint(-(2**31), 2**31 - 1, (num, 2), dtype=torch.int32, device=device).unbind())


def _through(block: Block, x: Tensor, frames: Frames, shared: Pass) -> tuple[Tensor, Frames]:
    after = frames.strided(block.stride)
    residuals: list[tuple[Tensor, nn.BatchNorm1d]] = []
    for residual in block.residuals:
        assert isinstance(residual, Residual)
        product, source = shared.products.pop(residual)
        if shared.is_sent:
            product = taken(product, source, residual.conv.weight)
        residuals.append((product, residual.norm))
    last = len(block.layers) - 1
    for number, layer in enumerate(block.layers):
        assert isinstance(layer, SubBlock)
        x = _layer(layer, x, after, residuals if number == last else [], shared)
    return x, after


def _layer(
    layer: SubBlock, x: Tensor, after: Frames, residuals: Sequence[tuple[Tensor, nn.BatchNorm1d]], shared: Pass
) -> Tensor:
    """`SubBlock.forward` on rows that are zero behind each length, and again so."""
    if isinstance(layer, SeparableConv):
        y = _convolved(layer.pointwise, _masked(_convolved(layer.depthwise, x), after, layer.is_masked))
    else:
        assert isinstance(layer, PlainConv)
        y = _convolved(layer.conv, x)
    is_dropped = isinstance(layer.dropout, nn.Dropout)
    seed = shared.seeds.pop(0) if is_dropped else None
    norms = [layer.norm, *(norm for _, norm in residuals)]
    if _is_usual(layer, norms):
        lengths = after.lengths if layer.is_masked else None
        share = layer.dropout.p if isinstance(layer.dropout, nn.Dropout) else 0.0
        weights, biases = [norm.weight for norm in norms], [norm.bias for norm in norms]
        ys = [y, *(each for each, _ in residuals)]
        # Residuals have nobody else to use them: their gradients may take their places.
        normed, _, moments = row_norm(ys, weights, biases, lengths, seed, share, layer.norm.eps, True)
        shared.seen += list(zip(norms, moments.detach().unbind(), strict=True))
        activations: Tensor = normed
        return activations
    y = _normalized(layer.norm, y)
    if layer.groups > 1:
        y = y.unflatten(2, (layer.groups, -1)).transpose(2, 3).flatten(2)
    if layer.excite is not None:
        y = layer.excite(y.transpose(1, 2), after).transpose(1, 2)
    for each, norm in residuals:
        y = y + _normalized(norm, each)
    # Not in place: the batch norm's output is seen through a view, whose gradient would be made by copies.
    out: Tensor = layer.dropout(F.relu(y) if isinstance(layer.activation, nn.ReLU) else layer.activation(y))
    return _masked(out, after, layer.is_masked)


def leaves_some(encoder: Encoder) -> bool:
    """Return True if some layer is not, but for its convolution, one operator of ours."""
    blocks = [block for block in encoder.blocks if isinstance(block, Block)]
    layers = [layer for block in blocks for layer in block.layers if isinstance(layer, SubBlock)]
    residuals = [residual for block in blocks for residual in block.residuals if isinstance(residual, Residual)]
    norms = [*(layer.norm for layer in layers), *(residual.norm for residual in residuals)]
    return any(isinstance(layer, SeparableConv) or not _is_usual(layer, norms) for layer in layers)


def _is_usual(layer: SubBlock, norms: Sequence[nn.BatchNorm1d]) -> bool:
    """Return True if the operator computes what the modules would."""
    if layer.groups > 1 or layer.excite is not None or not isinstance(layer.activation, nn.ReLU):
        return False
    return all(type(norm) is nn.BatchNorm1d and norm.momentum == BATCH_NORM_MOMENTUM for norm in norms)


def _masked(x: Tensor, frames: Frames, is_masked: bool) -> Tensor:
    return torch.where(frames.beyond.transpose(1, 2), 0.0, x) if is_masked else x


def _convolved(conv: nn.Conv1d, x: Tensor) -> Tensor:
    assert conv.bias is None
    stride, padding, dilation = conv.stride[0], int(conv.padding[0]), conv.dilation[0]
    is_product = conv.kernel_size[0] == stride == conv.groups == 1
    if is_product:
        return F.linear(x, conv.weight.to(x.dtype).squeeze(2))
    return time_conv(x, conv.weight, stride, padding, dilation, conv.groups)


def _normalized(norm: nn.BatchNorm1d, x: Tensor) -> Tensor:
    assert norm.num_batches_tracked is not None
    assert norm.momentum is not None
    norm.num_batches_tracked.add_(1)
    statistics = norm.running_mean, norm.running_var
    y = F.batch_norm(x.flatten(0, 1), *statistics, norm.weight, norm.bias, True, norm.momentum, norm.eps)
    return y.view_as(x)
