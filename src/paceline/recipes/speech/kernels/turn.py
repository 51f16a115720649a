"""Matrices turned and cast in one pass: weights into the library's order, and their gradients back."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

LONG = 128
"""Elements of a tile along the longer side."""


@triton.jit
def _turn(source, target, rows, columns, num_tiles, ROWS: tl.constexpr, COLUMNS: tl.constexpr, IS_TALL: tl.constexpr):
    matrix = tl.program_id(0) // num_tiles
    tile = tl.program_id(0) % num_tiles
    row = (tile * ROWS if IS_TALL else 0) + tl.arange(0, ROWS)
    column = (0 if IS_TALL else tile * COLUMNS) + tl.arange(0, COLUMNS)
    start = matrix * rows * columns
    there = (row < rows)[:, None] & (column < columns)[None, :]
    values = tl.load(source + start + row[:, None] * columns + column[None, :], mask=there, other=0.0)
    there = (column < columns)[:, None] & (row < rows)[None, :]
    turned = tl.trans(values).to(target.dtype.element_ty)
    tl.store(target + start + column[:, None] * rows + row[None, :], turned, mask=there)


def can_turn(source: Tensor) -> bool:
    """Return True for matrices of which one side is short, as that of a filter over time."""
    return source.is_contiguous() and min(source.shape[1:]) <= LONG and source.numel() < 2**31


def turn(source: Tensor, dtype: torch.dtype) -> Tensor:
    """(number, rows, columns) -> (number, columns, rows) in another dtype."""
    number, rows, columns = source.shape
    target = torch.empty(number, columns, rows, dtype=dtype, device=source.device)
    is_tall = rows >= columns
    short = max(16, triton.next_power_of_2(min(rows, columns)))
    num_tiles = triton.cdiv(max(rows, columns), LONG)
    _turn[(number * num_tiles,)](
        source,
        target,
        rows,
        columns,
        num_tiles,
        ROWS=LONG if is_tall else short,
        COLUMNS=short if is_tall else LONG,
        IS_TALL=is_tall,
    )
    return target
