"""Depthwise convolution over time as a stream: every frame is read once and multiplied into the tiles that it reaches.

For filters without stride that reach no further than one tile, which is nearly all there are; `depthwise` has the
general kernel, the layout and the contract. A program walks along the time of a group of utterances of one channel; a
tile of inputs reaches the tile of outputs before it, its own and the one after it, and their sums stay in registers
until the last input has come.
"""

# ruff: noqa: RUF005 (Triton knows no unpacking)
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from paceline.recipes.speech.kernels import tiles
from paceline.recipes.speech.kernels.quartznet.order import nth
from paceline.speed.layers.kernels import ways


@triton.jit
def _store_tile(out, offset, total, tile, length, is_row, row, TILE: tl.constexpr):
    t = tile * TILE + tl.arange(0, TILE)
    total = tl.where(t[None, :] < length[:, None], total, 0.0)
    there = is_row[:, None] & ((t >= 0) & (t < row))[None, :]
    tl.store(out + offset[:, None] + t[None, :], total.to(tl.bfloat16), mask=there)


@triton.jit
def _forward(
    x,
    affine,
    lengths,
    weight,
    out,
    channels,
    batch,
    row,
    num_tiles,
    KERNEL: tl.constexpr,
    PAD: tl.constexpr,
    DILATION: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,
    PRODUCT: tl.constexpr,
    HAS_AFFINE: tl.constexpr,
    IS_TURNED: tl.constexpr,
):
    channel = nth(tl.program_id(1), channels, IS_TURNED)
    utterance = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = utterance < batch
    length = tl.load(lengths + utterance, mask=is_row, other=0)
    offset = (channel * batch + utterance) * row
    scale = 1.0
    shift = 0.0
    if HAS_AFFINE:
        scale = tl.load(affine + channel)
        shift = tl.load(affine + channels + channel)
    j = tl.arange(0, CHUNK)
    n = tl.arange(0, TILE)
    filters = ()
    for chunk in tl.static_range(TILE // CHUNK):
        for away in tl.static_range(3):
            # Output n of the tile before (0), here (1) or after (2) sees frame j of a chunk through this place.
            place = PAD + chunk * CHUNK + j[:, None] - n[None, :] - TILE * (away - 1)
            inside = (place >= 0) & (place <= (KERNEL - 1) * DILATION) & (place % DILATION == 0)
            taps = tl.load(weight + channel * KERNEL + place // DILATION, mask=inside, other=0.0)
            filters = filters + (taps.to(tl.bfloat16).to(PRODUCT),)  # type: ignore[assignment]
    before = tl.zeros([ROWS, TILE], tl.float32)
    current = tl.zeros([ROWS, TILE], tl.float32)
    for tile in range(num_tiles):
        after = tl.zeros([ROWS, TILE], tl.float32)
        for chunk in tl.static_range(TILE // CHUNK):
            t = tile * TILE + chunk * CHUNK + j
            # Rounded down to the 8 frames of one load, so that the mask does not split it.
            may_be = ((t // 8) * 8)[None, :] < length[:, None]
            values = tl.load(x + offset[:, None] + t[None, :], mask=may_be, other=0.0).to(tl.float32)
            if HAS_AFFINE:
                values = tl.maximum(values * scale + shift, 0.0)
            values = tl.where(t[None, :] < length[:, None], values, 0.0).to(tl.bfloat16).to(PRODUCT)
            if chunk * CHUNK < PAD:
                before = tl.dot(values, filters[chunk * 3], before)
            current = tl.dot(values, filters[chunk * 3 + 1], current)
            if TILE - CHUNK * (chunk + 1) < PAD:
                after = tl.dot(values, filters[chunk * 3 + 2], after)
        _store_tile(out, offset, before, tile - 1, length, is_row, row, TILE)
        before = current
        current = after
    _store_tile(out, offset, before, num_tiles - 1, length, is_row, row, TILE)


def forward(
    x: Tensor,
    affine: Tensor | None,
    lengths: Tensor,
    weight: Tensor,
    dilation: int,
    way: tiles.Streaming,
) -> Tensor:
    """As `depthwise.forward` without a stride, in a way that `tiles.streaming` found."""
    channels, batch, row = x.shape
    kernel = weight.shape[-1]
    out = x.new_empty(channels, batch, row)
    _forward[(triton.cdiv(batch, way.rows), channels)](
        x,
        x if affine is None else affine,
        lengths,
        weight,
        out,
        channels,
        batch,
        row,
        triton.cdiv(row, way.tile),
        KERNEL=kernel,
        PAD=tiles.padding(kernel, dilation),
        DILATION=dilation,
        ROWS=way.rows,
        TILE=way.tile,
        CHUNK=way.chunk,
        PRODUCT=tiles.product_dtype(),
        HAS_AFFINE=affine is not None,
        IS_TURNED=affine is not None and ways.in_use().turned,
        num_warps=way.warps,
        num_stages=way.stages,
    )
    return out
