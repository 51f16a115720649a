"""Dropout, residual and layer norm of rows: the kernels behind `layers.added_norm`.

A program holds a row, in float32. Forward keeps the sum in the dtype of the activations, and mean and 1 / deviation of
it; backward draws dropout anew. Sums over rows are in a fixed order, without atomics: the same inputs give the same
bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.speed.kernels.rows import _mixed

MOST_PROGRAMS = 528
"""Programs of the backward kernel, each with sums of its own: four for each multiprocessor of an H200."""


@triton.jit
def _kept(seed, number, least):
    """Numbers that dropout leaves, as `row_norm.kept`."""
    first = tl.load(seed).to(tl.uint32, bitcast=True)
    second = tl.load(seed + 1).to(tl.uint32, bitcast=True)
    return _mixed(_mixed(number.to(tl.uint32) ^ first) + second) >= least


@triton.jit
def _forward(
    x, residual, weight, bias, seed, out, total, moments, width, least, factor, eps,
    HAS_DROPOUT: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    c = tl.arange(0, WIDTH)
    there = c < width
    offset = row.to(tl.int64) * width + c
    value = tl.load(x + offset, mask=there, other=0.0).to(tl.float32)
    if HAS_DROPOUT:
        value = tl.where(_kept(seed, offset, least), value * factor, 0.0)
    value += tl.load(residual + offset, mask=there, other=0.0).to(tl.float32)
    # What is kept is what is normed: backward reads it.
    narrow = value.to(total.dtype.element_ty)
    tl.store(total + offset, narrow, mask=there)
    value = narrow.to(tl.float32)
    mean = tl.sum(tl.where(there, value, 0.0), 0) / width
    away = tl.where(there, value - mean, 0.0)
    inverse = 1.0 / tl.sqrt(tl.sum(away * away, 0) / width + eps)
    scale = tl.load(weight + c, mask=there, other=0.0).to(tl.float32)
    shift = tl.load(bias + c, mask=there, other=0.0).to(tl.float32)
    tl.store(out + offset, (away * inverse * scale + shift).to(out.dtype.element_ty), mask=there)
    tl.store(moments + 2 * row, mean)
    tl.store(moments + 2 * row + 1, inverse)


@triton.jit
def _backward(
    g, g_total, total, moments, weight, seed, of_x, of_residual, parts, rows, width, rows_each, least, factor,
    HAS_TOTAL: tl.constexpr, HAS_DROPOUT: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(0)
    c = tl.arange(0, WIDTH)
    there = c < width
    scale = tl.load(weight + c, mask=there, other=0.0).to(tl.float32)
    of_weight = tl.zeros([WIDTH], tl.float32)
    of_bias = tl.zeros([WIDTH], tl.float32)
    for row in range(group * rows_each, tl.minimum((group + 1) * rows_each, rows)):
        offset = tl.cast(row, tl.int64) * width + c
        mean = tl.load(moments + 2 * row)
        inverse = tl.load(moments + 2 * row + 1)
        value = tl.load(total + offset, mask=there, other=0.0).to(tl.float32)
        away = tl.where(there, (value - mean) * inverse, 0.0)
        upper = tl.load(g + offset, mask=there, other=0.0).to(tl.float32)
        of_weight += upper * away
        of_bias += upper
        steep = upper * scale
        level = tl.sum(steep, 0) / width
        tilt = tl.sum(steep * away, 0) / width
        found = inverse * (steep - level - away * tilt)
        if HAS_TOTAL:
            found += tl.load(g_total + offset, mask=there, other=0.0).to(tl.float32)
        tl.store(of_residual + offset, found.to(of_residual.dtype.element_ty), mask=there)
        if HAS_DROPOUT:
            found = tl.where(_kept(seed, offset, least), found * factor, 0.0)
        tl.store(of_x + offset, found.to(of_x.dtype.element_ty), mask=there)
    tl.store(parts + (2 * group) * width + c, of_weight, mask=there)
    tl.store(parts + (2 * group + 1) * width + c, of_bias, mask=there)


def forward(
    x: Tensor,
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
    if rows:
        _forward[(rows,)](
            x, residual, weight, bias, x if seed is None else seed, out, total, moments, width, least, factor, eps,
            HAS_DROPOUT=seed is not None, WIDTH=triton.next_power_of_2(width), num_warps=warps(width),
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
    rows_each = -(-rows // MOST_PROGRAMS) or 1
    groups = -(-rows // rows_each)
    parts = torch.empty(groups, 2, width, dtype=torch.float32, device=g.device)
    if rows:
        _backward[(groups,)](
            g, g if g_total is None else g_total, total, moments, weight, g if seed is None else seed,
            of_x, of_residual, parts, rows, width, rows_each, least, factor,
            HAS_TOTAL=g_total is not None, HAS_DROPOUT=seed is not None, WIDTH=triton.next_power_of_2(width),
            num_warps=warps(width),
        )  # fmt: skip
    return of_x, of_residual, parts.sum(0)


def warps(width: int) -> int:
    """Return the warps of a program: 8 numbers for each thread, as one load of bfloat16 brings them."""
    return min(16, max(1, int(triton.next_power_of_2(width)) // 256))
