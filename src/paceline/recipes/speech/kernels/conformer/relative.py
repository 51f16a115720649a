"""Attention with relative positions (Dai et al. 2019, "Transformer-XL"), forward and backward in five kernels.

Scores are ((q + u) k + shifted((q + v) p)) / sqrt(width), where the position of key j seen from query i is row
(time - 1) - i + j of `p`. A program of the forward pass multiplies its queries with all positions that they see, stores
these products already shifted (the only scores that are ever in memory, in the dtype of the activations, kept for
backward), and goes on as flash attention does. Backward stores the gradient of the scores once; who sums it over
positions reads it shifted. Queries and keys behind an utterance's length are neither read nor counted; outputs there
are zero. Sums are in a fixed order, without atomics: the same inputs give the same bits.

Dropout follows from (seed, row, key), as `residual_norm.kept` says.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.recipes.speech.kernels.tiles import product_dtype
from paceline.speed.layers.kernels.rows import _mixed


class Tile(NamedTuple):
    """Queries and keys (or positions) that a program multiplies at a time, and its warps."""

    queries: int
    keys: int
    warps: int = 4
    stages: int = 3


TILES = {
    "forward": Tile(64, 64),
    "keys": Tile(32, 64, stages=1),
    "queries": Tile(64, 64),
    "places": Tile(64, 64, stages=1),
}
"""By kernel, the fastest of those tried on an H200 with 209 frames, 64 channels for each head and dropout. `queries`
has as many keys as `keys`, which writes what it reads."""
PROGRAMS, LEAST_PARTS = 528, 16
"""That sum over positions are about so many: four for each multiprocessor of an H200; parts of a batch, at least."""
LOG2_E = 1.4426950408889634


@triton.jit
def _row_keys(seed, row):
    """Bits of a row of scores, from which those of its keys follow."""
    first = tl.load(seed).to(tl.uint32, bitcast=True)
    second = tl.load(seed + 1).to(tl.uint32, bitcast=True)
    return _mixed(_mixed(row.to(tl.uint32) ^ first) + second)


@triton.jit
def _forward(
    qkv, p, bias_u, bias_v, lengths, seed, shifted, out, lse, time, heads, width, pitch, p_stride, least, factor, scale,
    HAS_DROPOUT: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, HEAD: tl.constexpr, PADDED: tl.constexpr,
    PRODUCT: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * QUERIES
    both = tl.program_id(1)
    b = both // heads
    h = both % heads
    length = tl.load(lengths + b)
    end = tl.where(first < length, length, 0)
    i = first + tl.arange(0, QUERIES)
    d = tl.arange(0, PADDED)
    is_wide = d < HEAD
    c = h * HEAD + d
    row = both * time + i
    q_there = (i < length)[:, None] & is_wide[None, :]
    q = tl.load(qkv + (b * time + i)[:, None] * (3 * width) + c[None, :], mask=q_there, other=0.0)
    u = tl.load(bias_u + c, mask=is_wide, other=0.0).to(tl.float32)
    v = tl.load(bias_v + c, mask=is_wide, other=0.0).to(tl.float32)
    q_u = (q.to(tl.float32) + u[None, :]).to(PRODUCT)
    q_v = (q.to(tl.float32) + v[None, :]).to(PRODUCT)
    m_first = tl.maximum(time - first - QUERIES, 0)
    m_end = tl.where(end > 0, tl.minimum(time - 1 - first + end, 2 * time - 1), m_first)
    for start in range(m_first, m_end, KEYS):
        m = start + tl.arange(0, KEYS)
        there = is_wide[:, None] & (m < 2 * time - 1)[None, :]
        places = tl.load(p + m[None, :] * p_stride + c[:, None], mask=there, other=0.0)
        j = m[None, :] - (time - 1) + i[:, None]
        found = tl.dot(q_v, places.to(PRODUCT))
        tl.store(
            shifted + row[:, None] * pitch + j,
            found.to(shifted.dtype.element_ty),
            mask=(j >= 0) & (j < length) & (i < length)[:, None],
        )
    tl.debug_barrier()
    top = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    acc = tl.zeros([QUERIES, PADDED], tl.float32)
    if HAS_DROPOUT:
        bits = _row_keys(seed, row)
    for start in range(0, end, KEYS):
        j = start + tl.arange(0, KEYS)
        at = (b * time + j) * (3 * width)
        keys = tl.load(qkv + at[None, :] + width + c[:, None], mask=is_wide[:, None] & (j < length)[None, :], other=0.0)
        s = tl.dot(q_u, keys.to(PRODUCT))
        # Keys behind the length are read as well, so that loads are wide; what was never written is left out below.
        s += tl.load(shifted + row[:, None] * pitch + j[None, :], mask=(i < length)[:, None], other=0.0).to(tl.float32)
        s = tl.where((j < length)[None, :], s * scale, float("-inf"))
        higher = tl.maximum(top, tl.max(s, 1))
        e = tl.exp2(s - higher[:, None])
        shrink = tl.exp2(top - higher)
        total = total * shrink + tl.sum(e, 1)
        top = higher
        if HAS_DROPOUT:
            e = tl.where(_mixed(bits[:, None] + j[None, :].to(tl.uint32)) >= least, e * factor, 0.0)
        values = tl.load(
            qkv + at[:, None] + 2 * width + c[None, :], mask=(j < length)[:, None] & is_wide[None, :], other=0.0
        )
        acc = acc * shrink[:, None] + tl.dot(e.to(PRODUCT), values.to(PRODUCT))
    safe = tl.where(total > 0.0, total, 1.0)
    acc = tl.where((i < length)[:, None], acc / safe[:, None], 0.0)
    inside = (i < time)[:, None] & is_wide[None, :]
    tl.store(out + (b * time + i)[:, None] * width + c[None, :], acc.to(out.dtype.element_ty), mask=inside)
    tl.store(lse + row, tl.where((i < length) & (total > 0.0), top + tl.log2(safe), 0.0), mask=i < time)


@triton.jit
def _deltas(g, out, lengths, deltas, time, heads, width, ROWS: tl.constexpr, HEAD: tl.constexpr, PADDED: tl.constexpr):
    """Sum of the gradient of an output times the output: (batch, heads, time)."""
    t = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    both = tl.program_id(1)
    b = both // heads
    d = tl.arange(0, PADDED)
    there = (t < tl.load(lengths + b))[:, None] & (d < HEAD)[None, :]
    at = (b * time + t)[:, None] * width + (both % heads) * HEAD + d[None, :]
    upper = tl.load(g + at, mask=there, other=0.0).to(tl.float32)
    total = tl.sum(upper * tl.load(out + at, mask=there, other=0.0).to(tl.float32), 1)
    tl.store(deltas + both * time + t, total, mask=t < time)


@triton.jit
def _backward_keys(
    g, qkv, bias_u, lengths, seed, shifted, lse, deltas, slopes, of_qkv, time, heads, width, pitch, least, factor,
    scale, natural, HAS_DROPOUT: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, HEAD: tl.constexpr,
    PADDED: tl.constexpr, PRODUCT: tl.constexpr,
):  # fmt: skip
    """Gradients of a tile of keys and values; on the way those of its scores are stored.

    Scores are (keys, queries) here, so that they are the left side of both products that sum over queries.
    """
    first = tl.program_id(0) * KEYS
    both = tl.program_id(1)
    b = both // heads
    h = both % heads
    length = tl.load(lengths + b)
    end = tl.where(first < length, length, 0)
    j = first + tl.arange(0, KEYS)
    d = tl.arange(0, PADDED)
    is_wide = d < HEAD
    c = h * HEAD + d
    at = (b * time + j) * (3 * width)
    there = (j < length)[:, None] & is_wide[None, :]
    keys = tl.load(qkv + at[:, None] + width + c[None, :], mask=there, other=0.0)
    values = tl.load(qkv + at[:, None] + 2 * width + c[None, :], mask=there, other=0.0)
    u = tl.load(bias_u + c, mask=is_wide, other=0.0).to(tl.float32)
    # (q + u) k is q k and a number for each key.
    of_u = tl.sum(keys.to(tl.float32) * u[None, :], 1)
    keys = keys.to(PRODUCT)
    values = values.to(PRODUCT)
    of_keys = tl.zeros([KEYS, PADDED], tl.float32)
    of_values = tl.zeros([KEYS, PADDED], tl.float32)
    sums = tl.zeros([KEYS], tl.float32)
    for start in range(0, end, QUERIES):
        i = start + tl.arange(0, QUERIES)
        row = both * time + i
        i_there = (i < length)[:, None] & is_wide[None, :]
        q = tl.load(qkv + (b * time + i)[:, None] * (3 * width) + c[None, :], mask=i_there, other=0.0).to(PRODUCT)
        upper = tl.load(g + (b * time + i)[:, None] * width + c[None, :], mask=i_there, other=0.0).to(PRODUCT)
        top = tl.load(lse + row, mask=i < length, other=0.0)
        delta = tl.load(deltas + row, mask=i < length, other=0.0)
        seen = (j < length)[:, None] & (i < length)[None, :]
        by_place = tl.load(shifted + row[None, :] * pitch + j[:, None], mask=(i < length)[None, :], other=0.0)
        s = tl.dot(keys, tl.trans(q)) + of_u[:, None] + by_place.to(tl.float32)
        share = tl.where(seen, tl.exp2(s * scale - top[None, :]), 0.0)
        of_share = tl.dot(values, tl.trans(upper))
        kept = share
        if HAS_DROPOUT:
            bits = _row_keys(seed, row)
            is_kept = _mixed(bits[None, :] + j[:, None].to(tl.uint32)) >= least
            kept = tl.where(is_kept, share * factor, 0.0)
            of_share = tl.where(is_kept, of_share * factor, 0.0)
        of_values += tl.dot(kept.to(PRODUCT), upper)
        slope = share * (of_share - delta[None, :]) * natural
        sums += tl.sum(slope, 1)
        narrow = slope.to(slopes.dtype.element_ty)
        # Zeros for keys behind the length.
        tl.store(slopes + row[None, :] * pitch + j[:, None], narrow, mask=(i < length)[None, :])
        of_keys += tl.dot(narrow.to(PRODUCT), q)
    of_keys += sums[:, None] * u[None, :]
    inside = (j < time)[:, None] & is_wide[None, :]
    tl.store(of_qkv + at[:, None] + width + c[None, :], of_keys.to(of_qkv.dtype.element_ty), mask=inside)
    tl.store(of_qkv + at[:, None] + 2 * width + c[None, :], of_values.to(of_qkv.dtype.element_ty), mask=inside)


@triton.jit
def _backward_queries(
    qkv, p, lengths, slopes, of_qkv, parts, time, heads, width, pitch, p_stride,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, HEAD: tl.constexpr, PADDED: tl.constexpr,
    PRODUCT: tl.constexpr,
):  # fmt: skip
    """Gradients of a tile of queries, and its sums for those of u and v."""
    first = tl.program_id(0) * QUERIES
    both = tl.program_id(1)
    b = both // heads
    h = both % heads
    length = tl.load(lengths + b)
    end = tl.where(first < length, length, 0)
    i = first + tl.arange(0, QUERIES)
    d = tl.arange(0, PADDED)
    is_wide = d < HEAD
    c = h * HEAD + d
    row = both * time + i
    i_there = (i < length)[:, None]
    by_content = tl.zeros([QUERIES, PADDED], tl.float32)
    by_place = tl.zeros([QUERIES, PADDED], tl.float32)
    for start in range(0, end, KEYS):
        j = start + tl.arange(0, KEYS)
        there = (j < length)[:, None] & is_wide[None, :]
        keys = tl.load(qkv + (b * time + j)[:, None] * (3 * width) + width + c[None, :], mask=there, other=0.0)
        slope = tl.load(slopes + row[:, None] * pitch + j[None, :], mask=i_there, other=0.0)
        by_content += tl.dot(slope.to(PRODUCT), keys.to(PRODUCT))
    m_first = tl.maximum(time - first - QUERIES, 0)
    m_end = tl.where(end > 0, tl.minimum(time - 1 - first + end, 2 * time - 1), m_first)
    for start in range(m_first, m_end, KEYS):
        m = start + tl.arange(0, KEYS)
        there = (m < 2 * time - 1)[:, None] & is_wide[None, :]
        places = tl.load(p + m[:, None] * p_stride + c[None, :], mask=there, other=0.0)
        j = m[None, :] - (time - 1) + i[:, None]
        slope = tl.load(slopes + row[:, None] * pitch + j, mask=i_there & (j >= 0) & (j < length), other=0.0)
        by_place += tl.dot(slope.to(PRODUCT), places.to(PRODUCT))
    at = (b * time + i)[:, None] * (3 * width) + c[None, :]
    tl.store(
        of_qkv + at, (by_content + by_place).to(of_qkv.dtype.element_ty), mask=(i < time)[:, None] & is_wide[None, :]
    )
    number = (b * tl.num_programs(0) + tl.program_id(0)) * 2 * width
    tl.store(parts + number + c, tl.sum(by_content, 0), mask=is_wide)
    tl.store(parts + number + width + c, tl.sum(by_place, 0), mask=is_wide)


@triton.jit
def _backward_places(
    qkv, bias_v, lengths, slopes, parts, time, heads, width, pitch, batch,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, HEAD: tl.constexpr, PADDED: tl.constexpr,
    PRODUCT: tl.constexpr,
):  # fmt: skip
    """Gradient of a tile of positions, summed over some of the utterances."""
    start = tl.program_id(0) * KEYS
    h = tl.program_id(1)
    part = tl.program_id(2)
    begin = batch * part // tl.num_programs(2)
    end = batch * (part + 1) // tl.num_programs(2)
    m = start + tl.arange(0, KEYS)
    d = tl.arange(0, PADDED)
    is_wide = d < HEAD
    c = h * HEAD + d
    v = tl.load(bias_v + c, mask=is_wide, other=0.0).to(tl.float32)
    total = tl.zeros([KEYS, PADDED], tl.float32)
    sums = tl.zeros([KEYS], tl.float32)
    for b in range(begin, end):
        length = tl.load(lengths + b)
        # Queries that see one of these positions: 0 <= m - (time - 1) + i < length.
        least = tl.maximum(time - start - KEYS, 0)
        most = tl.minimum(length, length + time - 1 - start)
        for first in range(least, most, QUERIES):
            i = first + tl.arange(0, QUERIES)
            row = (b * heads + h) * time + i
            i_there = (i < length)[:, None]
            at = (b * time + i)[:, None] * (3 * width) + c[None, :]
            q = tl.load(qkv + at, mask=i_there & is_wide[None, :], other=0.0)
            j = m[:, None] - (time - 1) + i[None, :]
            there = (i < length)[None, :] & (j >= 0) & (j < length)
            slope = tl.load(slopes + row[None, :] * pitch + j, mask=there, other=0.0)
            total += tl.dot(slope.to(PRODUCT), q.to(PRODUCT))
            sums += tl.sum(slope.to(tl.float32), 1)
    total += sums[:, None] * v[None, :]
    at = (part * (2 * time - 1) + m)[:, None] * width + c[None, :]
    tl.store(parts + at, total, mask=(m < 2 * time - 1)[:, None] & is_wide[None, :])


def options(kernel: str, heads: int, width: int) -> dict[str, Any]:
    """Constants of a kernel, and how it is launched."""
    tile, head = TILES[kernel], width // heads
    return {
        "QUERIES": tile.queries,
        "KEYS": tile.keys,
        "HEAD": head,
        "PADDED": max(16, int(triton.next_power_of_2(head))),
        "PRODUCT": product_dtype(),
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }


def pitch(time: int) -> int:
    """Return the scores from one row to the next: whole tiles of keys, of which also those behind a length are read."""
    size = max(64, *(tile.keys for tile in TILES.values()))
    return -(-time // size) * size


def forward(
    qkv: Tensor,
    p: Tensor,
    bias_u: Tensor,
    bias_v: Tensor,
    lengths: Tensor,
    seed: Tensor | None,
    least: int,
    factor: float,
    heads: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """As `relative_attention.attend`."""
    batch, time, three = qkv.shape
    width = three // 3
    out = torch.empty(batch, time, width, dtype=qkv.dtype, device=qkv.device)
    lse = torch.empty(batch, heads, time, dtype=torch.float32, device=qkv.device)
    shifted = torch.empty(batch, heads, time, pitch(time), dtype=qkv.dtype, device=qkv.device)
    scale = LOG2_E * (width // heads) ** -0.5
    _forward[(triton.cdiv(time, TILES["forward"].queries), batch * heads)](
        qkv, p, bias_u, bias_v, lengths, lse if seed is None else seed, shifted, out, lse,
        time, heads, width, pitch(time), p.stride(0), least, factor, scale,
        HAS_DROPOUT=seed is not None, **options("forward", heads, width),
    )  # fmt: skip
    return out, lse, shifted


def backward(
    g: Tensor,
    qkv: Tensor,
    p: Tensor,
    bias_u: Tensor,
    bias_v: Tensor,
    lengths: Tensor,
    seed: Tensor | None,
    least: int,
    factor: float,
    heads: int,
    out: Tensor,
    lse: Tensor,
    shifted: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """As `relative_attention.attend_backward`."""
    batch, time, width = g.shape
    of_qkv, slopes, deltas = torch.empty_like(qkv), torch.empty_like(shifted), torch.empty_like(lse)
    natural = (width // heads) ** -0.5
    tile = options("keys", heads, width)
    _deltas[(triton.cdiv(time, 64), batch * heads)](
        g, out, lengths, deltas, time, heads, width, ROWS=64, HEAD=tile["HEAD"], PADDED=tile["PADDED"], num_warps=4
    )
    _backward_keys[(triton.cdiv(time, TILES["keys"].keys), batch * heads)](
        g, qkv, bias_u, lengths, lse if seed is None else seed, shifted, lse, deltas, slopes, of_qkv,
        time, heads, width, pitch(time), least, factor, LOG2_E * natural, natural,
        HAS_DROPOUT=seed is not None, **tile,
    )  # fmt: skip
    tiles = triton.cdiv(time, TILES["queries"].queries)
    of_biases = torch.empty(batch * tiles, 2, width, dtype=torch.float32, device=g.device)
    _backward_queries[(tiles, batch * heads)](
        qkv, p, lengths, slopes, of_qkv, of_biases, time, heads, width, pitch(time), p.stride(0),
        **options("queries", heads, width),
    )  # fmt: skip
    return of_qkv, of_biases.sum(0), slopes


def backward_places(slopes: Tensor, qkv: Tensor, bias_v: Tensor, lengths: Tensor, heads: int) -> Tensor:
    """As `relative_attention.places_backward`."""
    batch, time, three = qkv.shape
    width = three // 3
    places = triton.cdiv(2 * time - 1, TILES["places"].keys)
    num_parts = min(batch, max(LEAST_PARTS, PROGRAMS // (places * heads)))
    of_places = torch.empty(num_parts, 2 * time - 1, width, dtype=torch.float32, device=qkv.device)
    _backward_places[(places, heads, num_parts)](
        qkv, bias_v, lengths, slopes, of_places, time, heads, width, pitch(time), batch,
        **options("places", heads, width),
    )  # fmt: skip
    return of_places.sum(0)
