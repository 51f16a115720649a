"""Kernels for rows of a residual network: dropout, residual and layer norms; swish with dropout; sums of columns.

Behind `residual_norm`. A program holds some rows at a time, in float32, and goes on to further ones; sums over rows are
kept for each place of its tile and added up at the end. `GROUPS` programs write a row of sums each, side by side with
those of other kernels, so that all sums of a layer are one pass over one matrix. Nothing is added by atomics: the same
inputs give the same bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.speed.layers.kernels.rows import _mixed

GROUPS = 264
"""Programs with sums of their own: two for each multiprocessor of an H200."""
COLUMNS = 256
"""Of a tile, where rows need not be whole."""


@triton.jit
def _kept(seed, row, column, least):
    """Numbers that dropout leaves, as `residual_norm.kept`."""
    first = tl.load(seed).to(tl.uint32, bitcast=True)
    second = tl.load(seed + 1).to(tl.uint32, bitcast=True)
    bits = _mixed(_mixed(row.to(tl.uint32) ^ first) + second)
    return _mixed(bits[:, None] + column[None, :].to(tl.uint32)) >= least


@triton.jit
def _normed(value, there, width, eps):
    """Distance from the mean in deviations, mean, and 1 / deviation, of rows."""
    mean = tl.sum(value, 1) / width
    away = tl.where(there, value - mean[:, None], 0.0)
    inverse = 1.0 / tl.sqrt(tl.sum(away * away, 1) / width + eps)
    return away * inverse[:, None], mean, inverse


@triton.jit
def _forward(
    x, residual, weight, bias, weight_2, bias_2, seed, total, out, out_2, moments, rows, width, least, factor, eps,
    HAS_RESIDUAL: tl.constexpr, HAS_DROPOUT: tl.constexpr, HAS_SECOND: tl.constexpr, ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    c = tl.arange(0, WIDTH)
    is_column = c < width
    there = (row < rows)[:, None] & is_column[None, :]
    at = row.to(tl.int64)[:, None] * width + c[None, :]
    value = tl.load(x + at, mask=there, other=0.0).to(tl.float32) * factor
    if HAS_DROPOUT:
        value = tl.where(_kept(seed, row, c, least), value, 0.0)
    if HAS_RESIDUAL:
        value += tl.load(residual + at, mask=there, other=0.0).to(tl.float32)
    # What is stored is what is normed: backward reads it.
    narrow = value.to(total.dtype.element_ty)
    tl.store(total + at, narrow, mask=there)
    away, mean, inverse = _normed(narrow.to(tl.float32), there, width, eps)
    scale = tl.load(weight + c, mask=is_column, other=0.0)
    shift = tl.load(bias + c, mask=is_column, other=0.0)
    normed = (away * scale[None, :] + shift[None, :]).to(out.dtype.element_ty)
    tl.store(out + at, normed, mask=there)
    tl.store(moments + 4 * row, mean, mask=row < rows)
    tl.store(moments + 4 * row + 1, inverse, mask=row < rows)
    if HAS_SECOND:
        away, mean, inverse = _normed(normed.to(tl.float32), there, width, eps)
        scale = tl.load(weight_2 + c, mask=is_column, other=0.0)
        shift = tl.load(bias_2 + c, mask=is_column, other=0.0)
        tl.store(out_2 + at, (away * scale[None, :] + shift[None, :]).to(out.dtype.element_ty), mask=there)
        tl.store(moments + 4 * row + 2, mean, mask=row < rows)
        tl.store(moments + 4 * row + 3, inverse, mask=row < rows)


@triton.jit
def _slope(upper, away, scale, inverse, width):
    """Gradient of rows before a layer norm."""
    steep = upper * scale[None, :]
    level = tl.sum(steep, 1) / width
    tilt = tl.sum(steep * away, 1) / width
    return inverse[:, None] * (steep - level[:, None] - away * tilt[:, None])


@triton.jit
def _backward(
    g, g_more, total, moments, weight, bias, weight_2, seed, of_x, of_residual, parts, parts_stride, rows, width,
    rows_each, least, factor, HAS_MORE: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_DROPOUT: tl.constexpr,
    HAS_SECOND: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(0)
    c = tl.arange(0, WIDTH)
    is_column = c < width
    scale = tl.load(weight + c, mask=is_column, other=0.0)
    shift = tl.load(bias + c, mask=is_column, other=0.0)
    of_weight = tl.zeros([ROWS, WIDTH], tl.float32)
    of_bias = tl.zeros([ROWS, WIDTH], tl.float32)
    of_columns = tl.zeros([ROWS, WIDTH], tl.float32)
    if HAS_SECOND:
        scale_2 = tl.load(weight_2 + c, mask=is_column, other=0.0)
        of_weight_2 = tl.zeros([ROWS, WIDTH], tl.float32)
        of_bias_2 = tl.zeros([ROWS, WIDTH], tl.float32)
    begin = group * rows_each
    for start in range(begin, tl.minimum(begin + rows_each, rows), ROWS):
        row = start + tl.arange(0, ROWS)
        is_row = row < rows
        there = is_row[:, None] & is_column[None, :]
        at = row.to(tl.int64)[:, None] * width + c[None, :]
        mean = tl.load(moments + 4 * row, mask=is_row, other=0.0)
        inverse = tl.load(moments + 4 * row + 1, mask=is_row, other=0.0)
        value = tl.load(total + at, mask=there, other=0.0).to(tl.float32)
        away = tl.where(there, (value - mean[:, None]) * inverse[:, None], 0.0)
        upper = tl.load(g + at, mask=there, other=0.0).to(tl.float32)
        if HAS_SECOND:
            mean_2 = tl.load(moments + 4 * row + 2, mask=is_row, other=0.0)
            inverse_2 = tl.load(moments + 4 * row + 3, mask=is_row, other=0.0)
            normed = (away * scale[None, :] + shift[None, :]).to(of_x.dtype.element_ty).to(tl.float32)
            away_2 = tl.where(there, (normed - mean_2[:, None]) * inverse_2[:, None], 0.0)
            of_weight_2 += upper * away_2
            of_bias_2 += upper
            upper = _slope(upper, away_2, scale_2, inverse_2, width)
            if HAS_MORE:
                upper += tl.load(g_more + at, mask=there, other=0.0).to(tl.float32)
            upper = tl.where(there, upper, 0.0)
        of_weight += upper * away
        of_bias += upper
        found = _slope(upper, away, scale, inverse, width)
        if HAS_MORE and not HAS_SECOND:
            found += tl.load(g_more + at, mask=there, other=0.0).to(tl.float32)
        if HAS_RESIDUAL:
            tl.store(of_residual + at, found.to(of_residual.dtype.element_ty), mask=there)
        found = found * factor
        if HAS_DROPOUT:
            found = tl.where(_kept(seed, row, c, least), found, 0.0)
        of_columns += tl.where(there, found, 0.0)
        tl.store(of_x + at, found.to(of_x.dtype.element_ty), mask=there)
    base = parts + group * parts_stride + c
    tl.store(base, tl.sum(of_weight, 0), mask=is_column)
    tl.store(base + width, tl.sum(of_bias, 0), mask=is_column)
    tl.store(base + 2 * width, tl.sum(of_columns, 0), mask=is_column)
    if HAS_SECOND:
        tl.store(base + 3 * width, tl.sum(of_weight_2, 0), mask=is_column)
        tl.store(base + 4 * width, tl.sum(of_bias_2, 0), mask=is_column)


@triton.jit
def _swish(
    x, seed, out, rows, width, least, factor,
    HAS_DROPOUT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    there = (row < rows)[:, None] & (c < width)[None, :]
    at = row.to(tl.int64)[:, None] * width + c[None, :]
    value = tl.load(x + at, mask=there, other=0.0).to(tl.float32)
    value = value * tl.sigmoid(value) * factor
    if HAS_DROPOUT:
        value = tl.where(_kept(seed, row, c, least), value, 0.0)
    tl.store(out + at, value.to(out.dtype.element_ty), mask=there)


@triton.jit
def _swish_backward(
    g, x, seed, of_x, parts, parts_stride, rows, width, rows_each, least, factor,
    HAS_DROPOUT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(0)
    c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    begin = group * rows_each
    for start in range(begin, tl.minimum(begin + rows_each, rows), ROWS):
        row = start + tl.arange(0, ROWS)
        there = (row < rows)[:, None] & (c < width)[None, :]
        at = row.to(tl.int64)[:, None] * width + c[None, :]
        value = tl.load(x + at, mask=there, other=0.0).to(tl.float32)
        upper = tl.load(g + at, mask=there, other=0.0).to(tl.float32)
        open = tl.sigmoid(value)
        found = upper * factor * (open + value * open * (1.0 - open))
        if HAS_DROPOUT:
            found = tl.where(_kept(seed, row, c, least), found, 0.0)
        sums += found
        tl.store(of_x + at, found.to(of_x.dtype.element_ty), mask=there)
    tl.store(parts + group * parts_stride + c, tl.sum(sums, 0), mask=c < width)


@triton.jit
def _column_sums(x, parts, parts_stride, rows, width, rows_each, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    group = tl.program_id(0)
    c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    begin = group * rows_each
    for start in range(begin, tl.minimum(begin + rows_each, rows), ROWS):
        row = start + tl.arange(0, ROWS)
        there = (row < rows)[:, None] & (c < width)[None, :]
        sums += tl.load(x + row.to(tl.int64)[:, None] * width + c[None, :], mask=there, other=0.0).to(tl.float32)
    tl.store(parts + group * parts_stride + c, tl.sum(sums, 0), mask=c < width)


def forward(
    x: Tensor,
    residual: Tensor | None,
    norms: list[tuple[Tensor, Tensor]],
    seed: Tensor | None,
    least: int,
    factor: float,
    eps: float,
) -> tuple[Tensor, ...]:
    """As `residual_norm.forward`."""
    width = x.shape[-1]
    rows = x.numel() // width
    total, out = torch.empty_like(x), torch.empty_like(x)
    has_second = len(norms) > 1
    out_2 = torch.empty_like(x) if has_second else out
    moments = torch.empty(rows, 4, dtype=torch.float32, device=x.device)
    (weight, bias), (weight_2, bias_2) = norms[0], norms[-1]
    each = 4
    _forward[(triton.cdiv(rows, each),)](
        x, x if residual is None else residual, weight, bias, weight_2, bias_2, moments if seed is None else seed,
        total, out, out_2, moments, rows, width, least, factor, eps,
        HAS_RESIDUAL=residual is not None, HAS_DROPOUT=seed is not None, HAS_SECOND=has_second, ROWS=each,
        WIDTH=triton.next_power_of_2(width), num_warps=_warps(width, each),
    )  # fmt: skip
    return (total, moments, out, out_2) if has_second else (total, moments, out)


def backward(
    g: Tensor,
    g_more: Tensor | None,
    total: Tensor,
    moments: Tensor,
    norms: list[tuple[Tensor, Tensor]],
    seed: Tensor | None,
    least: int,
    factor: float,
    has_residual: bool,
    parts: Tensor,
) -> tuple[Tensor, Tensor | None]:
    """As `residual_norm.backward`."""
    width = total.shape[-1]
    rows = total.numel() // width
    of_x = torch.empty_like(total)
    of_residual = torch.empty_like(total) if has_residual else None
    each = 8
    (weight, bias), (weight_2, _) = norms[0], norms[-1]
    _backward[(GROUPS,)](
        g, g if g_more is None else g_more, total, moments, weight, bias, weight_2, moments if seed is None else seed,
        of_x, of_x if of_residual is None else of_residual, parts, parts.stride(0), rows, width,
        _rows_each(rows, each), least, factor,
        HAS_MORE=g_more is not None, HAS_RESIDUAL=has_residual, HAS_DROPOUT=seed is not None,
        HAS_SECOND=len(norms) > 1, ROWS=each, WIDTH=triton.next_power_of_2(width), num_warps=_warps(width, each),
    )  # fmt: skip
    return of_x, of_residual


def swish(x: Tensor, seed: Tensor | None, least: int, factor: float) -> Tensor:
    """As `residual_norm.swish`."""
    out = torch.empty_like(x)
    width = x.shape[-1]
    rows = x.numel() // width
    _swish[(triton.cdiv(rows, 8), triton.cdiv(width, COLUMNS))](
        x, out if seed is None else seed, out, rows, width, least, factor,
        HAS_DROPOUT=seed is not None, ROWS=8, COLUMNS=COLUMNS, num_warps=8,
    )  # fmt: skip
    return out


def swish_backward(g: Tensor, x: Tensor, seed: Tensor | None, least: int, factor: float, parts: Tensor) -> Tensor:
    """As `residual_norm.swish_backward`."""
    of_x = torch.empty_like(x)
    width = x.shape[-1]
    rows = x.numel() // width
    _swish_backward[(GROUPS, triton.cdiv(width, COLUMNS))](
        g, x, of_x if seed is None else seed, of_x, parts, parts.stride(0), rows, width, _rows_each(rows, 4),
        least, factor, HAS_DROPOUT=seed is not None, ROWS=4, COLUMNS=COLUMNS, num_warps=4,
    )  # fmt: skip
    return of_x


def column_sums(x: Tensor, parts: Tensor) -> None:
    """As `residual_norm.column_sums`."""
    width = x.shape[-1]
    rows = x.numel() // width
    _column_sums[(GROUPS, triton.cdiv(width, COLUMNS))](
        x, parts, parts.stride(0), rows, width, _rows_each(rows, 8), ROWS=8, COLUMNS=COLUMNS, num_warps=4
    )


def _rows_each(rows: int, tile: int) -> int:
    return int(triton.cdiv(triton.cdiv(rows, GROUPS), tile) * tile)


def _warps(width: int, rows: int) -> int:
    """Return the warps of a program: 8 numbers for each thread, as one load of bfloat16 brings them."""
    return min(16, max(1, rows * int(triton.next_power_of_2(width)) // 256))
