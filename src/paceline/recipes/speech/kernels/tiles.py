"""Tiling of a depthwise convolution over time into matrix products.

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
STREAM_ROWS = 64
"""Utterances that a stream multiplies at a time."""
PRODUCT_WIDTH = 128
"""Frames of a tile of a product over channels."""


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
class BackwardStreaming:
    """One way to walk along time backward: see `stream_backward`."""

    rows: int
    """Utterances per product."""
    tile: int
    wide: int
    """Frames of the window in its first chunk."""
    more: int
    """And in its second, or 0."""
    groups: int
    """Of `rows` utterances that one program works through with the same filter."""
    warps: int = 4
    stages: int = 3


@dataclass(frozen=True)
class Window:
    """Start of a tile's window, and its number of chunks."""

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
    left = _aligned(before)
    return Window(left, -(-(left + last + 1) // chunk))


def window_start(kernel: int, dilation: int) -> int:
    """Return the number of frames before its tile at which a window begins that no stride widens."""
    return _aligned(padding(kernel, dilation))


def _aligned(frames: int) -> int:
    return -(-frames // 8) * 8


def streaming(kernel: int, stride: int, dilation: int, batch: int) -> Streaming | None:
    """The fastest way forward on an H200, for a filter that reaches no further than a tile of 64 frames.

    A stream multiplies 64 utterances at a time, in two thirds of the time of the general kernel: not worth it where
    more than a third of them would be missing.
    """
    reach = padding(kernel, dilation)
    if stride > 1 or reach > 64 or 3 * batch < 2 * 64 * -(-batch // 64):
        return None
    return Streaming(rows=64, tile=64, chunk=32 if reach <= 32 else 64)


def fetched(way: Streaming) -> Streaming:
    """Return the same way for `stream_fetched`, whose tiles take fewer registers while they are on their way."""
    return replace(way, stages=4)


def backward_streaming(
    kernel: int, stride: int, dilation: int, channels: int, batch: int, row: int
) -> BackwardStreaming | None:
    """The fastest way backward on an H200, for a window of at most 160 frames around a tile of 64.

    A stream takes 64 utterances and tiles of 64 frames, there or not, and as long as for some tiles more to begin and
    to end. By tile it is 1.9 times as fast as the general kernel at least, 1.3 times where that one has to fetch no
    more than 64 frames for 32; with less than two programs per multiprocessor none was measured.
    """
    reach, blocks = padding(kernel, dilation), -(-batch // 64)
    window = window_start(kernel, dilation) + 64 + reach
    gain, further = (1.3, 2) if reach <= 16 else (1.9, 4)
    is_faster = gain * batch * row / 64 >= 64 * blocks * (-(-row // 64) + further)
    if stride > 1 or window > 160 or blocks * channels < 256 or not is_faster:
        return None
    groups = _groups(blocks, channels)
    return BackwardStreaming(rows=64, tile=64, wide=128, more=32 if window > 128 else 0, groups=groups)


def _groups(blocks: int, channels: int) -> int:
    """With which 132 multiprocessors are done first, if to begin and to end a program takes a quarter of a group."""

    def quarters(groups: int) -> int:
        programs = -(-blocks // groups) * channels
        return -(-programs // (2 * 132)) * (4 * groups + 1)

    return min(range(1, blocks + 1), key=quarters)


def forward_tiling(rows: int) -> Tiling:
    """Return the fastest tiling on an H200 for all other filters; `rows` of tiles of 64 frames."""
    return balanced(Tiling(rows=64, tile=64, chunk=32, products=8), rows)


def backward_tiling(kernel: int, dilation: int, rows: int) -> Tiling:
    """Return the fastest tiling on an H200; `rows` of tiles of 64 frames."""
    if padding(kernel, dilation) > 64:
        return balanced(Tiling(rows=64, tile=64, chunk=64, products=8, stages=2), rows)
    return balanced(Tiling(rows=64, tile=32, chunk=64, products=14, stages=2), 2 * rows)


def balanced(tiling: Tiling, rows: int) -> Tiling:
    """With as many products per program as make all programs equally long."""
    blocks = -(-rows // tiling.rows)
    programs = -(-blocks // tiling.products)
    return replace(tiling, products=-(-blocks // programs))


def num_listed(batch: int, row: int) -> int:
    """Return the length of `product.list_tiles`."""
    return 2 + batch * (-(-row // PRODUCT_WIDTH) + -(-row // (PRODUCT_WIDTH // 2)))


def product_dtype() -> Any:
    """Triton's interpreter multiplies the bits of bfloat16 as if they were numbers."""
    import triton
    import triton.language as tl

    return tl.float32 if triton.knobs.runtime.interpret else tl.bfloat16
