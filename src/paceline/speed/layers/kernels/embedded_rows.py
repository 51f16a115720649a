"""Rows of an embedding with their positions and dropout, and the layer norm that follows; and the embedding's gradient.

The gradient adds up the rows of each token in the order of their places, in pieces that a program has each: the same
inputs give the same bits, whatever ran first.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.speed.layers.kernels.added_rows import _kept, _normed, tile
from paceline.speed.layers.occurrences import Occurrences


@triton.jit
def _embed(
    table, tokens, places, positions, weight, bias, seed, out, total, moments, rows, width, longest, scale, least,
    factor, eps, HAS_DROPOUT: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    c = tl.arange(0, WIDTH)
    there = (row < rows)[:, None] & (c < width)[None, :]
    offset = row.to(tl.int64)[:, None] * width + c[None, :]
    token = tl.load(tokens + row, mask=row < rows, other=0)
    value = tl.load(table + token[:, None] * width + c[None, :], mask=there, other=0.0).to(tl.float32) * scale
    place = tl.load(places + row, mask=row < rows, other=0) % longest
    value += tl.load(positions + place[:, None] * width + c[None, :], mask=there, other=0.0)
    if HAS_DROPOUT:
        value = tl.where(_kept(seed, offset, least), value * factor, 0.0)
    _normed(value, weight, bias, out, total, moments, row, rows, width, offset, there, eps, WIDTH)


def forward(
    table: Tensor,
    tokens: Tensor,
    places: Tensor,
    positions: Tensor,
    weight: Tensor,
    bias: Tensor,
    seed: Tensor | None,
    longest: int,
    scale: float,
    least: int,
    factor: float,
    eps: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return normed rows, the rows themselves, (tokens, width) each, and the moments of the norm."""
    rows, width = len(tokens), table.shape[1]
    out, total = (torch.empty(rows, width, dtype=dtype, device=table.device) for _ in range(2))
    moments = torch.empty(rows, 2, dtype=torch.float32, device=table.device)
    way = tile(width)
    if rows:
        _embed[(-(-rows // way.rows),)](
            table, tokens, places, positions, weight, bias, table if seed is None else seed, out, total, moments, rows,
            width, longest, scale, least, factor, eps, HAS_DROPOUT=seed is not None, ROWS=way.rows, WIDTH=way.width,
            num_warps=way.warps,
        )  # fmt: skip
    return out, total, moments


@triton.jit
def _sum_pieces(rows, order, pieces, sums, width, stride, WIDTH: tl.constexpr):
    """A piece's rows, which are all of one token."""
    piece = tl.program_id(0)
    c = tl.arange(0, WIDTH)
    total = tl.zeros([WIDTH], tl.float32)
    first, end = tl.load(pieces + piece), tl.load(pieces + piece + 1)
    if first < end:
        for place in range(first, end):
            row = tl.load(order + place).to(tl.int64)
            total += tl.load(rows + row * stride + c, mask=c < width, other=0.0).to(tl.float32)
        tl.store(sums + piece.to(tl.int64) * width + c, total, mask=c < width)


@triton.jit
def _add_tokens(sums, tokens, of_tokens, table, width, scale, WIDTH: tl.constexpr):
    """The pieces of a token, added to its row."""
    number = tl.program_id(0)
    c = tl.arange(0, WIDTH)
    first, end = tl.load(of_tokens + number), tl.load(of_tokens + number + 1)
    if first < end:
        total = tl.zeros([WIDTH], tl.float32)
        for piece in range(first, end):
            total += tl.load(sums + tl.cast(piece, tl.int64) * width + c, mask=c < width, other=0.0)
        place = table + tl.load(tokens + number).to(tl.int64) * width + c
        value = tl.load(place, mask=c < width, other=0.0)
        tl.store(place, value + total * scale, mask=c < width)


def add_rows(table: Tensor, rows: Tensor, occurrences: Occurrences, scale: float) -> None:
    """Add `scale` times each row to that of its token in (vocabulary, width) float32."""
    count, width = rows.shape
    sums = torch.empty(count, width, dtype=torch.float32, device=rows.device)
    wide = int(triton.next_power_of_2(width))
    warps = max(1, min(8, wide // 256))
    if count:
        _sum_pieces[(count,)](
            rows, occurrences.order, occurrences.pieces, sums, width, rows.stride(0), WIDTH=wide, num_warps=warps
        )
        _add_tokens[(count,)](
            sums, occurrences.tokens, occurrences.of_tokens, table, width, scale, WIDTH=wide, num_warps=warps
        )
