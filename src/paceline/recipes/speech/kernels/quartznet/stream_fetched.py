"""The stream of `stream` on Hopper: the tensor memory accelerator fetches and stores tiles, and few of them are masked.

Addresses and bounds cost the plain stream more instructions than its arithmetic. Here a tile is fetched whole, with
zeros where it leaves a row, and stored whole, but for what leaves a row. Up to the shortest utterance of a group no
frame needs a mask; behind the longest there is nothing to compute. Same products in the same order as there.
"""

# ruff: noqa: RUF005 (Triton knows no unpacking)
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from paceline.recipes.speech.kernels import tiles
from paceline.recipes.speech.kernels.quartznet.order import nth
from paceline.speed.layers.kernels import ways


@triton.jit
def _held(values, num_held, IS_COMPILED: tl.constexpr):
    """Values (row, frame) of the first so many frames of each row, else zero."""
    frame = tl.arange(0, values.shape[1])[None, :]
    if IS_COMPILED:
        # As one operation: apart, the comparison is made into bytes and back.
        held = tl.inline_asm_elementwise(
            "{.reg .pred held; setp.lt.s32 held, $2, $3; selp.f32 $0, $1, 0f00000000, held;}",
            "=f,f,r,r",
            [values, frame, num_held[:, None]],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    else:
        held = tl.where(frame < num_held[:, None], values, 0.0)
    return held


@triton.jit
def _products(
    x_tiles,
    before,
    current,
    filters,
    channel,
    first,
    tile,
    length,
    scale,
    shift,
    PAD: tl.constexpr,
    CHUNK: tl.constexpr,
    PRODUCT: tl.constexpr,
    HAS_AFFINE: tl.constexpr,
    IS_COMPILED: tl.constexpr,
    IS_MASKED: tl.constexpr,
):
    """Multiply a tile of inputs into the tiles of outputs before it, here and after it."""
    ROWS: tl.constexpr = before.shape[0]
    TILE: tl.constexpr = before.shape[1]
    after = tl.zeros([ROWS, TILE], tl.float32)
    for chunk in tl.static_range(TILE // CHUNK):
        start = tile * TILE + chunk * CHUNK
        values = x_tiles.load([channel, first, start]).reshape(ROWS, CHUNK).to(tl.float32)
        if HAS_AFFINE:
            values = tl.maximum(values * scale + shift, 0.0)
        if IS_MASKED:
            values = _held(values, length - start, IS_COMPILED)
        values = values.to(tl.bfloat16).to(PRODUCT)
        if chunk * CHUNK < PAD:
            before = tl.dot(values, filters[chunk * 3], before)
        current = tl.dot(values, filters[chunk * 3 + 1], current)
        if TILE - CHUNK * (chunk + 1) < PAD:
            after = tl.dot(values, filters[chunk * 3 + 2], after)
    return before, current, after


@triton.jit
def _store_tile(
    out_tiles, total, channel, first, tile, end, length, IS_COMPILED: tl.constexpr, IS_MASKED: tl.constexpr
):
    """Of the tile before the first, nothing is written: it is stored behind `end`, the last frame that a row can have.

    A store may leave a row at its end, but must not begin before it: the hardware takes that for an illegal
    instruction, while it is content with a fetch that does.
    """
    ROWS: tl.constexpr = total.shape[0]
    TILE: tl.constexpr = total.shape[1]
    if IS_MASKED:
        total = _held(total, length - tile * TILE, IS_COMPILED)
    out_tiles.store(
        [channel, first, tl.where(tile < 0, end, tile * TILE)], total.to(tl.bfloat16).reshape(1, ROWS, TILE)
    )


@triton.jit
def _forward(
    x_tiles,
    out_tiles,
    affine,
    lengths,
    weight,
    channels,
    batch,
    num_tiles,
    KERNEL: tl.constexpr,
    PAD: tl.constexpr,
    DILATION: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,
    PRODUCT: tl.constexpr,
    HAS_AFFINE: tl.constexpr,
    IS_COMPILED: tl.constexpr,
    IS_TURNED: tl.constexpr,
):
    channel = nth(tl.program_id(1), channels, IS_TURNED)
    first = tl.program_id(0) * ROWS
    utterance = first + tl.arange(0, ROWS)
    is_row = utterance < batch
    length = tl.load(lengths + utterance, mask=is_row, other=0)
    # Tiles that no utterance ends in, and those that some utterance reaches.
    num_whole = tl.min(tl.where(is_row, length, 2147483647), 0) // TILE
    num_reached = (tl.max(length, 0) + TILE - 1) // TILE
    end = num_tiles * TILE
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
    for tile in range(num_whole):
        before, current, after = _products(
            *(x_tiles, before, current, filters, channel, first, tile, length, scale, shift),
            *(PAD, CHUNK, PRODUCT, HAS_AFFINE, IS_COMPILED, False),
        )
        _store_tile(out_tiles, before, channel, first, tile - 1, end, length, IS_COMPILED, False)
        before = current
        current = after
    for tile in range(num_whole, num_reached):
        before, current, after = _products(
            *(x_tiles, before, current, filters, channel, first, tile, length, scale, shift),
            *(PAD, CHUNK, PRODUCT, HAS_AFFINE, IS_COMPILED, True),
        )
        _store_tile(out_tiles, before, channel, first, tile - 1, end, length, IS_COMPILED, True)
        before = current
        current = after
    _store_tile(out_tiles, before, channel, first, num_reached - 1, end, length, IS_COMPILED, True)
    nothing = tl.zeros([ROWS, TILE], tl.float32)
    for tile in range(num_reached, num_tiles):
        _store_tile(out_tiles, nothing, channel, first, tile, end, length, IS_COMPILED, False)


def forward(
    x: Tensor,
    affine: Tensor | None,
    lengths: Tensor,
    weight: Tensor,
    dilation: int,
    way: tiles.Streaming,
) -> Tensor:
    """As `stream.forward`."""
    channels, batch, row = x.shape
    kernel = weight.shape[-1]
    out, product = x.new_empty(channels, batch, row), tiles.product_dtype()
    _forward[(triton.cdiv(batch, way.rows), channels)](
        TensorDescriptor.from_tensor(x, [1, way.rows, way.chunk]),
        TensorDescriptor.from_tensor(out, [1, way.rows, way.tile]),
        x if affine is None else affine,
        lengths,
        weight,
        channels,
        batch,
        triton.cdiv(row, way.tile),
        KERNEL=kernel,
        PAD=tiles.padding(kernel, dilation),
        DILATION=dilation,
        ROWS=way.rows,
        TILE=way.tile,
        CHUNK=way.chunk,
        PRODUCT=product,
        HAS_AFFINE=affine is not None,
        IS_COMPILED=product is tl.bfloat16,
        IS_TURNED=affine is not None and ways.in_use().turned,
        num_warps=way.warps,
        num_stages=way.stages,
    )
    return out
