"""Batch norm, ReLU, dropout and mask of rows of channels: the kernels behind `row_norm`.

Rows are (batch, time, channels) in bfloat16, a frame's channels side by side, as the library's convolutions want them.
Every frame counts in the batch statistics, also behind a length, as in the plain module. Sums are in float32 and in a
fixed order, without atomics: the same inputs give the same bits.
"""

# ruff: noqa: RUF005 (Triton knows no unpacking)
from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

CHANNELS = 64
"""Channels that one program reads: a cache line of bfloat16."""
MOST_GROUPS = 256
MULTIPROCESSORS = 132
"""Of an H200: a kernel with sums has as many programs as run there at a time."""


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
def _tile(row, rows, channels, CHANNELS: tl.constexpr):
    """Offsets of a tile, and which of them are there."""
    c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    there = (row < rows)[:, None] & (c < channels)[None, :]
    return c, row[:, None] * channels + c[None, :], there


@triton.jit
def _held(row, rows, lengths, time, HAS_LENGTHS: tl.constexpr):
    """Rows that belong to an utterance."""
    held = row < rows
    if HAS_LENGTHS:
        utterance = row // time
        held = held & (row - utterance * time < tl.load(lengths + utterance, mask=held, other=0))
    return held


@triton.jit
def _moments(y, parts, rows, channels, rows_each, ROWS: tl.constexpr, CHANNELS: tl.constexpr):
    """Mean, and sum of squares about it, of the rows of each program."""
    group = tl.program_id(0)
    first = group * rows_each
    count = tl.minimum(rows - first, rows_each)
    c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    # Squares about one of the values, which is as far from their mean as they are: little cancels.
    about = tl.load(y + first * channels + c, mask=c < channels, other=0.0).to(tl.float32)
    total = tl.zeros([ROWS, CHANNELS], tl.float32)
    squares = tl.zeros([ROWS, CHANNELS], tl.float32)
    for start in range(first, first + count, 2 * ROWS):
        # Two tiles are asked for before the first one is used.
        _, offset, there = _tile(start + tl.arange(0, ROWS), rows, channels, CHANNELS)
        _, offset_2, there_2 = _tile(start + ROWS + tl.arange(0, ROWS), rows, channels, CHANNELS)
        values = tl.load(y + offset, mask=there, other=0.0)
        values_2 = tl.load(y + offset_2, mask=there_2, other=0.0)
        away = tl.where(there, values.to(tl.float32) - about[None, :], 0.0)
        away_2 = tl.where(there_2, values_2.to(tl.float32) - about[None, :], 0.0)
        total += away + away_2
        squares += away * away + away_2 * away_2
    shift = tl.sum(total, 0) / count
    inner = tl.sum(squares, 0) - shift * shift * count
    tl.store(parts + (group * 2) * channels + c, about + shift, mask=c < channels)
    tl.store(parts + (group * 2 + 1) * channels + c, inner, mask=c < channels)


@triton.jit
def _combine(
    parts,
    weight,
    bias,
    affine,
    moments,
    rows,
    channels,
    rows_each,
    groups,
    eps,
    GROUPS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    c = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    group = tl.arange(0, GROUPS)
    there = (group < groups)[:, None] & (c < channels)[None, :]
    count = tl.where(group < groups, tl.minimum(rows - group * rows_each, rows_each), 0).to(tl.float32)[:, None]
    at = (group * 2)[:, None] * channels + c[None, :]
    means = tl.load(parts + at, mask=there, other=0.0)
    inner = tl.load(parts + at + channels, mask=there, other=0.0)
    # Chan's rule.
    mean = tl.sum(means * count, 0) / rows
    away = means - mean[None, :]
    squares = tl.maximum(tl.sum(tl.where(there, inner + away * away * count, 0.0), 0), 0.0)
    inverse = 1.0 / tl.sqrt(squares / rows + eps)
    is_channel = c < channels
    scale = tl.load(weight + c, mask=is_channel, other=0.0) * inverse
    tl.store(affine + c, scale, mask=is_channel)
    tl.store(affine + channels + c, tl.load(bias + c, mask=is_channel, other=0.0) - mean * scale, mask=is_channel)
    tl.store(moments + c, mean, mask=is_channel)
    tl.store(moments + channels + c, inverse, mask=is_channel)
    tl.store(moments + 2 * channels + c, squares / tl.maximum(rows - 1, 1), mask=is_channel)


@triton.jit
def _join(
    ys,
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
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    c, offset, there = _tile(row, rows, channels, CHANNELS)
    held = there & _held(row, rows, lengths, time, HAS_LENGTHS)[:, None]
    total = tl.zeros([ROWS, CHANNELS], tl.float32)
    for number in tl.static_range(NUM):
        scale = tl.load(affine + (2 * number) * channels + c, mask=c < channels, other=0.0)
        shift = tl.load(affine + (2 * number + 1) * channels + c, mask=c < channels, other=0.0)
        values = tl.load(ys[number] + offset, mask=held, other=0.0).to(tl.float32)
        total += values * scale[None, :] + shift[None, :]
    total = tl.where(held, tl.maximum(total, 0.0), 0.0)
    if HAS_DROPOUT:
        drawn = _mixed(_mixed(offset.to(tl.uint32) ^ tl.load(seed).to(tl.uint32)) + tl.load(seed + 1).to(tl.uint32))
        total = tl.where(drawn >= threshold.to(tl.uint32), total * factor, 0.0)
    tl.store(out + offset, total.to(tl.bfloat16), mask=there)


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
    moments,
    lengths,
    parts,
    rows,
    channels,
    time,
    rows_each,
    factor,
    NUM: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
    HAS_LENGTHS: tl.constexpr,
):
    """Of the gradient, and of the gradient times (y - mean) of each."""
    group = tl.program_id(0)
    first = group * rows_each
    c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    means = ()
    slopes = ()
    for number in tl.static_range(NUM):
        means = means + (tl.load(moments + (3 * number) * channels + c, mask=c < channels, other=0.0),)  # type: ignore[assignment]
        slopes = slopes + (tl.zeros([ROWS, CHANNELS], tl.float32),)  # type: ignore[assignment]
    level = tl.zeros([ROWS, CHANNELS], tl.float32)
    for start in range(first, tl.minimum(first + rows_each, rows), ROWS):
        row = start + tl.arange(0, ROWS)
        _, offset, there = _tile(row, rows, channels, CHANNELS)
        held = there & _held(row, rows, lengths, time, HAS_LENGTHS)[:, None]
        h = _gradient(g, out, offset, held, factor)
        level += h
        summed = ()
        for number in tl.static_range(NUM):
            values = tl.load(ys[number] + offset, mask=held, other=0.0).to(tl.float32)
            summed = summed + (slopes[number] + h * (values - means[number][None, :]),)  # type: ignore[assignment]
        slopes = summed
    base = parts + group * (NUM + 1) * channels + c
    tl.store(base, tl.sum(level, 0), mask=c < channels)
    for number in tl.static_range(NUM):
        tl.store(base + (number + 1) * channels, tl.sum(slopes[number], 0), mask=c < channels)


@triton.jit
def _apply(
    g,
    out,
    ys,
    gradients,
    affine,
    moments,
    sums,
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
    """Behind a length, where the gradient is zero, the statistics still have one."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    c, offset, there = _tile(row, rows, channels, CHANNELS)
    held = there & _held(row, rows, lengths, time, HAS_LENGTHS)[:, None]
    h = _gradient(g, out, offset, held, factor)
    level = tl.load(sums + c, mask=c < channels, other=0.0) / rows
    for number in tl.static_range(NUM):
        scale = tl.load(affine + (2 * number) * channels + c, mask=c < channels, other=0.0)
        mean = tl.load(moments + (3 * number) * channels + c, mask=c < channels, other=0.0)
        inverse = tl.load(moments + (3 * number + 1) * channels + c, mask=c < channels, other=0.0)
        slope = tl.load(sums + (number + 1) * channels + c, mask=c < channels, other=0.0)
        steep = slope * inverse * inverse / rows
        values = tl.load(ys[number] + offset, mask=there, other=0.0).to(tl.float32)
        result = scale[None, :] * (h - level[None, :] - (values - mean[None, :]) * steep[None, :])
        tl.store(gradients[number] + offset, result.to(tl.bfloat16), mask=there)


class Cut(NamedTuple):
    """Division of rows among the programs of a sum."""

    groups: int
    rows_each: int


def cut(rows: int, channels: int, rows_at_once: int, programs: int) -> Cut:
    """At most so many programs, in whole tiles, and not more groups than are added up at once."""
    blocks = triton.cdiv(channels, CHANNELS)
    wanted = max(1, min(MOST_GROUPS, programs // blocks))
    rows_each = triton.cdiv(triton.cdiv(rows, wanted), rows_at_once) * rows_at_once
    return Cut(triton.cdiv(rows, rows_each), rows_each)


def statistics(y: Tensor, weight: Tensor, bias: Tensor, eps: float, affine: Tensor, moments: Tensor) -> None:
    """Write scale and shift (2, channel), and mean, 1 / standard deviation and unbiased variance (3, channel)."""
    channels = y.shape[-1]
    rows = y.numel() // channels
    groups, rows_each = cut(rows, channels, 2 * 32, 7 * MULTIPROCESSORS)
    parts = torch.empty(groups, 2, channels, dtype=torch.float32, device=y.device)
    grid = (groups, triton.cdiv(channels, CHANNELS))
    _moments[grid](y, parts, rows, channels, rows_each, ROWS=32, CHANNELS=CHANNELS)
    _combine[(triton.cdiv(channels, 16),)](
        parts,
        weight,
        bias,
        affine,
        moments,
        rows,
        channels,
        rows_each,
        groups,
        eps,
        GROUPS=triton.next_power_of_2(groups),
        CHANNELS=16,
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
    out = torch.empty_like(y)
    channels = y.shape[-1]
    rows, tile = y.numel() // channels, _tile_rows(len(ys))
    _join[(triton.cdiv(rows, tile), triton.cdiv(channels, CHANNELS))](
        tuple(ys),
        affine,
        affine if lengths is None else lengths,
        affine if seed is None else seed,
        out,
        rows,
        channels,
        y.shape[1],
        # As a number of 32 bits without a sign, which an argument is only if its value says so.
        threshold - 2**32 if threshold >= 2**31 else threshold,
        factor,
        NUM=len(ys),
        ROWS=tile,
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
) -> tuple[list[Tensor], Tensor]:
    """Gradients of all `ys`, and (1 + number, channel): sums of the gradient, and of it times (y - mean) of each."""
    y, num = ys[0], len(ys)
    channels = y.shape[-1]
    rows = y.numel() // channels
    tile, summed = _tile_rows(num), _summed_rows(num)
    groups, rows_each = cut(rows, channels, summed, 4 * MULTIPROCESSORS)
    parts = torch.empty(groups, num + 1, channels, dtype=torch.float32, device=y.device)
    blocks = triton.cdiv(channels, CHANNELS)
    mask = affine if lengths is None else lengths
    common: dict[str, Any] = {"NUM": num, "CHANNELS": CHANNELS, "HAS_LENGTHS": lengths is not None}
    _sums[(groups, blocks)](
        g, out, tuple(ys), moments, mask, parts, rows, channels, y.shape[1], rows_each, factor, ROWS=summed, **common
    )
    sums = parts.sum(0)
    gradients = [torch.empty_like(each) for each in ys]
    _apply[(triton.cdiv(rows, tile), blocks)](
        *(g, out, tuple(ys), tuple(gradients), affine, moments, sums, mask, rows, channels, y.shape[1], factor),
        ROWS=tile,
        **common,
    )
    return gradients, sums


def _summed_rows(num: int) -> int:
    """Rows of a tile of a sum: with many inputs, each of which has one of its own, few, so that registers suffice."""
    return {1: 64, 2: 32}.get(num, 16)


def _tile_rows(num: int) -> int:
    """Rows of a tile of what has no sums: as many as one can, since each tile fetches its channels' figures anew."""
    return 64 if num <= 2 else 32
