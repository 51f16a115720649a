"""How a depthwise convolution over time is cut into matrix products.

The filter of one channel, laid out as a Toeplitz matrix, maps a window of inputs to a tile of outputs; the tiles of all
utterances of a channel are the rows of one product. A window is read in chunks whose first frame stands on a multiple
of 8, so that every load is one of 16 bytes.

Forward, a tile holds `tile` outputs and its window the inputs that they see. Backward, a tile holds inputs and its
window the outputs that saw them: the same figures with the stride on the other side.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

ALIGNMENT = 16
"""Rows of activations are padded to a multiple of so many frames: the alignment that Triton recognises by itself."""


@dataclass(frozen=True)
class Tiling:
    """One way to cut: the shape of the products and how many warps share them."""

    rows: int
    """Tiles per product."""
    tile: int
    """Frames per tile."""
    chunk: int
    """Frames of the window per product."""
    products: int
    """Blocks of rows that one program works through with the same filter."""
    warps: int = 4
    stages: int = 1


@dataclass(frozen=True)
class Streaming:
    """One way to walk along time: see `stream`."""

    rows: int
    """Utterances per product."""
    tile: int
    chunk: int
    warps: int = 4
    stages: int = 3


@dataclass(frozen=True)
class Window:
    """Where a tile's window begins, and how many chunks it has."""

    left: int
    """Frames before the tile's own first one."""
    chunks: int


def padding(kernel: int, dilation: int) -> int:
    """Frames of zeros on either side of an utterance, so that without a stride it stays as long as it is."""
    return dilation * (kernel - 1) // 2


def padded_frames(frames: int) -> int:
    """The length of a row in memory."""
    return -(-frames // ALIGNMENT) * ALIGNMENT


def forward_window(kernel: int, stride: int, dilation: int, tiling: Tiling) -> Window:
    """The inputs that a tile of outputs sees."""
    reach = padding(kernel, dilation)
    return _window(reach, stride * (tiling.tile - 1) + reach, tiling.chunk)


def backward_window(kernel: int, stride: int, dilation: int, tiling: Tiling) -> Window:
    """The outputs that saw any input of a tile."""
    reach = padding(kernel, dilation)
    return _window(reach // stride, (tiling.tile - 1 + reach) // stride, tiling.chunk)


def _window(before: int, last: int, chunk: int) -> Window:
    left = -(-before // 8) * 8
    return Window(left, -(-(left + last + 1) // chunk))


def streaming(kernel: int, stride: int, dilation: int, batch: int) -> Streaming | None:
    """The fastest way forward on an H200, for a filter that reaches no further than a tile of 64 frames.

    A stream multiplies 64 utterances at a time, in two thirds of the time of the general kernel: not worth it where
    more than a third of them would be missing.
    """
    reach = padding(kernel, dilation)
    if stride > 1 or reach > 64 or 3 * batch < 2 * 64 * -(-batch // 64):
        return None
    return Streaming(rows=64, tile=64, chunk=32 if reach <= 32 else 64)


def forward_tiling(rows: int) -> Tiling:
    """What was fastest on an H200 for all other filters; `rows` of tiles of 64 frames."""
    return balanced(Tiling(rows=64, tile=64, chunk=32, products=8), rows)


def backward_tiling(kernel: int, dilation: int, rows: int) -> Tiling:
    """What was fastest on an H200; `rows` of tiles of 64 frames."""
    if padding(kernel, dilation) > 64:
        return balanced(Tiling(rows=64, tile=64, chunk=64, products=8, stages=2), rows)
    return balanced(Tiling(rows=64, tile=32, chunk=64, products=14, stages=2), 2 * rows)


def balanced(tiling: Tiling, rows: int) -> Tiling:
    """With as many products per program as make all programs equally long."""
    blocks = -(-rows // tiling.rows)
    programs = -(-blocks // tiling.products)
    return replace(tiling, products=-(-blocks // programs))


def product_dtype() -> Any:
    """Triton's interpreter multiplies the bits of bfloat16 as if they were numbers."""
    import triton
    import triton.language as tl

    return tl.float32 if triton.knobs.runtime.interpret else tl.bfloat16
