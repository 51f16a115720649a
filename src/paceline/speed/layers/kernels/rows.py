"""Batch norm, ReLU, dropout and mask of rows of channels: the kernels behind `row_norm`.

Rows are (batch, time, channels) in bfloat16, a frame's channels side by side, as the library's convolutions want them;
those of an input may lie among those of others, so many numbers apart as its stride says.
Every frame counts in the batch statistics, also behind a length, as in the plain module. Sums are in float32 and in a
fixed order, without atomics: the same inputs give the same bits.

All programs that run at a time are at neighbouring rows, with all their channels. Kernels with sums go from the last
row to the first, since what the kernel before them wrote last is still in the cache; those that use the sums go from
the first to the last, for the same reason.
"""

# ruff: noqa: RUF005 (Triton knows no unpacking)
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

CHANNELS = 64
"""Channels that one program reads: a cache line of bfloat16."""
SUMMED_ROWS, JOINED_ROWS = 32, 64
"""Rows of a tile of the statistics, and of the activations."""
STAGES = tl.constexpr(4)
"""Of the statistics: the tile that is added, and those that are fetched meanwhile."""
SUM_STAGES = tl.constexpr(3)
"""Tiles under way in sums of gradients."""
MOST_GROUPS = 256
MULTIPROCESSORS = 132
"""Of an H200: a kernel with sums has as many programs as run there at a time, which is four on each."""


@triton.jit
def _mixed(x):
    """A bijection of 32 bits in which every bit depends on every other (Wellons' lowbias32)."""
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= x >> 15
    x *= 0x846CA68B
    x ^= x >> 16
    return x


@triton.jit
def _place(channels, CHANNELS: tl.constexpr):
    """Return this program's place among those of its channels, and which of these blocks it has: neighbours have the
    same place."""
    blocks = tl.cdiv(channels, CHANNELS)
    place = tl.program_id(0) // blocks
    return place, tl.program_id(0) - place * blocks


@triton.jit
def _tile(row, c, stride):
    """Offsets of a tile."""
    return row[:, None] * stride + c[None, :]


@triton.jit
def _there(row, c, rows, channels):
    """Return the mask of a tile: which of its numbers there are."""
    return (row < rows)[:, None] & (c < channels)[None, :]


@triton.jit
def _held(row, rows, lengths, time, HAS_LENGTHS: tl.constexpr):
    """Rows that belong to an utterance."""
    held = row < rows
    if HAS_LENGTHS:
        utterance = row // time
        held = held & (row - utterance * time < tl.load(lengths + utterance, mask=held, other=0))
    return held


@triton.jit
def _counts(group, groups, rows, TILE: tl.constexpr):
    """Return how many rows a group has: every `groups`-th tile from the last one on, which may not be full."""
    tiles = tl.cdiv(rows, TILE)
    return tl.cdiv(tiles - group, groups) * TILE - tl.where(group == 0, tiles * TILE - rows, 0)


@triton.jit
def _moments(ys, strides, parts, rows, channels, groups, NUM: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr):
    """Mean of the rows of each program, and sum of squares about it, of each of the inputs in turn."""
    group, block = _place(channels, CHANNELS)
    c = block * CHANNELS + tl.arange(0, CHANNELS)
    tiles = tl.cdiv(rows, ROWS)
    count = _counts(group, groups, rows, ROWS)
    for number in tl.static_range(NUM):
        y, stride = ys[number], strides[number]
        # Squares about one of the values, which is as far from their mean as they are: little cancels. It stands for
        # what is not there, too, which so adds nothing.
        one = tl.load(y + (tiles - 1 - group) * ROWS * stride + c, mask=c < channels, other=0.0)
        about = one.to(tl.float32)
        total = tl.zeros([ROWS, CHANNELS], tl.float32)
        squares = tl.zeros([ROWS, CHANNELS], tl.float32)
        for before in tl.range(group, tiles, groups, num_stages=STAGES):
            row = (tiles - 1 - before) * ROWS + tl.arange(0, ROWS)
            there = _there(row, c, rows, channels)
            away = tl.load(y + _tile(row, c, stride), mask=there, other=one[None, :]).to(tl.float32) - about[None, :]
            total += away
            squares += away * away
        shift = tl.sum(total, 0) / count
        inner = tl.sum(squares, 0) - shift * shift * count
        at = parts + (number * groups + group) * 2 * channels + c
        tl.store(at, about + shift, mask=c < channels)
        tl.store(at + channels, inner, mask=c < channels)


@triton.jit
def _combine(
    parts,
    weights,
    biases,
    affine,
    moments,
    rows,
    channels,
    groups,
    eps,
    NUM: tl.constexpr,
    GROUPS: tl.constexpr,
    CHANNELS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Of one input: the parts of all groups, by Chan's rule, and what they make of its weight and bias."""
    c = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    is_channel = c < channels
    weight = tl.zeros([CHANNELS], tl.float32)
    bias = tl.zeros([CHANNELS], tl.float32)
    for number in tl.static_range(NUM):
        if tl.program_id(1) == number:
            weight = tl.load(weights[number] + c, mask=is_channel, other=0.0)
            bias = tl.load(biases[number] + c, mask=is_channel, other=0.0)
    number = tl.program_id(1)
    group = tl.arange(0, GROUPS)
    there = (group < groups)[:, None] & is_channel[None, :]
    count = tl.where(group < groups, _counts(group, groups, rows, TILE), 0).to(tl.float32)[:, None]
    at = ((number * groups + group) * 2)[:, None] * channels + c[None, :]
    means = tl.load(parts + at, mask=there, other=0.0)
    inner = tl.load(parts + at + channels, mask=there, other=0.0)
    mean = tl.sum(means * count, 0) / rows
    away = means - mean[None, :]
    squares = tl.maximum(tl.sum(tl.where(there, inner + away * away * count, 0.0), 0), 0.0)
    inverse = 1.0 / tl.sqrt(squares / rows + eps)
    scale = weight * inverse
    tl.store(affine + 2 * number * channels + c, scale, mask=is_channel)
    tl.store(affine + (2 * number + 1) * channels + c, bias - mean * scale, mask=is_channel)
    moments += 3 * number * channels
    tl.store(moments + c, mean, mask=is_channel)
    tl.store(moments + channels + c, inverse, mask=is_channel)
    tl.store(moments + 2 * channels + c, squares / tl.maximum(rows - 1, 1), mask=is_channel)


@triton.jit
def _join(
    ys,
    strides,
    affine,
    lengths,
    seed,
    out,
    rows,
    channels,
    time,
    threshold,
    factor,
    NUM: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
    HAS_LENGTHS: tl.constexpr,
    HAS_DROPOUT: tl.constexpr,
):
    place, block = _place(channels, CHANNELS)
    c = block * CHANNELS + tl.arange(0, CHANNELS)
    row = place * ROWS + tl.arange(0, ROWS)
    there = _there(row, c, rows, channels)
    held = there & _held(row, rows, lengths, time, HAS_LENGTHS)[:, None]
    total = tl.zeros([ROWS, CHANNELS], tl.float32)
    for number in tl.static_range(NUM):
        scale = tl.load(affine + (2 * number) * channels + c, mask=c < channels, other=0.0)
        shift = tl.load(affine + (2 * number + 1) * channels + c, mask=c < channels, other=0.0)
        values = tl.load(ys[number] + _tile(row, c, strides[number]), mask=held, other=0.0).to(tl.float32)
        total += values * scale[None, :] + shift[None, :]
    total = tl.where(held, tl.maximum(total, 0.0), 0.0)
    if HAS_DROPOUT:
        # Two neighbours share 32 bits, which are most of the arithmetic of this kernel.
        pair = block * (CHANNELS // 2) + tl.arange(0, CHANNELS // 2)
        number = row[:, None] * tl.cdiv(channels, 2) + pair[None, :]
        drawn = _mixed(_mixed(number.to(tl.uint32) ^ tl.load(seed).to(tl.uint32)) + tl.load(seed + 1).to(tl.uint32))
        is_kept = tl.interleave(drawn & 0xFFFF, drawn >> 16) >= threshold
        total = tl.where(is_kept, total * factor, 0.0)
    tl.store(out + _tile(row, c, channels), total.to(tl.bfloat16), mask=there)


@triton.jit
def _gradient(g, out, offset, held, factor):
    """The gradient before ReLU and dropout: what either has made zero has none."""
    gradient = tl.load(g + offset, mask=held, other=0.0).to(tl.float32)
    alive = tl.load(out + offset, mask=held, other=0.0).to(tl.float32) > 0.0
    return tl.where(alive, gradient * factor, 0.0)


@triton.jit
def _sums(
    g,
    out,
    ys,
    strides,
    moments,
    lengths,
    parts,
    rows,
    channels,
    time,
    groups,
    factor,
    NUM: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
    HAS_LENGTHS: tl.constexpr,
):
    """Of the gradient, and of the gradient times (y - mean) of each."""
    group, block = _place(channels, CHANNELS)
    c = block * CHANNELS + tl.arange(0, CHANNELS)
    tiles = tl.cdiv(rows, ROWS)
    means = ()
    slopes = ()
    for number in tl.static_range(NUM):
        means = means + (tl.load(moments + (3 * number) * channels + c, mask=c < channels, other=0.0),)  # type: ignore[assignment]
        slopes = slopes + (tl.zeros([ROWS, CHANNELS], tl.float32),)  # type: ignore[assignment]
    level = tl.zeros([ROWS, CHANNELS], tl.float32)
    for before in tl.range(group, tiles, groups, num_stages=SUM_STAGES):
        row = (tiles - 1 - before) * ROWS + tl.arange(0, ROWS)
        held = _there(row, c, rows, channels) & _held(row, rows, lengths, time, HAS_LENGTHS)[:, None]
        h = _gradient(g, out, _tile(row, c, channels), held, factor)
        level += h
        summed = ()
        for number in tl.static_range(NUM):
            values = tl.load(ys[number] + _tile(row, c, strides[number]), mask=held, other=0.0).to(tl.float32)
            summed = summed + (slopes[number] + h * (values - means[number][None, :]),)  # type: ignore[assignment]
        slopes = summed
    base = parts + group * (NUM + 1) * channels + c
    tl.store(base, tl.sum(level, 0), mask=c < channels)
    for number in tl.static_range(NUM):
        tl.store(base + (number + 1) * channels, tl.sum(slopes[number], 0), mask=c < channels)


@triton.jit
def _totals(
    parts,
    moments,
    of_weights,
    of_biases,
    channels,
    groups,
    NUM: tl.constexpr,
    GROUPS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Of one input: the gradients of its weight and of its bias, from the parts of all groups."""
    c = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    is_channel = c < channels
    number = tl.program_id(1)
    group = tl.arange(0, GROUPS)
    there = (group < groups)[:, None] & is_channel[None, :]
    at = parts + (group * (NUM + 1))[:, None] * channels + c[None, :]
    level = tl.sum(tl.load(at, mask=there, other=0.0), 0)
    slope = tl.sum(tl.load(at + (number + 1) * channels, mask=there, other=0.0), 0)
    inverse = tl.load(moments + (3 * number + 1) * channels + c, mask=is_channel, other=0.0)
    tl.store(of_weights + number * channels + c, slope * inverse, mask=is_channel)
    tl.store(of_biases + number * channels + c, level, mask=is_channel)


@triton.jit
def _apply(
    g,
    out,
    ys,
    strides,
    gradients,
    affine,
    moments,
    of_weights,
    of_biases,
    lengths,
    rows,
    channels,
    time,
    factor,
    NUM: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
    HAS_LENGTHS: tl.constexpr,
):
    """Behind a length, where the gradient is zero, the statistics still have one.

    A gradient lies as its input, and may take its place.
    """
    place, block = _place(channels, CHANNELS)
    c = block * CHANNELS + tl.arange(0, CHANNELS)
    row = place * ROWS + tl.arange(0, ROWS)
    there = _there(row, c, rows, channels)
    held = there & _held(row, rows, lengths, time, HAS_LENGTHS)[:, None]
    h = _gradient(g, out, _tile(row, c, channels), held, factor)
    level = tl.load(of_biases + c, mask=c < channels, other=0.0) / rows
    for number in tl.static_range(NUM):
        scale = tl.load(affine + (2 * number) * channels + c, mask=c < channels, other=0.0)
        mean = tl.load(moments + (3 * number) * channels + c, mask=c < channels, other=0.0)
        inverse = tl.load(moments + (3 * number + 1) * channels + c, mask=c < channels, other=0.0)
        steep = tl.load(of_weights + number * channels + c, mask=c < channels, other=0.0) * inverse / rows
        offset = _tile(row, c, strides[number])
        values = tl.load(ys[number] + offset, mask=there, other=0.0).to(tl.float32)
        result = scale[None, :] * (h - level[None, :] - (values - mean[None, :]) * steep[None, :])
        tl.store(gradients[number] + offset, result.to(tl.bfloat16), mask=there)


def groups_of(rows: int, channels: int, tile: int, programs: int) -> int:
    """Return among how many groups tiles of rows are dealt out: at most so many programs, each with a tile at least,
    and not more groups than are added up at once."""
    blocks = triton.cdiv(channels, CHANNELS)
    return max(1, min(MOST_GROUPS, programs // int(blocks), int(triton.cdiv(rows, tile))))


def statistics(
    ys: Sequence[Tensor],
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    eps: float,
    affine: Tensor,
    moments: Tensor,
) -> None:
    """Write scale and shift, (number, 2, channel), and mean, 1 / standard deviation and unbiased variance, (number, 3,
    channel), of all `ys`."""
    y, num = ys[0], len(ys)
    channels = y.shape[-1]
    rows = y.numel() // channels
    groups = groups_of(rows, channels, SUMMED_ROWS, 4 * MULTIPROCESSORS)
    parts = torch.empty(num, groups, 2, channels, dtype=torch.float32, device=y.device)
    grid = (groups * triton.cdiv(channels, CHANNELS),)
    _moments[grid](
        tuple(ys), strides_of(ys), parts, rows, channels, groups, NUM=num, ROWS=SUMMED_ROWS, CHANNELS=CHANNELS
    )
    _combine[(triton.cdiv(channels, 16), num)](
        parts,
        tuple(weights),
        tuple(biases),
        affine,
        moments,
        rows,
        channels,
        groups,
        eps,
        NUM=num,
        GROUPS=triton.next_power_of_2(groups),
        CHANNELS=16,
        TILE=SUMMED_ROWS,
    )


def join(
    ys: Sequence[Tensor],
    affine: Tensor,
    lengths: Tensor | None,
    seed: Tensor | None,
    threshold: int,
    factor: float,
) -> Tensor:
    """Dropout of ReLU of the sum of what is batch-normed, zero behind each length."""
    y = ys[0]
    out = y.new_empty(y.shape)
    channels = y.shape[-1]
    rows = y.numel() // channels
    _join[(triton.cdiv(rows, JOINED_ROWS) * triton.cdiv(channels, CHANNELS),)](
        tuple(ys),
        strides_of(ys),
        affine,
        affine if lengths is None else lengths,
        affine if seed is None else seed,
        out,
        rows,
        channels,
        y.shape[1],
        threshold,
        factor,
        NUM=len(ys),
        ROWS=JOINED_ROWS,
        CHANNELS=CHANNELS,
        HAS_LENGTHS=lengths is not None,
        HAS_DROPOUT=seed is not None,
    )
    return out


def join_backward(
    g: Tensor,
    out: Tensor,
    ys: Sequence[Tensor],
    affine: Tensor,
    moments: Tensor,
    lengths: Tensor | None,
    factor: float,
    gradients: Sequence[Tensor],
) -> tuple[Tensor, Tensor]:
    """Write the gradients of all `ys`, each with the strides of its input; return those of weights and of biases,
    (number, channel) each."""
    assert strides_of(gradients) == strides_of(ys)
    y, num = ys[0], len(ys)
    channels = y.shape[-1]
    rows = y.numel() // channels
    tile, summed = _tile_rows(num), _summed_rows(num)
    groups = groups_of(rows, channels, summed, 4 * MULTIPROCESSORS)
    parts = torch.empty(groups, num + 1, channels, dtype=torch.float32, device=y.device)
    of_weights, of_biases = torch.empty(2, num, channels, dtype=torch.float32, device=y.device).unbind()
    blocks, strides = triton.cdiv(channels, CHANNELS), strides_of(ys)
    mask = affine if lengths is None else lengths
    common: dict[str, Any] = {"NUM": num, "CHANNELS": CHANNELS, "HAS_LENGTHS": lengths is not None}
    _sums[(groups * blocks,)](
        *(g, out, tuple(ys), strides, moments, mask, parts, rows, channels, y.shape[1], groups, factor),
        ROWS=summed,
        **common,
    )
    _totals[(triton.cdiv(channels, 16), num)](
        *(parts, moments, of_weights, of_biases, channels, groups),
        NUM=num,
        GROUPS=triton.next_power_of_2(groups),
        CHANNELS=16,
    )
    _apply[(triton.cdiv(rows, tile) * blocks,)](
        *(g, out, tuple(ys), strides, tuple(gradients), affine, moments, of_weights, of_biases),
        *(mask, rows, channels, y.shape[1], factor),
        ROWS=tile,
        **common,
    )
    return of_weights, of_biases


def strides_of(ys: Sequence[Tensor]) -> tuple[int, ...]:
    """Return how far apart the rows of each input lie: evenly, through all utterances."""
    for y in ys:
        assert y.stride(2) == 1
        assert len(y) == 1 or y.stride(0) == y.shape[1] * y.stride(1)
    return tuple(y.stride(1) for y in ys)


def _summed_rows(num: int) -> int:
    """Rows of a tile of a sum: with many inputs, each of which has one of its own and is fetched ahead, few, so that
    registers and shared memory suffice."""
    return 32 if num <= 2 else 16 if num <= 16 else 8


def _tile_rows(num: int) -> int:
    """Rows of a tile of gradients: as many as one can, since each tile fetches its channels' figures anew."""
    return 64 if num <= 2 else 32
