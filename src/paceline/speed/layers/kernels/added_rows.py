"""Dropout, residual and layer norm of rows: the kernels behind `layers.added_norm`.

A program holds some rows, in float32. Forward keeps the sum in the dtype of activations, its mean and 1 / deviation;
backward draws dropout anew. Sums over rows are in a fixed order, without atomics: the same inputs give the same bits.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.speed.layers.kernels.rows import _mixed

MOST_PROGRAMS = 528
"""Programs of the backward kernel, each with sums of its own: four for each multiprocessor of an H200."""


@triton.jit
def _kept(seed, number, least):
    """Numbers that dropout leaves, as `row_norm.kept`."""
    first = tl.load(seed).to(tl.uint32, bitcast=True)
    second = tl.load(seed + 1).to(tl.uint32, bitcast=True)
    return _mixed(_mixed(number.to(tl.uint32) ^ first) + second) >= least


@triton.jit
def _add_norm(
    x, shift, residual, weight, bias, seed, out, total, moments, rows, width, least, factor, eps,
    HAS_SHIFT: tl.constexpr, HAS_DROPOUT: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    c = tl.arange(0, WIDTH)
    there = (row < rows)[:, None] & (c < width)[None, :]
    offset = row.to(tl.int64)[:, None] * width + c[None, :]
    value = tl.load(x + offset, mask=there, other=0.0).to(tl.float32)
    if HAS_SHIFT:
        value += tl.load(shift + c, mask=c < width, other=0.0).to(tl.float32)[None, :]
    if HAS_DROPOUT:
        value = tl.where(_kept(seed, offset, least), value * factor, 0.0)
    value += tl.load(residual + offset, mask=there, other=0.0).to(tl.float32)
    _normed(value, weight, bias, out, total, moments, row, rows, width, offset, there, eps, WIDTH)


@triton.jit
def _normed(
    value, weight, bias, out, total, moments, row, rows, width, offset, there, eps, WIDTH: tl.constexpr
):  # fmt: skip
    """Store rows, and their layer norm. What is kept is what is normed: backward reads it."""
    narrow = value.to(total.dtype.element_ty)
    tl.store(total + offset, narrow, mask=there)
    value = narrow.to(tl.float32)
    mean = tl.sum(tl.where(there, value, 0.0), 1) / width
    away = tl.where(there, value - mean[:, None], 0.0)
    inverse = 1.0 / tl.sqrt(tl.sum(away * away, 1) / width + eps)
    c = tl.arange(0, WIDTH)
    scale = tl.load(weight + c, mask=c < width, other=0.0).to(tl.float32)
    level = tl.load(bias + c, mask=c < width, other=0.0).to(tl.float32)
    normed = away * inverse[:, None] * scale[None, :] + level[None, :]
    tl.store(out + offset, normed.to(out.dtype.element_ty), mask=there)
    tl.store(moments + 2 * row, mean, mask=row < rows)
    tl.store(moments + 2 * row + 1, inverse, mask=row < rows)


@triton.jit
def _add_norm_backward(
    g, g_total, total, moments, weight, seed, of_x, of_residual, parts, rows, width, rows_each, least, factor,
    HAS_TOTAL: tl.constexpr, HAS_DROPOUT: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(0)
    c = tl.arange(0, WIDTH)
    scale = tl.load(weight + c, mask=c < width, other=0.0).to(tl.float32)[None, :]
    of_weight = tl.zeros([ROWS, WIDTH], tl.float32)
    of_bias = tl.zeros([ROWS, WIDTH], tl.float32)
    of_shift = tl.zeros([ROWS, WIDTH], tl.float32)
    end = tl.minimum((group + 1) * rows_each, rows)
    for first in range(group * rows_each, end, ROWS):
        row = first + tl.arange(0, ROWS)
        there = (row < end)[:, None] & (c < width)[None, :]
        offset = row.to(tl.int64)[:, None] * width + c[None, :]
        mean = tl.load(moments + 2 * row, mask=row < end, other=0.0)
        inverse = tl.load(moments + 2 * row + 1, mask=row < end, other=0.0)[:, None]
        value = tl.load(total + offset, mask=there, other=0.0).to(tl.float32)
        away = tl.where(there, (value - mean[:, None]) * inverse, 0.0)
        upper = tl.load(g + offset, mask=there, other=0.0).to(tl.float32)
        of_weight += upper * away
        of_bias += upper
        steep = upper * scale
        level = tl.sum(steep, 1) / width
        tilt = tl.sum(steep * away, 1) / width
        found = inverse * (steep - level[:, None] - away * tilt[:, None])
        if HAS_TOTAL:
            found += tl.load(g_total + offset, mask=there, other=0.0).to(tl.float32)
        tl.store(of_residual + offset, found.to(of_residual.dtype.element_ty), mask=there)
        if HAS_DROPOUT:
            found = tl.where(_kept(seed, offset, least), found * factor, 0.0)
        of_shift += tl.where(there, found, 0.0)
        tl.store(of_x + offset, found.to(of_x.dtype.element_ty), mask=there)
    place = parts + 3 * group * width + c
    tl.store(place, tl.sum(of_weight, 0), mask=c < width)
    tl.store(place + width, tl.sum(of_bias, 0), mask=c < width)
    tl.store(place + 2 * width, tl.sum(of_shift, 0), mask=c < width)


def forward(
    x: Tensor,
    shift: Tensor | None,
    residual: Tensor,
    weight: Tensor,
    bias: Tensor,
    seed: Tensor | None,
    least: int,
    factor: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """As `added_norm`."""
    rows, width = x.shape
    out, total = torch.empty_like(x), torch.empty_like(x)
    moments = torch.empty(rows, 2, dtype=torch.float32, device=x.device)
    x, residual = x.contiguous(), residual.contiguous()
    way = tile(width)
    if rows:
        _add_norm[(-(-rows // way.rows),)](
            x, x if shift is None else shift, residual, weight, bias, x if seed is None else seed, out, total, moments,
            rows, width, least, factor, eps, HAS_SHIFT=shift is not None, HAS_DROPOUT=seed is not None, ROWS=way.rows,
            WIDTH=way.width, num_warps=way.warps,
        )  # fmt: skip
    return out, total, moments


def backward(
    g: Tensor,
    g_total: Tensor | None,
    total: Tensor,
    moments: Tensor,
    weight: Tensor,
    seed: Tensor | None,
    least: int,
    factor: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """As `added_norm_backward`."""
    rows, width = g.shape
    of_x, of_residual = torch.empty_like(total), torch.empty_like(total)
    way = tile(width)
    rows_each = -(-rows // (MOST_PROGRAMS * way.rows)) * way.rows or 1
    groups = -(-rows // rows_each)
    parts = torch.empty(groups, 3, width, dtype=torch.float32, device=g.device)
    if rows:
        _add_norm_backward[(groups,)](
            g, g if g_total is None else g_total, total, moments, weight, g if seed is None else seed,
            of_x, of_residual, parts, rows, width, rows_each, least, factor,
            HAS_TOTAL=g_total is not None, HAS_DROPOUT=seed is not None, ROWS=way.rows, WIDTH=way.width,
            num_warps=way.warps,
        )  # fmt: skip
    return of_x, of_residual, sum_parts(parts)


@triton.jit
def _sum_parts(parts, out, number, size, PARTS: tl.constexpr, SIZE: tl.constexpr):
    c = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    n = tl.arange(0, PARTS)
    sums = tl.zeros([PARTS, SIZE], tl.float32)
    for first in range(0, number, PARTS):
        there = (first + n < number)[:, None] & (c < size)[None, :]
        sums += tl.load(parts + (first + n)[:, None] * size + c[None, :], mask=there, other=0.0)
    tl.store(out + c, tl.sum(sums, 0), mask=c < size)


def sum_parts(parts: Tensor) -> Tensor:
    """(number, ...) float32 -> (...): added in a fixed order."""
    out = torch.empty(parts.shape[1:], dtype=torch.float32, device=parts.device)
    size = out.numel()
    if not len(parts):
        return out.zero_()
    _sum_parts[(-(-size // 32),)](parts, out, len(parts), size, PARTS=64, SIZE=32, num_warps=4)
    return out


class Tile(NamedTuple):
    """Rows and numbers of a row that a program holds at a time."""

    rows: int
    width: int
    warps: int


def tile(width: int) -> Tile:
    """16 numbers for each of 128 threads, a row for each warp; more threads for rows that are wider."""
    wide = int(triton.next_power_of_2(width))
    return Tile(max(1, 2048 // wide), wide, max(4, min(16, wide // 1024)))
