"""The convolution module of a Conformer between its two products: kernels behind `gated_conv`.

Activations are (batch, time, channel), channels side by side. The gate and its mask are one pass; the depthwise
convolution and the sums of its batch norm another; batch norm and swish the third. Backward: sums, batch norm, then the
depthwise convolution with the gate and all of their sums. Nothing is added by atomics.
"""

# ruff: noqa: RUF005 (Triton knows no unpacking)
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.recipes.speech.kernels.conformer.residual_rows import GROUPS

TIMES, CHANNELS = 8, 64
"""Of a tile."""
MOST_TAPS = 9
"""Of which a program keeps the sums."""


@triton.jit
def _gate(y, lengths, out, rows, time, channels, ROWS: tl.constexpr, CHANNELS: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    there = (row < rows)[:, None] & (c < channels)[None, :]
    b = row // time
    held = there & (row - b * time < tl.load(lengths + b, mask=row < rows, other=0))[:, None]
    at = row.to(tl.int64)[:, None] * (2 * channels) + c[None, :]
    value = tl.load(y + at, mask=held, other=0.0).to(tl.float32)
    opened = tl.sigmoid(tl.load(y + at + channels, mask=held, other=0.0).to(tl.float32))
    result = tl.where(held, value * opened, 0.0)
    tl.store(out + row.to(tl.int64)[:, None] * channels + c[None, :], result.to(out.dtype.element_ty), mask=there)


@triton.jit
def _depthwise(
    u, lengths, weight, bias, out, parts, batch, time, channels, blocks, blocks_each,
    COUNTS_ALL: tl.constexpr, KERNEL: tl.constexpr, TIMES: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """`weight` is (KERNEL, channels). Sums are of what the bias is added to, of frames that count: (2, channels)."""
    group = tl.program_id(0)
    c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    is_channel = c < channels
    shift = tl.load(bias + c, mask=is_channel, other=0.0)
    sums = tl.zeros([TIMES, CHANNELS], tl.float32)
    squares = tl.zeros([TIMES, CHANNELS], tl.float32)
    counted = tl.zeros([TIMES], tl.float32)
    begin = group * blocks_each
    blocks_of_one = (time + TIMES - 1) // TIMES
    for block in range(begin, tl.minimum(begin + blocks_each, blocks)):
        b = block // blocks_of_one
        t = (block % blocks_of_one) * TIMES + tl.arange(0, TIMES)
        length = tl.load(lengths + b)
        total = tl.zeros([TIMES, CHANNELS], tl.float32)
        for tap in tl.static_range(KERNEL):
            t_in = t + tap - KERNEL // 2
            there = ((t_in >= 0) & (t_in < length))[:, None] & is_channel[None, :]
            at = (b * time + t_in).to(tl.int64)[:, None] * channels + c[None, :]
            values = tl.load(u + at, mask=there, other=0.0).to(tl.float32)
            total += values * tl.load(weight + tap * channels + c, mask=is_channel, other=0.0)[None, :]
        if COUNTS_ALL:  # noqa: SIM108 (Triton would compute both)
            counts = t < time
        else:
            counts = t < length
        inside = (t < time)[:, None] & is_channel[None, :]
        at = (b * time + t).to(tl.int64)[:, None] * channels + c[None, :]
        narrow = (total + shift[None, :]).to(out.dtype.element_ty)
        tl.store(out + at, narrow, mask=inside)
        away = tl.where(counts[:, None], narrow.to(tl.float32) - shift[None, :], 0.0)
        sums += away
        squares += away * away
        counted += tl.where(counts, 1.0, 0.0)
    base = parts + group * 3 * channels + c
    tl.store(base, tl.sum(sums, 0), mask=is_channel)
    tl.store(base + channels, tl.sum(squares, 0), mask=is_channel)
    tl.store(base + 2 * channels, tl.zeros([CHANNELS], tl.float32) + tl.sum(counted, 0), mask=is_channel)


@triton.jit
def _combine(
    parts, shift, weight, bias, affine, moments, channels, groups, eps, GROUPS: tl.constexpr, CHANNELS: tl.constexpr
):
    """Chan's rule over the groups."""
    c = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    is_channel = c < channels
    group = tl.arange(0, GROUPS)
    there = (group < groups)[:, None] & is_channel[None, :]
    at = parts + (group * 3)[:, None] * channels + c[None, :]
    sums = tl.load(at, mask=there, other=0.0)
    squares = tl.load(at + channels, mask=there, other=0.0)
    count = tl.load(at + 2 * channels, mask=there, other=0.0)
    size = tl.maximum(tl.sum(count, 0), 1.0)
    mean_each = sums / tl.maximum(count, 1.0)
    mean = tl.sum(sums, 0) / size
    away = mean_each - mean[None, :]
    inner = tl.maximum(tl.sum(squares - sums * mean_each + away * away * count, 0), 0.0)
    inverse = 1.0 / tl.sqrt(inner / size + eps)
    mean += tl.load(shift + c, mask=is_channel, other=0.0)
    scale = tl.load(weight + c, mask=is_channel, other=0.0) * inverse
    tl.store(affine + c, scale, mask=is_channel)
    tl.store(affine + channels + c, tl.load(bias + c, mask=is_channel, other=0.0) - mean * scale, mask=is_channel)
    tl.store(moments + c, mean, mask=is_channel)
    tl.store(moments + channels + c, inverse, mask=is_channel)
    tl.store(moments + 2 * channels + c, inner / tl.maximum(size - 1.0, 1.0), mask=is_channel)
    tl.store(moments + 3 * channels + c, size, mask=is_channel)


@triton.jit
def _swished(z, affine, out, rows, channels, ROWS: tl.constexpr, CHANNELS: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    there = (row < rows)[:, None] & (c < channels)[None, :]
    at = row.to(tl.int64)[:, None] * channels + c[None, :]
    scale = tl.load(affine + c, mask=c < channels, other=0.0)
    shift = tl.load(affine + channels + c, mask=c < channels, other=0.0)
    value = tl.load(z + at, mask=there, other=0.0).to(tl.float32) * scale[None, :] + shift[None, :]
    tl.store(out + at, (value * tl.sigmoid(value)).to(out.dtype.element_ty), mask=there)


@triton.jit
def _before_swish(g, z, at, there, scale, shift):
    """Gradient of the batch norm's output, and the input."""
    value = tl.load(z + at, mask=there, other=0.0).to(tl.float32)
    upper = tl.load(g + at, mask=there, other=0.0).to(tl.float32)
    normed = value * scale[None, :] + shift[None, :]
    opened = tl.sigmoid(normed)
    return upper * (opened + normed * opened * (1.0 - opened)), value


@triton.jit
def _norm_sums(
    g, z, affine, moments, lengths, parts, rows, time, channels, rows_each, ROWS: tl.constexpr, CHANNELS: tl.constexpr
):
    """Of the gradient behind batch norm, and of it times the distance from the mean: (2, channels)."""
    group = tl.program_id(0)
    c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    is_channel = c < channels
    scale = tl.load(affine + c, mask=is_channel, other=0.0)
    shift = tl.load(affine + channels + c, mask=is_channel, other=0.0)
    mean = tl.load(moments + c, mask=is_channel, other=0.0)
    level = tl.zeros([ROWS, CHANNELS], tl.float32)
    tilt = tl.zeros([ROWS, CHANNELS], tl.float32)
    begin = group * rows_each
    for start in range(begin, tl.minimum(begin + rows_each, rows), ROWS):
        row = start + tl.arange(0, ROWS)
        b = row // time
        held = row - b * time < tl.load(lengths + b, mask=row < rows, other=0)
        there = held[:, None] & is_channel[None, :]
        h, value = _before_swish(g, z, row.to(tl.int64)[:, None] * channels + c[None, :], there, scale, shift)
        h = tl.where(there, h, 0.0)
        level += h
        tilt += h * (value - mean[None, :])
    base = parts + group * 2 * channels + c
    tl.store(base, tl.sum(level, 0), mask=is_channel)
    tl.store(base + channels, tl.sum(tilt, 0), mask=is_channel)


@triton.jit
def _norm_gradient(
    g, z, affine, moments, sums, lengths, of_z, rows, time, channels,
    COUNTS_ALL: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    is_channel = c < channels
    inside = (row < rows)[:, None] & is_channel[None, :]
    b = row // time
    held = row - b * time < tl.load(lengths + b, mask=row < rows, other=0)
    scale = tl.load(affine + c, mask=is_channel, other=0.0)
    shift = tl.load(affine + channels + c, mask=is_channel, other=0.0)
    mean = tl.load(moments + c, mask=is_channel, other=0.0)
    inverse = tl.load(moments + channels + c, mask=is_channel, other=0.0)
    size = tl.load(moments + 3 * channels + c, mask=is_channel, other=1.0)
    level = tl.load(sums + c, mask=is_channel, other=0.0) / size
    steep = tl.load(sums + channels + c, mask=is_channel, other=0.0) * inverse * inverse / size
    at = row.to(tl.int64)[:, None] * channels + c[None, :]
    h, value = _before_swish(g, z, at, inside, scale, shift)
    h = tl.where(held[:, None], h, 0.0)
    found = scale[None, :] * (h - level[None, :] - (value - mean[None, :]) * steep[None, :])
    if not COUNTS_ALL:
        found = tl.where(held[:, None], found, 0.0)
    tl.store(of_z + at, found.to(of_z.dtype.element_ty), mask=inside)


@triton.jit
def _depthwise_backward(
    g, y, lengths, weight, of_y, parts, parts_stride, time, channels, blocks, blocks_each,
    KERNEL: tl.constexpr, TIMES: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Gradients before the gate; sums: (3, channels) of `g`, and of both halves of what is found."""
    group = tl.program_id(0)
    c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    is_channel = c < channels
    of_values = tl.zeros([TIMES, CHANNELS], tl.float32)
    of_gates = tl.zeros([TIMES, CHANNELS], tl.float32)
    of_bias = tl.zeros([TIMES, CHANNELS], tl.float32)
    begin = group * blocks_each
    blocks_of_one = (time + TIMES - 1) // TIMES
    for block in range(begin, tl.minimum(begin + blocks_each, blocks)):
        b = block // blocks_of_one
        t = (block % blocks_of_one) * TIMES + tl.arange(0, TIMES)
        held = (t < tl.load(lengths + b))[:, None] & is_channel[None, :]
        inside = (t < time)[:, None] & is_channel[None, :]
        at = (b * time + t).to(tl.int64)[:, None] * (2 * channels) + c[None, :]
        value = tl.load(y + at, mask=held, other=0.0).to(tl.float32)
        opened = tl.sigmoid(tl.load(y + at + channels, mask=held, other=0.0).to(tl.float32))
        total = tl.zeros([TIMES, CHANNELS], tl.float32)
        for tap in tl.static_range(KERNEL):
            t_out = t - tap + KERNEL // 2
            there = ((t_out >= 0) & (t_out < time))[:, None] & is_channel[None, :]
            g_at = (b * time + t_out).to(tl.int64)[:, None] * channels + c[None, :]
            upper = tl.load(g + g_at, mask=there, other=0.0).to(tl.float32)
            total += upper * tl.load(weight + tap * channels + c, mask=is_channel, other=0.0)[None, :]
            if tap == KERNEL // 2:
                of_bias += tl.where(inside, upper, 0.0)
        total = tl.where(held, total, 0.0)
        of_value = total * opened
        of_gate = of_value * value * (1.0 - opened)
        of_values += of_value
        of_gates += of_gate
        tl.store(of_y + at, of_value.to(of_y.dtype.element_ty), mask=inside)
        tl.store(of_y + at + channels, of_gate.to(of_y.dtype.element_ty), mask=inside)
    base = parts + group * parts_stride + c
    tl.store(base, tl.sum(of_bias, 0), mask=is_channel)
    tl.store(base + channels, tl.sum(of_values, 0), mask=is_channel)
    tl.store(base + 2 * channels, tl.sum(of_gates, 0), mask=is_channel)


@triton.jit
def _of_taps(
    g, u, lengths, parts, parts_stride, time, channels, blocks, blocks_each,
    KERNEL: tl.constexpr, TAPS: tl.constexpr, TIMES: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Sums for some of the taps: (TAPS, channels)."""
    group = tl.program_id(0)
    c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    first = tl.program_id(2) * TAPS
    is_channel = c < channels
    sums = ()
    for _ in tl.static_range(TAPS):
        sums = sums + (tl.zeros([TIMES, CHANNELS], tl.float32),)  # type: ignore[assignment]
    begin = group * blocks_each
    blocks_of_one = (time + TIMES - 1) // TIMES
    for block in range(begin, tl.minimum(begin + blocks_each, blocks)):
        b = block // blocks_of_one
        t = (block % blocks_of_one) * TIMES + tl.arange(0, TIMES)
        held = (t < tl.load(lengths + b))[:, None] & is_channel[None, :]
        at = (b * time + t).to(tl.int64)[:, None] * channels + c[None, :]
        value = tl.load(u + at, mask=held, other=0.0).to(tl.float32)
        added = ()
        for number in tl.static_range(TAPS):
            t_out = t - (first + number) + KERNEL // 2
            there = ((t_out >= 0) & (t_out < time))[:, None] & is_channel[None, :]
            g_at = (b * time + t_out).to(tl.int64)[:, None] * channels + c[None, :]
            upper = tl.load(g + g_at, mask=there, other=0.0).to(tl.float32)
            added = added + (sums[number] + upper * value,)  # type: ignore[assignment]
        sums = added
    base = parts + group * parts_stride + c
    for number in tl.static_range(TAPS):
        tap = first + number
        tl.store(base + tap * channels, tl.sum(sums[number], 0), mask=is_channel & (tap < KERNEL))


def gate(y: Tensor, lengths: Tensor) -> Tensor:
    """As `gated_conv.gate`."""
    batch, time, double = y.shape
    channels = double // 2
    out = torch.empty(batch, time, channels, dtype=y.dtype, device=y.device)
    rows = batch * time
    _gate[(triton.cdiv(rows, 8), triton.cdiv(channels, 256))](
        y, lengths, out, rows, time, channels, ROWS=8, CHANNELS=256, num_warps=8
    )
    return out


def _cut(batch: int, time: int) -> tuple[int, int]:
    """Return the number of blocks of frames, and of those that a program goes through."""
    blocks = batch * triton.cdiv(time, TIMES)
    return blocks, triton.cdiv(blocks, GROUPS)


def depthwise(
    u: Tensor, lengths: Tensor, weight: Tensor, bias: Tensor, norm: tuple[Tensor, Tensor], eps: float, counts_all: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """As `gated_conv.depthwise`."""
    batch, time, channels = u.shape
    out = torch.empty_like(u)
    parts = torch.empty(GROUPS, 3, channels, dtype=torch.float32, device=u.device)
    blocks, each = _cut(batch, time)
    _depthwise[(GROUPS, triton.cdiv(channels, CHANNELS))](
        u, lengths, weight, bias, out, parts, batch, time, channels, blocks, each,
        COUNTS_ALL=counts_all, KERNEL=weight.shape[0], TIMES=TIMES, CHANNELS=CHANNELS, num_warps=4,
    )  # fmt: skip
    affine = torch.empty(2, channels, dtype=torch.float32, device=u.device)
    moments = torch.empty(4, channels, dtype=torch.float32, device=u.device)
    _combine[(triton.cdiv(channels, 8),)](
        parts, bias, *norm, affine, moments, channels, GROUPS, eps, GROUPS=triton.next_power_of_2(GROUPS), CHANNELS=8
    )
    return out, affine, moments


def swished(z: Tensor, affine: Tensor) -> Tensor:
    """As `gated_conv.swished`."""
    out = torch.empty_like(z)
    channels = z.shape[-1]
    rows = z.numel() // channels
    _swished[(triton.cdiv(rows, 8), triton.cdiv(channels, 256))](
        z, affine, out, rows, channels, ROWS=8, CHANNELS=256, num_warps=8
    )
    return out


def norm_backward(
    g: Tensor, z: Tensor, affine: Tensor, moments: Tensor, lengths: Tensor, counts_all: bool
) -> tuple[Tensor, Tensor]:
    """As `gated_conv.norm_backward`."""
    batch, time, channels = z.shape
    rows = batch * time
    parts = torch.empty(GROUPS, 2, channels, dtype=torch.float32, device=g.device)
    _norm_sums[(GROUPS, triton.cdiv(channels, 128))](
        g, z, affine, moments, lengths, parts, rows, time, channels, triton.cdiv(triton.cdiv(rows, GROUPS), 8) * 8,
        ROWS=8, CHANNELS=128, num_warps=4,
    )  # fmt: skip
    sums = parts.sum(0)
    of_z = torch.empty_like(z)
    _norm_gradient[(triton.cdiv(rows, 8), triton.cdiv(channels, 256))](
        g, z, affine, moments, sums, lengths, of_z, rows, time, channels,
        COUNTS_ALL=counts_all, ROWS=8, CHANNELS=256, num_warps=8,
    )  # fmt: skip
    return of_z, sums


def depthwise_backward(g: Tensor, y: Tensor, lengths: Tensor, weight: Tensor, parts: Tensor) -> Tensor:
    """As `gated_conv.depthwise_backward`."""
    of_y = torch.empty_like(y)
    grid, sizes, tile = _launch(g, weight.shape[0], parts)
    _depthwise_backward[grid](g, y, lengths, weight, of_y, *sizes, **tile)
    return of_y


def taps_backward(g: Tensor, u: Tensor, lengths: Tensor, kernel: int, parts: Tensor) -> None:
    """As `gated_conv.taps_backward`."""
    grid, sizes, tile = _launch(g, kernel, parts)
    taps = kernel if kernel <= MOST_TAPS else MOST_TAPS - 1
    _of_taps[(*grid, triton.cdiv(kernel, taps))](g, u, lengths, *sizes, TAPS=taps, **tile)


def _launch(g: Tensor, kernel: int, parts: Tensor) -> tuple[tuple[int, int], tuple[Any, ...], dict[str, Any]]:
    """Return grid, numbers and constants of the backward kernels."""
    batch, time, channels = g.shape
    sizes = parts, parts.stride(0), time, channels, *_cut(batch, time)
    tile = {"KERNEL": kernel, "TIMES": TIMES, "CHANNELS": CHANNELS, "num_warps": 4}
    return (GROUPS, triton.cdiv(channels, CHANNELS)), sizes, tile
