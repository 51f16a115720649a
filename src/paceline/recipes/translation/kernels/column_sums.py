"""Sums over the rows of a matrix, as a bias' gradient is; of a ReLU's gradient, which is made on the way.

Sums over rows are in a fixed order, without atomics: the same inputs give the same bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.speed.layers.kernels.added_rows import sum_parts

ROWS, WIDTH = 16, 128
MOST_PROGRAMS = 1056
"""Eight for each multiprocessor of an H200."""


@triton.jit
def _sums(
    g, out, changed, parts, rows, width, stride, rows_each,
    HAS_RELU: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(0)
    c = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    sums = tl.zeros([ROWS, WIDTH], tl.float32)
    end = tl.minimum((group + 1) * rows_each, rows)
    for first in range(group * rows_each, end, ROWS):
        row = first + tl.arange(0, ROWS)
        there = (row < end)[:, None] & (c < width)[None, :]
        offset = row.to(tl.int64)[:, None] * stride + c[None, :]
        value = tl.load(g + offset, mask=there, other=0.0)
        if HAS_RELU:
            alive = tl.load(out + offset, mask=there, other=0.0).to(tl.float32) > 0.0
            value = tl.where(alive, value, 0.0).to(changed.dtype.element_ty)
            tl.store(changed + offset, value, mask=there)
        sums += value.to(tl.float32)
    tl.store(parts + group.to(tl.int64) * width + c, tl.sum(sums, 0), mask=c < width)


def column_sums(g: Tensor) -> Tensor:
    """(rows, width), whose rows may be part of wider ones -> (width) float32."""
    return _run(g, None)


def relu_backward(g: Tensor, out: Tensor) -> Tensor:
    """Make a gradient that of a ReLU's input, in place, given the ReLU's output; return its sums over rows."""
    assert g.is_contiguous()
    assert out.is_contiguous()
    return _run(g, out)


def _run(g: Tensor, out: Tensor | None) -> Tensor:
    rows, width = g.shape
    blocks = -(-width // WIDTH)
    each = -(-rows // max(1, MOST_PROGRAMS // blocks))
    rows_each = max(ROWS, -(-each // ROWS) * ROWS)
    groups = -(-rows // rows_each)
    parts = torch.empty(groups, width, dtype=torch.float32, device=g.device)
    if rows:
        _sums[(groups, blocks)](
            g, g if out is None else out, g, parts, rows, width, g.stride(0), rows_each, HAS_RELU=out is not None,
            ROWS=ROWS, WIDTH=WIDTH, num_warps=4,
        )  # fmt: skip
    return sum_parts(parts)
