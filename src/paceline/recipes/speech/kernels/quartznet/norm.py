"""Batch norm in training, taken apart so that its pieces lie where the data passes anyway.

Forward: moments of tiles, then their combination into a scale and a shift per channel (applied by whoever reads the
data next, or by `join` where it is needed more than once). Backward: two sums per channel (made by whoever writes the
gradient), then `apply_backward`. Layout and lengths as in `depthwise`; padded frames within `frames` count as zeros, as
in the plain module, those that only fill a row up to 16 do not count.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.recipes.speech.kernels.quartznet.order import nth
from paceline.speed.layers.kernels import ways

TILE = 4096
"""Frames of a channel that one program reads."""
PIECE = 8192
"""Of all frames of a channel, one after the other, as many as one program reads."""


class Statistics(NamedTuple):
    """Statistics of a batch, as batch norm needs them."""

    affine: Tensor
    """(2, channel) float32: scale and shift of the raw values."""
    moments: Tensor
    """(3, channel) float32: mean, 1 / standard deviation (with eps), and the unbiased variance."""


@triton.jit
def _tile(lengths, batch, row, tiles_of_time, UTTERANCES: tl.constexpr, FRAMES: tl.constexpr):
    """Utterances, frames, offsets in a channel, which of them are there and which hold speech (by 8, and exactly)."""
    group = tl.program_id(0)
    b = (group // tiles_of_time) * UTTERANCES + tl.arange(0, UTTERANCES)
    t = (group % tiles_of_time) * FRAMES + tl.arange(0, FRAMES)[None, :]
    length = tl.load(lengths + b, mask=b < batch, other=0)[:, None]
    exists = (b < batch)[:, None] & (t < row)
    return b, t, (b * row)[:, None] + t, exists, (t // 8) * 8 < length, t < length


@triton.jit
def _tile_moments(
    y, lengths, parts, channels, batch, row, tiles_of_time, UTTERANCES: tl.constexpr, FRAMES: tl.constexpr
):
    group = tl.program_id(0)
    channel = tl.program_id(1)
    _, _, offset, exists, may_hold, _ = _tile(lengths, batch, row, tiles_of_time, UTTERANCES, FRAMES)
    values = tl.load(y + channel * batch * row + offset, mask=may_hold, other=0.0).to(tl.float32)
    count = tl.sum(tl.sum(exists.to(tl.float32), 1), 0)
    mean = tl.sum(tl.sum(values, 1), 0) / count
    away = tl.where(exists, values - mean, 0.0)
    tl.store(parts + (group * 2) * channels + channel, mean)
    tl.store(parts + (group * 2 + 1) * channels + channel, tl.sum(tl.sum(away * away, 1), 0))


@triton.jit
def _piece_moments(
    y,
    weight,
    bias,
    parts,
    counters,
    affine,
    moments,
    channels,
    size,
    true_size,
    groups,
    eps,
    PIECE: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """Moments of pieces that know nothing of utterances: behind a length there are zeros, which count.

    The program that is done last with a channel combines the pieces, in their order, whichever program that is: the
    counter decides who works, not what comes out, and is left at 0.
    """
    group = tl.program_id(0)
    channel = tl.program_id(1)
    at = group * PIECE + tl.arange(0, PIECE)
    source = y + channel * size + at
    if (group + 1) * PIECE <= size:
        values = tl.load(source).to(tl.float32)
        mean = tl.sum(values, 0) / PIECE
        away = values - mean
    else:
        values = tl.load(source, mask=at < size, other=0.0).to(tl.float32)
        mean = tl.sum(values, 0) / (size - group * PIECE)
        away = tl.where(at < size, values - mean, 0.0)
    tl.store(parts + (channel * 2) * groups + group, mean)
    tl.store(parts + (channel * 2 + 1) * groups + group, tl.sum(away * away, 0))
    num_done = tl.atomic_add(counters + channel, 1, sem="acq_rel")
    if num_done == groups - 1:
        tl.store(counters + channel, 0)
        number = tl.arange(0, GROUPS)
        there = number < groups
        # Past the first cache, which may hold what lay here before the others wrote.
        means = tl.load(parts + (channel * 2) * groups + number, mask=there, other=0.0, cache_modifier=".cg")
        inner = tl.load(parts + (channel * 2 + 1) * groups + number, mask=there, other=0.0, cache_modifier=".cg")
        count = tl.where(there, tl.minimum(size - number * PIECE, PIECE), 0).to(tl.float32)
        # Chan's rule, as in `_combine`.
        total = tl.sum(means * count, 0)
        mean_of_all = total / size
        apart = means - mean_of_all
        squares = tl.sum(tl.where(there, inner + apart * apart * count, 0.0), 0)
        _store_statistics(
            *(weight, bias, affine, moments, channel, channels, total, squares, mean_of_all, size, true_size, eps)
        )


@triton.jit
def _store_statistics(
    weight, bias, affine, moments, channel, channels, total, squares, mean_of_all, all_frames, true_frames, eps
):
    """For one channel. The frames that only fill rows up are zeros: they are taken out again."""
    mean = total / true_frames
    squares = tl.maximum(squares - mean_of_all * mean * (all_frames - true_frames), 0.0)
    scale = 1.0 / tl.sqrt(squares / true_frames + eps)
    slope = tl.load(weight + channel) * scale
    tl.store(moments + channel, mean)
    tl.store(moments + channels + channel, scale)
    tl.store(moments + 2 * channels + channel, squares / (true_frames - 1))
    tl.store(affine + channel, slope)
    tl.store(affine + channels + channel, tl.load(bias + channel) - mean * slope)


@triton.jit
def _combine(
    parts,
    weight,
    bias,
    affine,
    moments,
    groups,
    channels,
    batch,
    row,
    frames,
    tiles_of_time,
    eps,
    UTTERANCES: tl.constexpr,
    FRAMES: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCKS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    is_channel = channel < channels
    # Chan's rule: sums of squares about the tiles' own means, so that nothing cancels.
    total = tl.zeros([CHANNELS], tl.float32)
    for block in range(BLOCKS):
        group = block * GROUPS + tl.arange(0, GROUPS)
        count = _count(group, groups, batch, row, tiles_of_time, UTTERANCES, FRAMES)
        at = (group * 2)[:, None] * channels + channel[None, :]
        mean = tl.load(parts + at, mask=(group < groups)[:, None] & is_channel[None, :], other=0.0)
        total += tl.sum(mean * count[:, None], 0)
    all_frames = batch * row
    mean_of_all = total / all_frames
    squares = tl.zeros([CHANNELS], tl.float32)
    for block in range(BLOCKS):
        group = block * GROUPS + tl.arange(0, GROUPS)
        count = _count(group, groups, batch, row, tiles_of_time, UTTERANCES, FRAMES)
        at = (group * 2)[:, None] * channels + channel[None, :]
        there = (group < groups)[:, None] & is_channel[None, :]
        away = tl.load(parts + at, mask=there, other=0.0) - mean_of_all[None, :]
        inner = tl.load(parts + at + channels, mask=there, other=0.0)
        squares += tl.sum(inner + away * away * count[:, None], 0)
    # The frames that only fill rows up are zeros: take them out again.
    true_frames = batch * frames
    mean = total / true_frames
    squares -= mean_of_all * mean * (all_frames - true_frames)
    variance = tl.maximum(squares, 0.0) / true_frames
    scale = 1.0 / tl.sqrt(variance + eps)
    tl.store(moments + channel, mean, mask=is_channel)
    tl.store(moments + channels + channel, scale, mask=is_channel)
    slope = tl.load(weight + channel, mask=is_channel, other=0.0) * scale
    tl.store(affine + channel, slope, mask=is_channel)
    shift = tl.load(bias + channel, mask=is_channel, other=0.0) - mean * slope
    tl.store(affine + channels + channel, shift, mask=is_channel)
    unbiased = tl.maximum(squares, 0.0) / (true_frames - 1)
    tl.store(moments + 2 * channels + channel, unbiased, mask=is_channel)


@triton.jit
def _count(group, groups, batch, row, tiles_of_time, UTTERANCES: tl.constexpr, FRAMES: tl.constexpr):
    """Frames in a tile."""
    utterances = tl.minimum(batch - (group // tiles_of_time) * UTTERANCES, UTTERANCES)
    frames = tl.minimum(row - (group % tiles_of_time) * FRAMES, FRAMES)
    return tl.where(group < groups, utterances * frames, 0).to(tl.float32)


@triton.jit
def _apply_backward(
    h,
    y,
    sums,
    affine,
    moments,
    lengths,
    g,
    weight_gradient,
    bias_gradient,
    channels,
    batch,
    row,
    frames,
    tiles_of_time,
    UTTERANCES: tl.constexpr,
    FRAMES: tl.constexpr,
    IS_TURNED: tl.constexpr,
):
    channel = nth(tl.program_id(1), channels, IS_TURNED)
    _, _, offset, exists, may_hold, holds = _tile(lengths, batch, row, tiles_of_time, UTTERANCES, FRAMES)
    offset += channel * batch * row
    scale = tl.load(affine + channel)
    mean = tl.load(moments + channel)
    inverse = tl.load(moments + channels + channel)
    slope = tl.load(sums + channel)
    level = tl.load(sums + channels + channel)
    count = 1.0 * batch * frames
    gradient = tl.load(h + offset, mask=may_hold, other=0.0).to(tl.float32)
    values = tl.load(y + offset, mask=may_hold, other=0.0).to(tl.float32)
    steep = slope * inverse * inverse / count
    result = scale * (gradient - level / count - (values - mean) * steep)
    tl.store(g + offset, tl.where(holds, result, 0.0).to(tl.bfloat16), mask=exists)
    if tl.program_id(0) == 0:
        tl.store(weight_gradient + channel, slope * inverse)
        tl.store(bias_gradient + channel, level)


@triton.jit
def _join(
    y,
    affine,
    other,
    other_affine,
    lengths,
    order,
    out,
    channels,
    batch,
    row,
    tiles_of_time,
    out_channel,
    out_batch,
    out_row,
    UTTERANCES: tl.constexpr,
    FRAMES: tl.constexpr,
    HAS_OTHER: tl.constexpr,
    HAS_ORDER: tl.constexpr,
    IS_TURNED: tl.constexpr,
):
    channel = nth(tl.program_id(1), channels, IS_TURNED)
    b, t, offset, _, may_hold, holds = _tile(lengths, batch, row, tiles_of_time, UTTERANCES, FRAMES)
    offset += channel * batch * row
    values = tl.load(y + offset, mask=may_hold, other=0.0).to(tl.float32)
    values = values * tl.load(affine + channel) + tl.load(affine + channels + channel)
    if HAS_OTHER:
        more = tl.load(other + offset, mask=may_hold, other=0.0).to(tl.float32)
        values += more * tl.load(other_affine + channel) + tl.load(other_affine + channels + channel)
    values = tl.where(holds, tl.maximum(values, 0.0), 0.0).to(tl.bfloat16)
    place = tl.load(order + b, mask=b < batch, other=0) if HAS_ORDER else b
    target = out + channel * out_channel + (place * out_batch)[:, None] + t
    tl.store(target, values, mask=(b < batch)[:, None] & (t < out_row))


@triton.jit
def _join_backward(
    g,
    y,
    affine,
    moments,
    other,
    other_affine,
    other_moments,
    lengths,
    order,
    h,
    parts,
    channels,
    batch,
    row,
    tiles_of_time,
    g_channel,
    g_batch,
    g_row,
    UTTERANCES: tl.constexpr,
    FRAMES: tl.constexpr,
    HAS_OTHER: tl.constexpr,
    HAS_ORDER: tl.constexpr,
):
    group = tl.program_id(0)
    channel = tl.program_id(1)
    b, t, offset, exists, may_hold, holds = _tile(lengths, batch, row, tiles_of_time, UTTERANCES, FRAMES)
    offset += channel * batch * row
    place = tl.load(order + b, mask=b < batch, other=0) if HAS_ORDER else b
    source = g + channel * g_channel + (place * g_batch)[:, None] + t
    gradient = tl.load(source, mask=may_hold & (t < g_row), other=0.0).to(tl.float32)
    values = tl.load(y + offset, mask=may_hold, other=0.0).to(tl.float32)
    total = values * tl.load(affine + channel) + tl.load(affine + channels + channel)
    more = values
    if HAS_OTHER:
        more = tl.load(other + offset, mask=may_hold, other=0.0).to(tl.float32)
        total += more * tl.load(other_affine + channel) + tl.load(other_affine + channels + channel)
    gradient = tl.where(holds & (total > 0.0), gradient, 0.0)
    tl.store(h + offset, gradient.to(tl.bfloat16), mask=exists)
    away = gradient * (values - tl.load(moments + channel))
    tl.store(parts + (group * 3) * channels + channel, tl.sum(tl.sum(away, 1), 0))
    tl.store(parts + (group * 3 + 1) * channels + channel, tl.sum(tl.sum(gradient, 1), 0))
    if HAS_OTHER:
        away = gradient * (more - tl.load(other_moments + channel))
        tl.store(parts + (group * 3 + 2) * channels + channel, tl.sum(tl.sum(away, 1), 0))


@triton.jit
def _add_parts(
    parts, sums, other_sums, groups, channels, HAS_OTHER: tl.constexpr, GROUPS: tl.constexpr, CHANNELS: tl.constexpr
):
    """The sums for either batch norm from those of all groups, in one order."""
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    is_channel = channel < channels
    slope = tl.zeros([CHANNELS], tl.float32)
    level = tl.zeros([CHANNELS], tl.float32)
    other_slope = tl.zeros([CHANNELS], tl.float32)
    for first in range(0, groups, GROUPS):
        group = first + tl.arange(0, GROUPS)
        there = (group < groups)[:, None] & is_channel[None, :]
        at = parts + (group * 3 * channels)[:, None] + channel[None, :]
        slope += tl.sum(tl.load(at, mask=there, other=0.0), 0)
        level += tl.sum(tl.load(at + channels, mask=there, other=0.0), 0)
        if HAS_OTHER:
            other_slope += tl.sum(tl.load(at + 2 * channels, mask=there, other=0.0), 0)
    tl.store(sums + channel, slope, mask=is_channel)
    tl.store(sums + channels + channel, level, mask=is_channel)
    tl.store(other_sums + channel, other_slope, mask=is_channel)
    tl.store(other_sums + channels + channel, level, mask=is_channel)


def statistics(
    y: Tensor,
    lengths: Tensor,
    frames: int,
    weight: Tensor,
    bias: Tensor,
    eps: float,
) -> Statistics:
    """Of raw values that are zero behind each length."""
    channels, batch, row = y.shape
    if ways.in_use().flat:
        return _flat_statistics(y, frames, weight, bias, eps)
    groups, tiles_of_time, shape = _cut(y, 1024)
    parts = torch.empty(groups, 2, channels, dtype=torch.float32, device=y.device)
    _tile_moments[(groups, channels)](y, lengths, parts, channels, batch, row, tiles_of_time, **shape)
    affine = torch.empty(2, channels, dtype=torch.float32, device=y.device)
    moments = torch.empty(3, channels, dtype=torch.float32, device=y.device)
    _combine[(triton.cdiv(channels, 32),)](
        parts,
        weight,
        bias,
        affine,
        moments,
        groups,
        channels,
        batch,
        row,
        frames,
        tiles_of_time,
        eps,
        **shape,
        GROUPS=32,
        BLOCKS=triton.cdiv(groups, 32),
        CHANNELS=32,
    )
    return Statistics(affine, moments)


def _flat_statistics(y: Tensor, frames: int, weight: Tensor, bias: Tensor, eps: float) -> Statistics:
    channels, batch, row = y.shape
    groups = triton.cdiv(batch * row, PIECE)
    parts = torch.empty(channels, 2, groups, dtype=torch.float32, device=y.device)
    affine = torch.empty(2, channels, dtype=torch.float32, device=y.device)
    moments = torch.empty(3, channels, dtype=torch.float32, device=y.device)
    _piece_moments[(groups, channels)](
        y,
        weight,
        bias,
        parts,
        _counters(y.device, channels),
        affine,
        moments,
        channels,
        batch * row,
        batch * frames,
        groups,
        eps,
        PIECE=PIECE,
        GROUPS=triton.next_power_of_2(groups),
        num_warps=8,
    )
    return Statistics(affine, moments)


@functools.cache
def _counters(device: torch.device, channels: int) -> Tensor:
    """Zeros between launches, which follow each other on one stream; graphs that were recorded keep their address."""
    return torch.zeros(channels, dtype=torch.int32, device=device)


def apply_backward(
    h: Tensor, sums: Tensor, y: Tensor, affine: Tensor, moments: Tensor, lengths: Tensor, frames: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients for the raw values, and for the batch norm's weight and bias.

    `h` is the gradient for its output, `sums` (2, channel) those of `h` times (y - mean), and of `h`.
    """
    channels, batch, row = y.shape
    groups, tiles_of_time, shape = _cut(y, 256)
    g = torch.empty_like(y)
    weight_gradient, bias_gradient = (torch.empty(channels, dtype=torch.float32, device=y.device) for _ in range(2))
    _apply_backward[(groups, channels)](
        h,
        y,
        sums,
        affine,
        moments,
        lengths,
        g,
        weight_gradient,
        bias_gradient,
        channels,
        batch,
        row,
        frames,
        tiles_of_time,
        **shape,
        IS_TURNED=ways.in_use().turned,
    )
    return g, weight_gradient, bias_gradient


def join(
    y: Tensor,
    affine: Tensor,
    other: Tensor | None,
    other_affine: Tensor | None,
    lengths: Tensor,
    frames: int | None = None,
    order: Tensor | None = None,
) -> Tensor:
    """ReLU of batch-normed values, or of the sum of two such.

    Given `frames`, in the layout of everybody else: (batch, channel, frames), rows not padded; there utterance `i` is
    at place `order[i]`, if that is given.
    """
    channels, batch, row = y.shape
    groups, tiles_of_time, shape = _cut(y, 256)
    out = torch.empty_like(y) if frames is None else y.new_empty(batch, channels, frames)
    _join[(groups, channels)](
        y,
        affine,
        y if other is None else other,
        affine if other_affine is None else other_affine,
        lengths,
        lengths if order is None else order,
        out,
        channels,
        batch,
        row,
        tiles_of_time,
        *_strides(out, is_packed=frames is None),
        **shape,
        HAS_OTHER=other is not None,
        HAS_ORDER=order is not None,
        IS_TURNED=ways.in_use().turned,
    )
    return out


def join_backward(
    g: Tensor,
    y: Tensor,
    affine: Tensor,
    moments: Tensor,
    other: Tensor | None,
    other_affine: Tensor | None,
    other_moments: Tensor | None,
    lengths: Tensor,
    order: Tensor | None = None,
    *,
    is_packed: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradient before the ReLU, the same for both, and the sums for either batch norm."""
    channels, batch, row = y.shape
    groups, tiles_of_time, shape = _cut(y, 256)
    h = torch.empty_like(y)
    parts = torch.empty(groups, 3, channels, dtype=torch.float32, device=y.device)
    _join_backward[(groups, channels)](
        g,
        y,
        affine,
        moments,
        y if other is None else other,
        affine if other_affine is None else other_affine,
        moments if other_moments is None else other_moments,
        lengths,
        lengths if order is None else order,
        h,
        parts,
        channels,
        batch,
        row,
        tiles_of_time,
        *_strides(g, is_packed=is_packed),
        **shape,
        HAS_OTHER=other is not None,
        HAS_ORDER=order is not None,
    )
    sums, other_sums = (torch.empty(2, channels, dtype=torch.float32, device=y.device) for _ in range(2))
    _add_parts[(triton.cdiv(channels, 16),)](
        parts, sums, other_sums, groups, channels, HAS_OTHER=other is not None, GROUPS=64, CHANNELS=16
    )
    return h, sums, other_sums


def _strides(x: Tensor, *, is_packed: bool) -> tuple[int, int, int]:
    """Steps from channel to channel and from utterance to utterance, and the length of a row."""
    first, second = x.stride(0), x.stride(1)
    return (*((first, second) if is_packed else (second, first)), x.shape[2])


class Cut(NamedTuple):
    """Division of a channel's frames among programs."""

    groups: int
    tiles_of_time: int
    shape: dict[str, int]


def _cut(y: Tensor, longest: int) -> Cut:
    """Tiles of `TILE` frames, of at most so many frames of one utterance."""
    frames = max(16, min(longest, triton.next_power_of_2(y.shape[2])))
    utterances = TILE // frames
    tiles_of_time = triton.cdiv(y.shape[2], frames)
    groups = triton.cdiv(y.shape[1], utterances) * tiles_of_time
    return Cut(groups, tiles_of_time, {"UTTERANCES": utterances, "FRAMES": frames})
