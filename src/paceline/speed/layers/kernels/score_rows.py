"""Cross-entropy of rows of scores, and its gradient in their place: the kernel behind `layers.head_loss`.

A program has a row. It is read twice, the second time from the cache, and written once.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096


@triton.jit
def _losses(
    scores, target, losses, vocabulary, smoothing, ignored, HAS_GRADIENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    base = scores + row * vocabulary
    label = tl.load(target + row)
    is_counted = label != ignored
    if is_counted:
        c = tl.arange(0, BLOCK)
        most = -1e30
        total = tl.zeros([BLOCK], tl.float32)
        plain = tl.zeros([BLOCK], tl.float32)
        for first in range(0, vocabulary, BLOCK):
            there = first + c < vocabulary
            score = tl.load(base + first + c, mask=there, other=0.0).to(tl.float32)
            plain += score
            score = tl.where(there, score, -1e30)
            more = tl.maximum(most, tl.max(score, 0))
            total = total * tl.exp(most - more) + tl.exp(score - more)
            most = more
        log = most + tl.log(tl.sum(total, 0))
        right = tl.load(base + label).to(tl.float32)
        spread = smoothing / vocabulary
        tl.store(losses + row, log - (1.0 - smoothing) * right - spread * tl.sum(plain, 0))
        if HAS_GRADIENT:
            tl.debug_barrier()  # `right` is read before it is written over
            for first in range(0, vocabulary, BLOCK):
                there = first + c < vocabulary
                score = tl.load(base + first + c, mask=there, other=0.0).to(tl.float32)
                slope = tl.exp(score - log) - spread
                slope = tl.where(first + c == label, slope - (1.0 - smoothing), slope)
                tl.store(base + first + c, slope.to(scores.dtype.element_ty), mask=there)
    else:
        tl.store(losses + row, 0.0)
        if HAS_GRADIENT:
            nothing = tl.zeros([BLOCK], scores.dtype.element_ty)
            for first in range(0, vocabulary, BLOCK):
                c = first + tl.arange(0, BLOCK)
                tl.store(base + c, nothing, mask=c < vocabulary)


def cross_entropy(
    scores: Tensor, target: Tensor, losses: Tensor, label_smoothing: float, ignore_index: int, has_gradients: bool
) -> None:
    """Write the losses of (tokens, vocabulary), which lie without gaps; with `has_gradients` also the gradient of their
    sum, in place of the scores."""
    tokens, vocabulary = scores.shape
    assert scores.is_contiguous()
    block = min(BLOCK, int(triton.next_power_of_2(vocabulary)))
    if tokens:
        _losses[(tokens,)](
            scores, target, losses, vocabulary, label_smoothing, ignore_index, HAS_GRADIENT=has_gradients, BLOCK=block,
            num_warps=max(1, min(8, block // 512)),
        )  # fmt: skip
