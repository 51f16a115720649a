"""Both gradients of a depthwise convolution over time as a stream: `depthwise.backward` for filters of a short reach.

As in `stream`, a program walks along the time of a group of utterances of one channel, and a tile of frames of all of
them is one product. The tensor memory accelerator fetches a tile of inputs and the window of outputs that saw it while
the tile before is in hand, with zeros where the window leaves a row, so that these loads need no mask. One pass gives
the tile's gradient, with ReLU, mask and the sums of batch norm, and adds to the products whose diagonals are the
filter's. What lies behind a length is read as well: in `x` it may be anything finite.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from paceline.recipes.speech.kernels import tiles
from paceline.recipes.speech.kernels.quartznet.order import nth
from paceline.speed.layers.kernels import ways


@triton.jit
def _toeplitz(
    weight,
    KERNEL: tl.constexpr,
    DILATION: tl.constexpr,
    AHEAD: tl.constexpr,
    CHUNK: tl.constexpr,
    TILE: tl.constexpr,
    PRODUCT: tl.constexpr,
):
    """Input n of a tile was seen by output j of a chunk through place `AHEAD + n - j` of the filter."""
    place = AHEAD + tl.arange(0, TILE)[None, :] - tl.arange(0, CHUNK)[:, None]
    inside = (place >= 0) & (place <= (KERNEL - 1) * DILATION) & (place % DILATION == 0)
    return tl.load(weight + place // DILATION, mask=inside, other=0.0).to(tl.bfloat16).to(PRODUCT)


@triton.jit
def _diagonals(products, KERNEL_2: tl.constexpr, DILATION: tl.constexpr, AHEAD: tl.constexpr):
    """The gradient of a place of the filter is the sum of a diagonal of the products of a chunk (tile, chunk)."""
    n = tl.arange(0, products.shape[0])
    seen_at = AHEAD + n[:, None] - DILATION * tl.arange(0, KERNEL_2)[None, :]
    inside = (seen_at >= 0) & (seen_at < products.shape[1])
    picked = tl.gather(products, tl.where(inside, seen_at, 0), 1)
    return tl.sum(tl.where(inside, picked, 0.0), 0)


@triton.jit
def _held(scaled, total, t, length, HAS_RELU: tl.constexpr, IS_COMPILED: tl.constexpr):
    """Return activations and the gradient `total` through them: zero behind the length, and where ReLU is zero."""
    if IS_COMPILED:
        # As one operation on both: apart, the former would be computed twice, as it is loaded and as `total` lies.
        relu: tl.constexpr = "setp.gt.and.f32 alive, $2, 0f00000000, alive;" if HAS_RELU else ""
        active, total = tl.inline_asm_elementwise(
            "{.reg .pred alive; setp.lt.s32 alive, $4, $5;"
            + relu
            + "selp.f32 $0, $2, 0f00000000, alive; selp.f32 $1, $3, 0f00000000, alive;}",
            "=f,=f,f,f,r,r",
            [scaled, total, t, length],
            dtype=(tl.float32, tl.float32),
            is_pure=True,
            pack=1,
        )
    else:
        alive = t < length
        if HAS_RELU:
            alive = alive & (scaled > 0.0)
        active, total = tl.where(alive, scaled, 0.0), tl.where(alive, total, 0.0)
    return active, total


@triton.jit
def _added_tile(added, offset, t, is_row, row):
    """Fetched one tile ahead, by hand: what does not go into a product, the compiler does not fetch ahead."""
    return tl.load(added + offset[:, None] + t[None, :], mask=is_row[:, None] & (t < row)[None, :], other=0.0)


@triton.jit
def _backward(
    g_wide,
    g_more,
    x_tiles,
    h_tiles,
    affine,
    moments,
    added,
    lengths,
    weight,
    weight_parts,
    sum_parts,
    channels,
    batch,
    row,
    num_tiles,
    num_groups,
    KERNEL: tl.constexpr,
    KERNEL_2: tl.constexpr,
    PAD: tl.constexpr,
    DILATION: tl.constexpr,
    LEFT: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    WIDE: tl.constexpr,
    MORE: tl.constexpr,
    PRODUCT: tl.constexpr,
    IS_COMPILED: tl.constexpr,
    HAS_AFFINE: tl.constexpr,
    HAS_ADDED: tl.constexpr,
    NEEDS_DATA: tl.constexpr,
    IS_TURNED: tl.constexpr,
    IS_CUT: tl.constexpr,
):
    part = tl.program_id(0)
    channel = nth(tl.program_id(1), channels, IS_TURNED)
    AHEAD: tl.constexpr = PAD + LEFT
    if NEEDS_DATA:
        taps = weight + channel * KERNEL
        filters = _toeplitz(taps, KERNEL, DILATION, AHEAD, WIDE, TILE, PRODUCT)
        if MORE > 0:
            more_filters = _toeplitz(taps, KERNEL, DILATION, AHEAD - WIDE, MORE, TILE, PRODUCT)
    products = tl.zeros([TILE, WIDE], tl.float32)
    if MORE > 0:
        more_products = tl.zeros([TILE, MORE], tl.float32)
    scale = 1.0
    shift = 0.0
    mean = 0.0
    if HAS_AFFINE:
        scale = tl.load(affine + channel)
        shift = tl.load(affine + channels + channel)
        mean = tl.load(moments + channel)
    sum_h = tl.zeros([ROWS], tl.float32)
    sum_hy = tl.zeros([ROWS], tl.float32)
    for group in range(num_groups):
        first = (part * num_groups + group) * ROWS
        utterance = first + tl.arange(0, ROWS)
        is_row = utterance < batch
        length = tl.load(lengths + utterance, mask=is_row, other=0)
        offset = (channel * batch + utterance) * row
        further = tl.zeros([ROWS, TILE], tl.bfloat16)
        if HAS_ADDED:
            further = _added_tile(added, offset, tl.arange(0, TILE), is_row, row)
        # Behind the longest utterance of a group every gradient is zero.
        num_reached = (tl.max(length, 0) + TILE - 1) // TILE if IS_CUT else num_tiles
        for tile in range(num_reached):
            start = tile * TILE
            t = start + tl.arange(0, TILE)
            seen = g_wide.load([channel, first, start - LEFT]).reshape(ROWS, WIDE).to(PRODUCT)
            if MORE > 0:
                more = g_more.load([channel, first, start - LEFT + WIDE]).reshape(ROWS, MORE).to(PRODUCT)
            raw = x_tiles.load([channel, first, start]).reshape(ROWS, TILE)
            if NEEDS_DATA:
                total = further.to(tl.float32)
                if HAS_ADDED:
                    further = _added_tile(added, offset, t + TILE, is_row, row)
                total = tl.dot(seen, filters, total)
                if MORE > 0:
                    total = tl.dot(more, more_filters, total)
            values = raw.to(tl.float32)
            scaled = values * scale + shift if HAS_AFFINE else values
            if NEEDS_DATA:
                active, total = _held(scaled, total, t[None, :], length[:, None], HAS_AFFINE, IS_COMPILED)
            else:
                active, _ = _held(scaled, scaled, t[None, :], length[:, None], HAS_AFFINE, False)
            turned = tl.trans(active.to(tl.bfloat16).to(PRODUCT))
            products = tl.dot(turned, seen, products)
            if MORE > 0:
                more_products = tl.dot(turned, more, more_products)
            if NEEDS_DATA:
                if HAS_AFFINE:
                    sum_h += tl.sum(total, 1)
                    sum_hy += tl.sum(total * (values - mean), 1)
                h_tiles.store([channel, first, start], total.to(tl.bfloat16).reshape(1, ROWS, TILE))
        if NEEDS_DATA:
            for tile in range(num_reached, num_tiles):
                h_tiles.store([channel, first, tile * TILE], tl.zeros([1, ROWS, TILE], tl.bfloat16))
    gradient = _diagonals(products, KERNEL_2, DILATION, AHEAD)
    if MORE > 0:
        gradient += _diagonals(more_products, KERNEL_2, DILATION, AHEAD - WIDE)
    k = tl.arange(0, KERNEL_2)
    tl.store(weight_parts + (part * channels + channel) * KERNEL + k, gradient, mask=k < KERNEL)
    if NEEDS_DATA and HAS_AFFINE:
        tl.store(sum_parts + (part * 2) * channels + channel, tl.sum(sum_hy, 0))
        tl.store(sum_parts + (part * 2 + 1) * channels + channel, tl.sum(sum_h, 0))


def backward(
    g: Tensor,
    x: Tensor,
    affine: Tensor | None,
    moments: Tensor | None,
    added: Tensor | None,
    lengths: Tensor,
    weight: Tensor,
    dilation: int,
    way: tiles.BackwardStreaming,
    *,
    needs_data: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """As `depthwise.backward` without a stride, in a way that `tiles.backward_streaming` found."""
    channels, batch, row = x.shape
    kernel = weight.shape[-1]
    parts = triton.cdiv(batch, way.rows * way.groups)
    h = torch.empty_like(x) if needs_data else x.new_empty(0)
    weight_parts = torch.empty(parts, channels, kernel, dtype=torch.float32, device=x.device)
    sum_parts = torch.empty(parts, 2, channels, dtype=torch.float32, device=x.device)

    def cut(tensor: Tensor, frames: int) -> TensorDescriptor:
        return TensorDescriptor.from_tensor(tensor, [1, way.rows, frames])

    product = tiles.product_dtype()
    _backward[(parts, channels)](
        cut(g, way.wide),
        cut(g, way.more or way.wide),
        cut(x, way.tile),
        cut(h if needs_data else x, way.tile),
        x if affine is None else affine,
        x if moments is None else moments,
        x if added is None else added,
        lengths,
        weight,
        weight_parts,
        sum_parts,
        channels,
        batch,
        row,
        triton.cdiv(row, way.tile),
        way.groups,
        KERNEL=kernel,
        KERNEL_2=max(16, triton.next_power_of_2(kernel)),
        PAD=tiles.padding(kernel, dilation),
        DILATION=dilation,
        LEFT=tiles.window_start(kernel, dilation),
        ROWS=way.rows,
        TILE=way.tile,
        WIDE=way.wide,
        MORE=way.more,
        PRODUCT=product,
        IS_COMPILED=product is tl.bfloat16,
        HAS_AFFINE=affine is not None,
        HAS_ADDED=added is not None,
        NEEDS_DATA=needs_data,
        IS_TURNED=affine is None and ways.in_use().turned,
        IS_CUT=ways.in_use().cut,
        num_warps=way.warps,
        num_stages=way.stages,
    )
    return h, weight_parts, sum_parts
