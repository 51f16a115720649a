"""Attention of sequences that lie one after the other, for sequences that are short: the kernels behind
`layers.packed_attention`.

A program has a head of a block of one sequence, and finds it by the sequences' offsets, so that a CUDA graph may be
replayed with other sequences. Where the longest fits into a block, one program computes all gradients of a sequence's
head at once. Nothing is added by atomics: the same inputs give the same bits.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

WIDTHS = (16, 32, 64, 128)
"""Of a head."""
LARGEST = 128
"""Tokens of a block."""
_LOG2_E = tl.constexpr(math.log2(math.e))


@triton.jit
def _part(base, first, rows, count, stride, WIDTH: tl.constexpr):
    """Rows of one head of one sequence, (rows, WIDTH), and where they are; those behind the last are 0."""
    offset = (first + rows).to(tl.int64)[:, None] * stride + tl.arange(0, WIDTH)[None, :]
    there = (rows < count)[:, None]
    return tl.load(base + offset, mask=there, other=0.0)


@triton.jit
def _put(base, value, first, rows, count, stride, WIDTH: tl.constexpr):
    offset = (first + rows).to(tl.int64)[:, None] * stride + tl.arange(0, WIDTH)[None, :]
    tl.store(base + offset, value.to(base.dtype.element_ty), mask=(rows < count)[:, None])


@triton.jit
def _seen(rows, columns, num_keys, IS_CAUSAL: tl.constexpr):
    seen = (columns < num_keys)[None, :]
    if IS_CAUSAL:
        seen = seen & (columns[None, :] <= rows[:, None])
    return seen


@triton.jit
def _attend(
    q, k, v, out, logs, q_offsets, k_offsets, q_stride, k_stride, out_stride, heads, scale,
    IS_CAUSAL: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    sequence, head, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    q_first, k_first = tl.load(q_offsets + sequence), tl.load(k_offsets + sequence)
    num_queries = tl.load(q_offsets + sequence + 1) - q_first
    num_keys = tl.load(k_offsets + sequence + 1) - k_first
    if block * BLOCK < num_queries:
        rows = block * BLOCK + tl.arange(0, BLOCK)
        query = _part(q + head * WIDTH, q_first, rows, num_queries, q_stride, WIDTH)
        most = tl.full([BLOCK], -1e30, tl.float32)
        total = tl.zeros([BLOCK], tl.float32)
        mixed = tl.zeros([BLOCK, WIDTH], tl.float32)
        end = num_keys
        if IS_CAUSAL:
            end = tl.minimum(num_keys, (block + 1) * BLOCK)
        for start in range(0, end, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            key = _part(k + head * WIDTH, k_first, columns, num_keys, k_stride, WIDTH)
            score = tl.dot(query, tl.trans(key), input_precision=PRECISION) * (scale * _LOG2_E)
            score = tl.where(_seen(rows, columns, num_keys, IS_CAUSAL), score, -1e30)
            more = tl.maximum(most, tl.max(score, 1))
            weight = tl.exp2(score - more[:, None])
            shrink = tl.exp2(most - more)
            total = total * shrink + tl.sum(weight, 1)
            value = _part(v + head * WIDTH, k_first, columns, num_keys, k_stride, WIDTH)
            product = tl.dot(weight.to(value.dtype), value, input_precision=PRECISION)
            mixed = mixed * shrink[:, None] + product
            most = more
        total = tl.where(total > 0.0, total, 1.0)  # nothing to look at: zeros
        _put(out + head * WIDTH, mixed / total[:, None], q_first, rows, num_queries, out_stride, WIDTH)
        place = logs + (q_first + rows) * heads + head
        tl.store(place, most + tl.log2(total), mask=rows < num_queries)


@triton.jit
def _slopes(
    query, key, value, upper, log, level, rows, columns, num_queries, num_keys, scale,
    IS_CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Attention weights of a block, and the gradient of its scores."""
    score = tl.dot(query, tl.trans(key), input_precision=PRECISION) * (scale * _LOG2_E)
    seen = _seen(rows, columns, num_keys, IS_CAUSAL) & (rows < num_queries)[:, None]
    weight = tl.exp2(tl.where(seen, score - log[:, None], -1e30))
    slope = tl.dot(upper, tl.trans(value), input_precision=PRECISION)
    return weight, weight * (slope - level[:, None]) * scale


@triton.jit
def _attend_backward(
    q, k, v, out, logs, g, of_q, of_k, of_v, q_offsets, k_offsets, q_stride, k_stride, out_stride, of_q_stride,
    of_k_stride, heads, scale,
    IS_CAUSAL: tl.constexpr, IS_WHOLE: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    sequence, head, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    q_first, k_first = tl.load(q_offsets + sequence), tl.load(k_offsets + sequence)
    num_queries = tl.load(q_offsets + sequence + 1) - q_first
    num_keys = tl.load(k_offsets + sequence + 1) - k_first
    own = block * BLOCK + tl.arange(0, BLOCK)
    if not IS_WHOLE:  # noqa: SIM102 (known when it is compiled)
        if block * BLOCK < num_keys:
            key = _part(k + head * WIDTH, k_first, own, num_keys, k_stride, WIDTH)
            value = _part(v + head * WIDTH, k_first, own, num_keys, k_stride, WIDTH)
            of_key = tl.zeros([BLOCK, WIDTH], tl.float32)
            of_value = tl.zeros([BLOCK, WIDTH], tl.float32)
            begin = 0
            if IS_CAUSAL:
                begin = block * BLOCK
            for start in range(begin, num_queries, BLOCK):
                rows = start + tl.arange(0, BLOCK)
                query = _part(q + head * WIDTH, q_first, rows, num_queries, q_stride, WIDTH)
                upper = _part(g + head * WIDTH, q_first, rows, num_queries, out_stride, WIDTH)
                mixed = _part(out + head * WIDTH, q_first, rows, num_queries, out_stride, WIDTH)
                level = tl.sum(upper.to(tl.float32) * mixed.to(tl.float32), 1)
                log = tl.load(logs + (q_first + rows) * heads + head, mask=rows < num_queries, other=0.0)
                weight, slope = _slopes(
                    query, key, value, upper, log, level, rows, own, num_queries, num_keys, scale, IS_CAUSAL, PRECISION
                )
                of_value += tl.dot(tl.trans(weight.to(upper.dtype)), upper, input_precision=PRECISION)
                of_key += tl.dot(tl.trans(slope.to(query.dtype)), query, input_precision=PRECISION)
            _put(of_k + head * WIDTH, of_key, k_first, own, num_keys, of_k_stride, WIDTH)
            _put(of_v + head * WIDTH, of_value, k_first, own, num_keys, of_k_stride, WIDTH)
    if block * BLOCK < tl.maximum(num_queries, num_keys if IS_WHOLE else 0):
        query = _part(q + head * WIDTH, q_first, own, num_queries, q_stride, WIDTH)
        upper = _part(g + head * WIDTH, q_first, own, num_queries, out_stride, WIDTH)
        mixed = _part(out + head * WIDTH, q_first, own, num_queries, out_stride, WIDTH)
        level = tl.sum(upper.to(tl.float32) * mixed.to(tl.float32), 1)
        log = tl.load(logs + (q_first + own) * heads + head, mask=own < num_queries, other=0.0)
        if IS_WHOLE:
            key = _part(k + head * WIDTH, k_first, own, num_keys, k_stride, WIDTH)
            value = _part(v + head * WIDTH, k_first, own, num_keys, k_stride, WIDTH)
            weight, slope = _slopes(
                query, key, value, upper, log, level, own, own, num_queries, num_keys, scale, IS_CAUSAL, PRECISION
            )
            of_value = tl.dot(tl.trans(weight.to(upper.dtype)), upper, input_precision=PRECISION)
            _put(of_v + head * WIDTH, of_value, k_first, own, num_keys, of_k_stride, WIDTH)
            narrow = slope.to(query.dtype)
            of_key = tl.dot(tl.trans(narrow), query, input_precision=PRECISION)
            _put(of_k + head * WIDTH, of_key, k_first, own, num_keys, of_k_stride, WIDTH)
            of_query = tl.dot(narrow, key, input_precision=PRECISION)
            _put(of_q + head * WIDTH, of_query, q_first, own, num_queries, of_q_stride, WIDTH)
        else:
            of_query = tl.zeros([BLOCK, WIDTH], tl.float32)
            end = num_keys
            if IS_CAUSAL:
                end = tl.minimum(num_keys, (block + 1) * BLOCK)
            for start in range(0, end, BLOCK):
                columns = start + tl.arange(0, BLOCK)
                key = _part(k + head * WIDTH, k_first, columns, num_keys, k_stride, WIDTH)
                value = _part(v + head * WIDTH, k_first, columns, num_keys, k_stride, WIDTH)
                _, slope = _slopes(
                    query, key, value, upper, log, level, own, columns, num_queries, num_keys, scale, IS_CAUSAL,
                    PRECISION,
                )  # fmt: skip
                of_query += tl.dot(slope.to(key.dtype), key, input_precision=PRECISION)
            _put(of_q + head * WIDTH, of_query, q_first, own, num_queries, of_q_stride, WIDTH)


class Plan(NamedTuple):
    """Tokens and warps of a program, and the most blocks of a sequence."""

    block: int
    warps: int
    blocks: int


def plan(longest: int) -> Plan:
    """`longest` is that of queries and keys."""
    block = next((size for size in (16, 32, 64, LARGEST) if longest <= size), 64)
    return Plan(block, {16: 1, 32: 2, 64: 4, LARGEST: 8}[block], -(-max(1, longest) // block))


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    offsets: Tensor,
    key_offsets: Tensor,
    longest: int,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """(tokens, heads, width) each, of which a token's numbers lie together -> the same, and (tokens, heads) logarithms
    to the base 2 of sums over keys."""
    tokens, heads, width = query.shape
    out = torch.empty(tokens, heads, width, dtype=query.dtype, device=query.device)
    logs = torch.empty(tokens, heads, dtype=torch.float32, device=query.device)
    way = plan(longest)
    _attend[(len(offsets) - 1, heads, way.blocks)](
        query, key, value, out, logs, offsets, key_offsets, query.stride(0), key.stride(0), out.stride(0), heads, scale,
        IS_CAUSAL=is_causal, BLOCK=way.block, WIDTH=width, PRECISION=_precision(query), num_warps=way.warps,
    )  # fmt: skip
    return out, logs


def backward(
    g: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logs: Tensor,
    of_query: Tensor,
    of_key: Tensor,
    of_value: Tensor,
    offsets: Tensor,
    key_offsets: Tensor,
    longest: int,
    is_causal: bool,
    scale: float,
) -> None:
    """Write the gradients of queries, keys and values."""
    heads, width = query.shape[1:]
    assert of_key.stride(0) == of_value.stride(0)
    assert key.stride(0) == value.stride(0)
    assert g.stride(0) == out.stride(0)
    way = plan(longest)
    _attend_backward[(len(offsets) - 1, heads, way.blocks)](
        query, key, value, out, logs, g, of_query, of_key, of_value, offsets, key_offsets, query.stride(0),
        key.stride(0), out.stride(0), of_query.stride(0), of_key.stride(0), heads, scale,
        IS_CAUSAL=is_causal, IS_WHOLE=way.blocks == 1, BLOCK=way.block, WIDTH=width, PRECISION=_precision(query),
        num_warps=way.warps,
    )  # fmt: skip


def _precision(query: Tensor) -> str:
    return "ieee" if query.dtype == torch.float32 else "tf32"
