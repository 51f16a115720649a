"""Kernels of which there are two: the one that was measured, and one that counts faster and is still to be measured.

Tests compile a new kernel for the device that it is meant for, on any machine, and compare it with its reference in
Triton's interpreter. That it is faster, and right on the device, only the device can tell: until then it is not chosen.
`benchmarks/gpu/kernels.py` times both beside each other, `benchmarks/gpu/quartznet.py --ways fetched flat` trains with
the new ones, and `pytest -m gpu` holds them to float64.
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


MEASURED = Ways()
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
