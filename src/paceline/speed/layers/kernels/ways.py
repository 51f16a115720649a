"""Kernels of which there are two: the one that was measured, and one that counts faster and is still to be measured.

Tests compile a new kernel for the device that it is meant for, on any machine, and compare it with its reference in
Triton's interpreter. That it is faster, and right on the device, only the device can tell: until then it is not chosen.
`benchmarks/gpu/kernels.py` times both beside each other, `benchmarks/gpu/quartznet.py --ways no-turned` trains
with others than those in use, and `pytest -m gpu` holds all of them to float64.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class Ways:
    """Kernels in use."""

    fetched: bool = False
    """Depthwise forward on Hopper by `stream_fetched` instead of `stream`."""
    flat: bool = False
    """Batch statistics of flat pieces of a channel instead of tiles that end at a length."""
    turned: bool = False
    """Every other kernel goes through the channels from the last to the first: see `order`."""
    cut: bool = False
    """Depthwise backward as a stream ends at the longest utterance of a group."""
    sorted: bool = False
    """Utterances of a batch lie by their length, if there are several groups of them."""
    listed: bool = False
    """Products over channels on Hopper by `product`, of tiles with speech alone, with batch norm's statistics."""
    listed_weights: bool = False
    """With `listed`, weight gradients of large batches by `product` as well."""
    added_norm: bool = False
    """Dropout, residual and layer norm by `added_rows`."""
    aside: bool = False
    """Weight gradients of a Conformer's layers on a stream of their own, beside the rest of a layer's backward."""
    scores: bool = False
    """Cross-entropy of a chunk of logits, and its gradient in place, by `score_rows`."""
    packed: bool = False
    """Attention of packed sequences by `packed_rows` instead of torch's varlen attention."""


MEASURED = Ways(
    fetched=True,
    flat=True,
    turned=True,
    cut=True,
    sorted=True,
    listed=True,
    listed_weights=True,
    added_norm=True,
    scores=True,
    packed=True,
)
"""On an H200, 2026-11-16 and 17: see "QuartzNet 15x5 with further kernels", "with products of our own" and "The
Transformer" in benchmarks/RESULTS.md."""
_in_use = [MEASURED]


def in_use() -> Ways:
    return _in_use[-1]


@contextmanager
def using(ways: Ways) -> Iterator[None]:
    """Launch these kernels within the block; a CUDA graph keeps those that it was recorded with."""
    _in_use.append(ways)
    try:
        yield
    finally:
        _in_use.pop()
