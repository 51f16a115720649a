"""Depthwise convolution over time on tensor cores: forward, and both gradients in one pass.

Activations are (channel, batch, time) in bfloat16, so that a channel's frames lie side by side and the product over
channels that follows needs no copy. A row of time is padded to a multiple of 16 frames; what lies behind an utterance's
length is zero in every output. Sums are in float32. No atomics: the same inputs give the same bits.

The input may be raw outputs of a product over channels whose batch norm is still to be applied: `affine` then holds a
scale and a shift per channel, and the kernel applies them, ReLU and the length mask to what it loads.
"""

# ruff: noqa: RUF005 (Triton knows no unpacking)
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.recipes.speech.kernels import tiles
from paceline.recipes.speech.kernels.quartznet import stream, stream_backward, stream_fetched
from paceline.speed.layers.kernels import ways


@triton.jit
def _forward(
    x,
    affine,
    lengths_in,
    lengths_out,
    weight,
    out,
    channels,
    batch,
    row_in,
    row_out,
    tiles_per_row,
    num_products,
    KERNEL: tl.constexpr,
    PAD: tl.constexpr,
    STRIDE: tl.constexpr,
    DILATION: tl.constexpr,
    LEFT: tl.constexpr,
    CHUNKS: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,
    PRODUCT: tl.constexpr,
    HAS_AFFINE: tl.constexpr,
):
    channel = tl.program_id(1)
    j = tl.arange(0, CHUNK)
    n = tl.arange(0, TILE)
    filters = ()
    for chunk in tl.static_range(CHUNKS):
        # Output n of a tile sees frame `chunk * CHUNK + j` of its window through this place of the filter.
        place = PAD - LEFT + chunk * CHUNK + j[:, None] - STRIDE * n[None, :]
        inside = (place >= 0) & (place <= (KERNEL - 1) * DILATION) & (place % DILATION == 0)
        taps = tl.load(weight + channel * KERNEL + place // DILATION, mask=inside, other=0.0)
        filters = filters + (taps.to(tl.bfloat16).to(PRODUCT),)  # type: ignore[assignment]
    scale = 1.0
    shift = 0.0
    if HAS_AFFINE:
        scale = tl.load(affine + channel)
        shift = tl.load(affine + channels + channel)
    for product in range(num_products):
        row = (tl.program_id(0) * num_products + product) * ROWS + tl.arange(0, ROWS)
        utterance = row // tiles_per_row
        tile = row - utterance * tiles_per_row
        is_row = row < batch * tiles_per_row
        length_in = tl.load(lengths_in + utterance, mask=is_row, other=0)
        length_out = tl.load(lengths_out + utterance, mask=is_row, other=0)
        start = tile * (TILE * STRIDE) - LEFT
        source = x + (channel * batch + utterance) * row_in
        total = tl.zeros([ROWS, TILE], tl.float32)
        for chunk in tl.static_range(CHUNKS):
            t = start[:, None] + (chunk * CHUNK + j)[None, :]
            # Rounded down to the 8 frames of one load, so that the mask does not split it.
            values = tl.load(source[:, None] + t, mask=(t >= 0) & ((t // 8) * 8 < length_in[:, None]), other=0.0)
            values = values.to(tl.float32)
            if HAS_AFFINE:
                values = tl.maximum(values * scale + shift, 0.0)
            values = tl.where((t >= 0) & (t < length_in[:, None]), values, 0.0)
            total = tl.dot(values.to(tl.bfloat16).to(PRODUCT), filters[chunk], total)
        t_out = (tile * TILE)[:, None] + n[None, :]
        total = tl.where(t_out < length_out[:, None], total, 0.0)
        target = out + ((channel * batch + utterance) * row_out)[:, None] + t_out
        tl.store(target, total.to(tl.bfloat16), mask=is_row[:, None] & (t_out < row_out))


@triton.jit
def _backward(
    g,
    x,
    affine,
    moments,
    added,
    lengths_in,
    lengths_out,
    weight,
    h,
    weight_parts,
    sum_parts,
    channels,
    batch,
    row_in,
    row_out,
    tiles_per_row,
    num_products,
    KERNEL: tl.constexpr,
    KERNEL_2: tl.constexpr,
    PAD: tl.constexpr,
    STRIDE: tl.constexpr,
    DILATION: tl.constexpr,
    LEFT: tl.constexpr,
    CHUNKS: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,
    PRODUCT: tl.constexpr,
    HAS_AFFINE: tl.constexpr,
    HAS_ADDED: tl.constexpr,
    NEEDS_DATA: tl.constexpr,
):
    part = tl.program_id(0)
    channel = tl.program_id(1)
    j = tl.arange(0, CHUNK)
    n = tl.arange(0, TILE)
    filters = ()
    products = ()
    for chunk in tl.static_range(CHUNKS):
        # Input n of a tile was seen by output `chunk * CHUNK + j` of its window through this place of the filter.
        place = PAD + n[None, :] - STRIDE * (j[:, None] + chunk * CHUNK - LEFT)
        in_filter = (place >= 0) & (place <= (KERNEL - 1) * DILATION) & (place % DILATION == 0)
        if NEEDS_DATA:
            taps = tl.load(weight + channel * KERNEL + place // DILATION, mask=in_filter, other=0.0)
            filters = filters + (taps.to(tl.bfloat16).to(PRODUCT),)  # type: ignore[assignment]
        products = products + (tl.zeros([TILE, CHUNK], tl.float32),)  # type: ignore[assignment]
    scale = 1.0
    shift = 0.0
    mean = 0.0
    if HAS_AFFINE:
        scale = tl.load(affine + channel)
        shift = tl.load(affine + channels + channel)
        mean = tl.load(moments + channel)
    sum_h = tl.zeros([ROWS], tl.float32)
    sum_hy = tl.zeros([ROWS], tl.float32)
    for product in range(num_products):
        row = (part * num_products + product) * ROWS + tl.arange(0, ROWS)
        utterance = row // tiles_per_row
        tile = row - utterance * tiles_per_row
        is_row = row < batch * tiles_per_row
        length_in = tl.load(lengths_in + utterance, mask=is_row, other=0)
        length_out = tl.load(lengths_out + utterance, mask=is_row, other=0)
        t = (tile * TILE)[:, None] + n[None, :]
        at = ((channel * batch + utterance) * row_in)[:, None] + t
        values = tl.load(x + at, mask=(t // 8) * 8 < length_in[:, None], other=0.0).to(tl.float32)
        if HAS_AFFINE:
            scaled = values * scale + shift
            alive = (scaled > 0.0) & (t < length_in[:, None])
            active = tl.where(alive, scaled, 0.0).to(tl.bfloat16)
        else:
            alive = t < length_in[:, None]
            active = tl.where(alive, values, 0.0).to(tl.bfloat16)
        turned = tl.trans(active.to(PRODUCT))
        start = tile * (TILE // STRIDE) - LEFT
        source = g + (channel * batch + utterance) * row_out
        total = tl.zeros([ROWS, TILE], tl.float32)
        summed = ()
        for chunk in tl.static_range(CHUNKS):
            o = start[:, None] + (chunk * CHUNK + j)[None, :]
            seen = tl.load(source[:, None] + o, mask=(o >= 0) & ((o // 8) * 8 < length_out[:, None]), other=0.0)
            seen = seen.to(PRODUCT)
            if NEEDS_DATA:
                total = tl.dot(seen, filters[chunk], total)
            summed = summed + (tl.dot(turned, seen, products[chunk]),)  # type: ignore[assignment]
        products = summed
        if NEEDS_DATA:
            is_frame = is_row[:, None] & (t < row_in)
            if HAS_ADDED:
                total += tl.load(added + at, mask=is_frame, other=0.0).to(tl.float32)
            total = tl.where(alive, total, 0.0)
            if HAS_AFFINE:
                sum_h += tl.sum(total, 1)
                sum_hy += tl.sum(total * (values - mean), 1)
            tl.store(h + at, total.to(tl.bfloat16), mask=is_frame)
    # The gradient of a place of the filter is the sum of a diagonal of the products.
    gradient = weight_parts + (part * channels + channel) * KERNEL
    if STRIDE == 1:
        # Column e of the sheared product holds the diagonals e, e - CHUNK, e - 2 CHUNK ...: apart by where they wrap.
        WRAPS: tl.constexpr = (TILE + CHUNK - 2) // CHUNK + 1
        column = n[:, None] + j[None, :]
        sheared = ()
        for chunk in tl.static_range(CHUNKS):
            sheared = sheared + (tl.gather(products[chunk], column % CHUNK, 1),)  # type: ignore[assignment]
        for number in tl.static_range(CHUNKS + WRAPS - 1):
            diagonals = tl.zeros([TILE, CHUNK], tl.float32)
            for wrap in tl.static_range(WRAPS):
                if number + wrap >= WRAPS - 1 and number + wrap < CHUNKS + WRAPS - 1:
                    diagonals += tl.where(column // CHUNK == wrap, sheared[number + wrap - WRAPS + 1], 0.0)
            place = PAD + LEFT - CHUNK * (number - WRAPS + 1) - j
            inside = (place >= 0) & (place <= (KERNEL - 1) * DILATION) & (place % DILATION == 0)
            tl.store(gradient + place // DILATION, tl.sum(diagonals, 0), mask=inside)
    else:
        k = tl.arange(0, KERNEL_2)
        summed_up = tl.zeros([KERNEL_2], tl.float32)
        for chunk in tl.static_range(CHUNKS):
            ahead = PAD + n[:, None] - DILATION * k[None, :]
            seen_at = ahead // STRIDE - chunk * CHUNK + LEFT
            inside = (ahead % STRIDE == 0) & (seen_at >= 0) & (seen_at < CHUNK)
            picked = tl.gather(products[chunk], tl.where(inside, seen_at, 0), 1)
            summed_up += tl.sum(tl.where(inside, picked, 0.0), 0)
        tl.store(gradient + k, summed_up, mask=k < KERNEL)
    if NEEDS_DATA and HAS_AFFINE:
        tl.store(sum_parts + (part * 2) * channels + channel, tl.sum(sum_hy, 0))
        tl.store(sum_parts + (part * 2 + 1) * channels + channel, tl.sum(sum_h, 0))


def forward(
    x: Tensor,
    affine: Tensor | None,
    lengths_in: Tensor,
    lengths_out: Tensor,
    weight: Tensor,
    row_out: int,
    stride: int,
    dilation: int,
    tiling: tiles.Tiling | None = None,
) -> Tensor:
    """(channel, batch, row in) bfloat16 -> (channel, batch, row out); `weight` (channel, 1, kernel) float32."""
    channels, batch, row_in = x.shape
    kernel = weight.shape[-1]
    way = tiles.streaming(kernel, stride, dilation, batch) if tiling is None else None
    if way is not None:
        if ways.in_use().fetched and _is_hopper(x):
            return stream_fetched.forward(x, affine, lengths_in, weight, dilation, tiles.fetched(way))
        return stream.forward(x, affine, lengths_in, weight, dilation, way)
    tiling = tiling or tiles.forward_tiling(batch * triton.cdiv(row_out, 64))
    window = tiles.forward_window(kernel, stride, dilation, tiling)
    tiles_per_row = triton.cdiv(row_out, tiling.tile)
    out = x.new_empty(channels, batch, row_out)
    grid = (triton.cdiv(batch * tiles_per_row, tiling.rows * tiling.products), channels)
    _forward[grid](
        x,
        x if affine is None else affine,
        lengths_in,
        lengths_out,
        weight,
        out,
        channels,
        batch,
        row_in,
        row_out,
        tiles_per_row,
        tiling.products,
        KERNEL=kernel,
        PAD=tiles.padding(kernel, dilation),
        STRIDE=stride,
        DILATION=dilation,
        LEFT=window.left,
        CHUNKS=window.chunks,
        ROWS=tiling.rows,
        TILE=tiling.tile,
        CHUNK=tiling.chunk,
        PRODUCT=tiles.product_dtype(),
        HAS_AFFINE=affine is not None,
        num_warps=tiling.warps,
        num_stages=tiling.stages,
    )
    return out


def backward(
    g: Tensor,
    x: Tensor,
    affine: Tensor | None,
    moments: Tensor | None,
    added: Tensor | None,
    lengths_in: Tensor,
    lengths_out: Tensor,
    weight: Tensor,
    stride: int,
    dilation: int,
    *,
    needs_data: bool,
    tiling: tiles.Tiling | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients for the batch-normed input (behind ReLU and mask), and parts of those for the weight and of two sums.

    `g` (channel, batch, row out) must be zero behind each length. `added` is a further gradient of the activations.
    The parts, (part, channel, kernel) and (part, 2, channel), are to be added up; the sums are those of the first
    result times (x - mean), and of the first result alone: what the batch norm's own gradient is made of.
    """
    channels, batch, row_in = x.shape
    kernel = weight.shape[-1]
    way = tiles.backward_streaming(kernel, stride, dilation, *x.shape) if tiling is None and _is_hopper(x) else None
    if way is not None:
        return stream_backward.backward(
            *(g, x, affine, moments, added, lengths_in, weight, dilation, way), needs_data=needs_data
        )
    tiling = tiling or tiles.backward_tiling(kernel, dilation, batch * triton.cdiv(row_in, 64))
    window = tiles.backward_window(kernel, stride, dilation, tiling)
    tiles_per_row = triton.cdiv(row_in, tiling.tile)
    parts = triton.cdiv(batch * tiles_per_row, tiling.rows * tiling.products)
    h = torch.empty_like(x) if needs_data else x.new_empty(0)
    weight_parts = torch.empty(parts, channels, kernel, dtype=torch.float32, device=x.device)
    sum_parts = torch.empty(parts, 2, channels, dtype=torch.float32, device=x.device)
    _backward[(parts, channels)](
        g,
        x,
        x if affine is None else affine,
        x if moments is None else moments,
        x if added is None else added,
        lengths_in,
        lengths_out,
        weight,
        h,
        weight_parts,
        sum_parts,
        channels,
        batch,
        row_in,
        g.shape[-1],
        tiles_per_row,
        tiling.products,
        KERNEL=kernel,
        KERNEL_2=max(16, triton.next_power_of_2(kernel)),
        PAD=tiles.padding(kernel, dilation),
        STRIDE=stride,
        DILATION=dilation,
        LEFT=window.left,
        CHUNKS=window.chunks,
        ROWS=tiling.rows,
        TILE=tiling.tile,
        CHUNK=tiling.chunk,
        PRODUCT=tiles.product_dtype(),
        HAS_AFFINE=affine is not None,
        HAS_ADDED=added is not None,
        NEEDS_DATA=needs_data,
        num_warps=tiling.warps,
        num_stages=tiling.stages,
    )
    return h, weight_parts, sum_parts


def _is_hopper(x: Tensor) -> bool:
    """Elsewhere what a stream holds at a time may not fit into a multiprocessor."""
    return x.is_cuda and torch.cuda.get_device_capability(x.device)[0] == 9
