"""Products over channels on Hopper, of frames that hold speech alone, with batch norm's statistics on the way.

An activation (channel, batch, row) times a matrix (filter, channel) is one large product, of which 15 % lie behind the
utterances' lengths in a usual batch. Here a list of tiles that are reached by an utterance is made once for a batch, on
the device (`list_tiles`), and each of 132 programs takes every so many tiles of it. A program keeps a block of the
matrix in shared memory for all of its tiles; one warp fetches tiles of activations ahead, two groups
of warps multiply, each half of the block, so that one stores and sums while the other multiplies. Sums for batch norm
are kept in registers from tile to tile about the mean of the program's first tile, so that nothing cancels, and are
combined in a fixed order: same bits in every run.

Written in Gluon, Triton's language beneath: what a warp does is said here, not found by the compiler.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.tools.tensor_descriptor import TensorDescriptor as PlainDescriptor

from paceline.recipes.speech.kernels.quartznet.norm import Statistics
from paceline.recipes.speech.kernels.tiles import PRODUCT_WIDTH as WIDTH
from paceline.recipes.speech.kernels.tiles import num_listed, product_dtype

PROGRAMS = 132
"""Multiprocessors of an H200."""
MANY_FRAMES = 131072
"""Of a channel: between batches of 64 and of 256 utterances, at which gradients were measured beside the library's."""
_FLAT = gl.NVMMASharedLayout(128, 16, rank=2)
_DEEP = gl.NVMMASharedLayout(128, 16, rank=3)


class Pipeline(NamedTuple):
    """Division of a product's work in time."""

    depth: int
    """Channels that are fetched at a time."""
    stages: int
    """Fetches that are under way."""


PIPELINE = Pipeline(depth=64, stages=4)


@triton.jit
def _list_tiles(lengths, tiles, batch, row, WIDTH: tl.constexpr, BATCH: tl.constexpr):
    """The number of tiles that an utterance reaches, these tiles, and then the others, as utterance * 65536 + place.

    A second program makes the list of tiles of half the width, behind the first.
    """
    width = WIDTH // (1 + tl.program_id(0))
    tiles += tl.program_id(0) * (1 + batch * ((row + WIDTH - 1) // WIDTH))
    num_times = (row + width - 1) // width
    b = tl.arange(0, BATCH)
    length = tl.load(lengths + b, mask=b < batch, other=0)
    num_reached = (length + width - 1) // width
    first = tl.cumsum(num_reached, 0) - num_reached
    total = tl.sum(num_reached, 0)
    tl.store(tiles, total)
    for t in range(num_times):
        place = tl.where(t < num_reached, first + t, total + b * num_times - first + t - num_reached)
        tl.store(tiles + 1 + place, b * 65536 + t, mask=b < batch)


@gluon.jit
def _fetch(
    w_tiles,
    x_tiles,
    w_held,
    x_held,
    w_ready,
    full,
    empty,
    tiles,
    first,
    begin,
    step,
    DEPTHS: gl.constexpr,
    STAGES: gl.constexpr,
    BLOCKS: gl.constexpr,
    DEPTH: gl.constexpr,
    WIDTH: gl.constexpr,
    IS_TURNED: gl.constexpr,
):
    num_reached = gl.load(tiles)
    turn = 0
    # Read one tile ahead: a fetch must not wait for where it lies. (The list has others behind those with speech.)
    following = gl.load(tiles + 1 + begin, mask=begin < num_reached, other=0)
    for number in range(begin, num_reached, step):
        tile = following
        following = gl.load(tiles + 1 + number + step, mask=number + step < num_reached, other=0)
        utterance = tile >> 16
        start = (tile & 65535) * WIDTH
        for k in gl.static_range(DEPTHS):
            if turn == 0:
                mbarrier.expect(w_ready.index(k), BLOCKS * 64 * DEPTH * 2)
                for block in gl.static_range(BLOCKS):
                    target = w_held.index(k * BLOCKS + block)
                    if IS_TURNED:  # noqa: SIM108 (Gluon has no such lists)
                        at = [k * DEPTH, first + block * 64]
                    else:
                        at = [first + block * 64, k * DEPTH]
                    tma.async_copy_global_to_shared(w_tiles, at, w_ready.index(k), target)
            mbarrier.wait(empty.index(k % STAGES), ((turn + k // STAGES) & 1) ^ 1)
            mbarrier.expect(full.index(k % STAGES), DEPTH * WIDTH * 2)
            tma.async_copy_global_to_shared(
                x_tiles, [utterance, k * DEPTH, start], full.index(k % STAGES), x_held.index(k % STAGES)
            )
        turn += DEPTHS // STAGES


@gluon.jit
def _store(total, out_tiles, out_held, first, utterance, start):
    """Store a tile, rounded, and return it so."""
    out = total.to(gl.bfloat16)
    tma.store_wait(0)
    out_held.store(out)
    fence_async_shared()
    tma.async_copy_shared_to_global(out_tiles, [utterance, first, start], out_held)
    return out.to(gl.float32)


@gluon.jit
def _multiply(
    out_tiles,
    w_held,
    x_held,
    out_held,
    w_ready,
    full,
    empty,
    parts,
    tiles,
    filters,
    first,
    begin,
    step,
    num_tiles,
    HALF: gl.constexpr,
    DEPTHS: gl.constexpr,
    STAGES: gl.constexpr,
    ROWS: gl.constexpr,
    WIDTH: gl.constexpr,
    HAS_SUMS: gl.constexpr,
    IS_TURNED: gl.constexpr,
):
    """One of two groups of warps: a half of the filters of every tile."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    BLOCKS: gl.constexpr = 2 * ROWS
    FIRST: gl.constexpr = HALF * ROWS
    TURNS: gl.constexpr = DEPTHS // STAGES
    num_reached = gl.load(tiles)
    total = gl.zeros([64, WIDTH], gl.float32, LAYOUT)
    other = gl.zeros([64, WIDTH], gl.float32, LAYOUT)
    nothing = gl.zeros([64], gl.float32, gl.SliceLayout(1, LAYOUT))
    pivot = nothing
    sums = nothing
    squares = nothing
    other_pivot = nothing
    other_sums = nothing
    other_squares = nothing
    own = first + FIRST * 64
    turn = 0
    following = gl.load(tiles + 1 + begin, mask=begin < num_reached, other=0)
    for number in range(begin, num_reached, step):
        tile = following
        following = gl.load(tiles + 1 + number + step, mask=number + step < num_reached, other=0)
        utterance = tile >> 16
        start = (tile & 65535) * WIDTH
        for k in gl.static_range(DEPTHS):
            if turn == 0:
                mbarrier.wait(w_ready.index(k), 0)
            mbarrier.wait(full.index(k % STAGES), (turn + k // STAGES) & 1)
            x = x_held.index(k % STAGES)
            w = w_held.index(k * BLOCKS + FIRST)
            if IS_TURNED:
                w = w.permute((1, 0))
            total = warpgroup_mma(w, x, total, use_acc=k > 0, is_async=True)
            if ROWS == 2:
                w = w_held.index(k * BLOCKS + FIRST + 1)
                if IS_TURNED:
                    w = w.permute((1, 0))
                other = warpgroup_mma(w, x, other, use_acc=k > 0, is_async=True)
            if k > 0:
                # The products before these are done: their tile may be fetched over.
                if ROWS == 2:
                    total, other = warpgroup_mma_wait(2, deps=(total, other))
                else:
                    total = warpgroup_mma_wait(1, deps=(total,))
                mbarrier.arrive(empty.index((k - 1) % STAGES), count=1)
        if ROWS == 2:
            total, other = warpgroup_mma_wait(0, deps=(total, other))
        else:
            total = warpgroup_mma_wait(0, deps=(total,))
        mbarrier.arrive(empty.index((DEPTHS - 1) % STAGES), count=1)
        values = _store(total, out_tiles, out_held, own, utterance, start)
        if HAS_SUMS:
            if turn == 0:
                pivot = gl.sum(values, 1) * (1.0 / WIDTH)
            away = values - gl.expand_dims(pivot, 1)
            sums += gl.sum(away, 1)
            squares += gl.sum(away * away, 1)
        if ROWS == 2:
            values = _store(other, out_tiles, out_held, own + 64, utterance, start)
            if HAS_SUMS:
                if turn == 0:
                    other_pivot = gl.sum(values, 1) * (1.0 / WIDTH)
                away = values - gl.expand_dims(other_pivot, 1)
                other_sums += gl.sum(away, 1)
                other_squares += gl.sum(away * away, 1)
        turn += TURNS
    if HAS_SUMS:
        at = parts + begin * 3 * filters + own + gl.arange(0, 64, layout=gl.SliceLayout(1, LAYOUT))
        gl.store(at, pivot)
        gl.store(at + filters, sums)
        gl.store(at + 2 * filters, squares)
        if ROWS == 2:
            gl.store(at + 64, other_pivot)
            gl.store(at + 64 + filters, other_sums)
            gl.store(at + 64 + 2 * filters, other_squares)
    # Zeros behind the lengths.
    tma.store_wait(0)
    out_held.store(gl.zeros([64, WIDTH], gl.bfloat16, LAYOUT))
    fence_async_shared()
    for number in range(num_reached + begin, num_tiles, step):
        tile = gl.load(tiles + 1 + number)
        for row in gl.static_range(ROWS):
            tma.async_copy_shared_to_global(out_tiles, [tile >> 16, own + row * 64, (tile & 65535) * WIDTH], out_held)
    tma.store_wait(0)


@gluon.jit
def _product(
    w_tiles,
    x_tiles,
    out_tiles,
    parts,
    tiles,
    filters,
    num_tiles,
    DEPTHS: gl.constexpr,
    STAGES: gl.constexpr,
    ROWS: gl.constexpr,
    DEPTH: gl.constexpr,
    WIDTH: gl.constexpr,
    LAYOUT: gl.constexpr,
    W_LAYOUT: gl.constexpr,
    HAS_SUMS: gl.constexpr,
    IS_TURNED: gl.constexpr,
):
    """A block of 128 filters (256, if a group of warps has two blocks of half the filters) of every `step`-th tile,
    from channels in `DEPTHS` pieces."""
    BLOCKS: gl.constexpr = 2 * ROWS
    num_blocks = filters // (64 * BLOCKS)
    first = (gl.program_id(0) % num_blocks) * 64 * BLOCKS
    begin = gl.program_id(0) // num_blocks
    step = gl.num_programs(0) // num_blocks
    w_held = gl.allocate_shared_memory(
        gl.bfloat16, [DEPTHS * BLOCKS, DEPTH, 64] if IS_TURNED else [DEPTHS * BLOCKS, 64, DEPTH], W_LAYOUT
    )
    x_held = gl.allocate_shared_memory(gl.bfloat16, [STAGES, DEPTH, WIDTH], LAYOUT)
    out_held = gl.allocate_shared_memory(gl.bfloat16, [2, 64, WIDTH], LAYOUT)
    w_ready = gl.allocate_shared_memory(gl.int64, [DEPTHS, 1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    # Nobody waits at these two, but the kernel was measured with them: without, its code is another.
    unused = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for half in gl.static_range(2):
        mbarrier.init(unused.index(half), count=1)
    for k in gl.static_range(DEPTHS):
        mbarrier.init(w_ready.index(k), count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (
                _multiply,
                (
                    out_tiles,
                    w_held,
                    x_held,
                    out_held.index(0),
                    w_ready,
                    full,
                    empty,
                    parts,
                    tiles,
                    filters,
                    first,
                    begin,
                    step,
                    num_tiles,
                    0,
                    DEPTHS,
                    STAGES,
                    ROWS,
                    WIDTH,
                    HAS_SUMS,
                    IS_TURNED,
                ),
            ),
            (
                _multiply,
                (
                    out_tiles,
                    w_held,
                    x_held,
                    out_held.index(1),
                    w_ready,
                    full,
                    empty,
                    parts,
                    tiles,
                    filters,
                    first,
                    begin,
                    step,
                    num_tiles,
                    1,
                    DEPTHS,
                    STAGES,
                    ROWS,
                    WIDTH,
                    HAS_SUMS,
                    IS_TURNED,
                ),
            ),
            (
                _fetch,
                (
                    w_tiles,
                    x_tiles,
                    w_held,
                    x_held,
                    w_ready,
                    full,
                    empty,
                    tiles,
                    first,
                    begin,
                    step,
                    DEPTHS,
                    STAGES,
                    BLOCKS,
                    DEPTH,
                    WIDTH,
                    IS_TURNED,
                ),
            ),
        ],
        [4, 1],
        [240, 24],
    )


@triton.jit
def _combine(
    parts,
    tiles,
    weight,
    bias,
    affine,
    moments,
    filters,
    step,
    true_size,
    eps,
    WIDTH: tl.constexpr,
    STEPS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Chan's rule; frames behind the lengths are zeros, which count, those behind the last frame do not."""
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    number = tl.arange(0, STEPS)
    # All loads at once: the kernel is short, and one that waits for another would double its time.
    is_program = (number < step)[:, None]
    at = parts + (number * 3 * filters)[:, None] + channel[None, :]
    pivot = tl.load(at, mask=is_program, other=0.0)
    sums = tl.load(at + filters, mask=is_program, other=0.0)
    about_pivot = tl.load(at + 2 * filters, mask=is_program, other=0.0)
    slope, level = tl.load(weight + channel), tl.load(bias + channel)
    num_tiles = tl.where(number < step, (tl.load(tiles) - number + step - 1) // step, 0)
    count = (WIDTH * num_tiles).to(tl.float32)[:, None]
    there = (num_tiles > 0)[:, None]
    sums = tl.where(there, sums, 0.0)
    shift = sums / tl.maximum(count, 1.0)
    mean = tl.where(there, pivot + shift, 0.0)
    inner = tl.where(there, about_pivot - sums * shift, 0.0)
    counted = tl.sum(count, 0)
    mean_here = tl.sum(mean * count, 0) / tl.maximum(counted, 1.0)
    away = tl.where(there, mean - mean_here[None, :], 0.0)
    squares = tl.sum(inner + away * away * count, 0)
    size = 1.0 * true_size
    mean_of_all = mean_here * (counted / size)
    squares = tl.maximum(squares + mean_here * mean_of_all * (size - counted), 0.0)
    scale = 1.0 / tl.sqrt(squares / size + eps)
    slope = slope * scale
    tl.store(moments + channel, mean_of_all)
    tl.store(moments + filters + channel, scale)
    tl.store(moments + 2 * filters + channel, squares / (size - 1))
    tl.store(affine + channel, slope)
    tl.store(affine + filters + channel, level - mean_of_all * slope)


@triton.jit
def _weight_gradient(
    g_tiles,
    x_tiles,
    parts,
    tiles,
    filters,
    channels,
    num_parts,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr,
    PRODUCT: tl.constexpr,
):
    """A block of filters and channels, summed over one of so many equal parts of the tiles that hold speech."""
    part = tl.program_id(1)
    filter = tl.program_id(0) % (filters // ROWS) * ROWS
    channel = tl.program_id(0) // (filters // ROWS) * COLUMNS
    num_reached = tl.load(tiles)
    begin = num_reached * part // num_parts
    end = num_reached * (part + 1) // num_parts
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    # Read one tile ahead: what is fetched must not wait for where it lies.
    following = tl.load(tiles + 1 + begin, mask=begin < end, other=0)
    for number in range(begin, end):
        tile = following
        following = tl.load(tiles + 2 + number, mask=number + 1 < end, other=0)
        utterance = tile >> 16
        start = (tile & 65535) * WIDTH
        g = g_tiles.load([utterance, filter, start]).reshape(ROWS, WIDTH).to(PRODUCT)
        x = x_tiles.load([utterance, channel, start]).reshape(COLUMNS, WIDTH).to(PRODUCT)
        total = tl.dot(g, x.T, total)
    at = (part * filters + filter + tl.arange(0, ROWS))[:, None] * channels + channel + tl.arange(0, COLUMNS)[None, :]
    tl.store(parts + at, total)


def fits(filters: int, channels: int) -> bool:
    """Return True if the kernel is for products of this many channels to this many filters."""
    return channels in (256, 512) and filters % (128 * _rows(channels)) == 0


def gains_backward(filters: int, channels: int, batch: int, row: int) -> bool:
    """Return True if it is the faster way to the gradient of the channels: for few channels and small batches."""
    return filters == 256 and fits(channels, filters) and batch * row < MANY_FRAMES


def gains_weights(filters: int, channels: int, batch: int, row: int) -> bool:
    """Return True if it is the faster way to the gradient of the matrix: for large batches."""
    return filters % 128 == 0 and channels % 256 == 0 and batch * row >= MANY_FRAMES


def _rows(channels: int) -> int:
    """As many blocks of 64 filters for either half as fit into shared memory."""
    return 512 // channels


def list_tiles(lengths: Tensor, row: int) -> Tensor:
    """Two lists, of tiles of `WIDTH` frames and of half as many: how many hold speech, these, and the others."""
    batch = len(lengths)
    tiles = torch.empty(num_listed(batch, row), dtype=torch.int32, device=lengths.device)
    _list_tiles[(2,)](lengths, tiles, batch, row, WIDTH=WIDTH, BATCH=max(2, triton.next_power_of_2(batch)), num_warps=4)
    return tiles


def forward(
    matrix: Tensor, x: Tensor, tiles: Tensor, frames: int, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Statistics]:
    """(filter, channel) times (channel, batch, row), and the statistics of what comes out; `x` is 0 behind lengths."""
    filters, (channels, batch, _) = matrix.shape[0], x.shape
    step = _step(filters, channels)
    parts = torch.empty(step, 3, filters, dtype=torch.float32, device=x.device)
    y = _launch(matrix, x, tiles, filters, parts)
    affine = torch.empty(2, filters, dtype=torch.float32, device=x.device)
    moments = torch.empty(3, filters, dtype=torch.float32, device=x.device)
    _combine[(filters // 8,)](
        parts,
        tiles,
        weight,
        bias,
        affine,
        moments,
        filters,
        step,
        batch * frames,
        eps,
        WIDTH=WIDTH,
        STEPS=triton.next_power_of_2(step),
        CHANNELS=8,
        num_warps=4,
    )
    return y, Statistics(affine, moments)


def data_gradient(matrix: Tensor, g: Tensor, tiles: Tensor) -> Tensor:
    """(filter, channel), turned, times (filter, batch, row), which is 0 behind lengths."""
    return _launch(matrix, g, tiles, matrix.shape[1], None)


def weight_gradient(g: Tensor, x: Tensor, tiles: Tensor) -> Tensor:
    """(filter, channel) float32: (filter, batch, row) times (channel, batch, row), turned; both 0 behind lengths."""
    filters, (channels, batch, row) = g.shape[0], x.shape
    blocks = filters // 128 * (channels // 256)
    num_parts = max(1, PROGRAMS // blocks)
    parts = torch.empty(num_parts, filters, channels, dtype=torch.float32, device=x.device)
    _weight_gradient[(blocks, num_parts)](
        _tensor_tiles(g, 128),
        _tensor_tiles(x, 256),
        parts,
        tiles[1 + batch * triton.cdiv(row, WIDTH) :],
        filters,
        channels,
        num_parts,
        ROWS=128,
        COLUMNS=256,
        WIDTH=WIDTH // 2,
        PRODUCT=product_dtype(),
        num_warps=8,
        num_stages=4,
    )
    return parts.sum(0)


def _tensor_tiles(x: Tensor, channels: int) -> PlainDescriptor:
    every, batch, row = x.shape
    return PlainDescriptor(x, [batch, every, row], [row, batch * row, 1], [1, channels, WIDTH // 2])


def _step(filters: int, channels: int) -> int:
    return PROGRAMS // (filters // (128 * _rows(channels)))


def matrix_layout(depth: int, is_turned: bool) -> gl.NVMMASharedLayout:
    """Return the layout of a piece of the matrix in shared memory: its rows are as long as a fetch is deep."""
    return _FLAT if is_turned else gl.NVMMASharedLayout(min(128, 2 * depth), 16, rank=2)


def _launch(matrix: Tensor, x: Tensor, tiles: Tensor, filters: int, parts: Tensor | None) -> Tensor:
    channels, batch, row = x.shape
    out = x.new_empty(filters, batch, row)
    is_turned, rows = parts is None, _rows(channels)
    depth, stages = PIPELINE
    w_layout = matrix_layout(depth, is_turned)
    _product[(_step(filters, channels) * (filters // (128 * rows)),)](
        TensorDescriptor.from_tensor(matrix, [depth, 64] if is_turned else [64, depth], w_layout),
        _cut(x, depth),
        _cut(out, 64),
        x if parts is None else parts,
        tiles,
        filters,
        batch * triton.cdiv(row, WIDTH),
        DEPTHS=channels // depth,
        STAGES=stages,
        ROWS=rows,
        DEPTH=depth,
        WIDTH=WIDTH,
        LAYOUT=_FLAT,
        W_LAYOUT=w_layout,
        HAS_SUMS=parts is not None,
        IS_TURNED=is_turned,
        num_warps=4,
    )
    return out


def _cut(x: Tensor, channels: int) -> TensorDescriptor:
    """Tiles of so many channels of one utterance; what leaves a row is zero, or is not stored."""
    every, batch, row = x.shape
    return TensorDescriptor(x, [batch, every, row], [row, batch * row, 1], [1, channels, WIDTH], _DEEP)
