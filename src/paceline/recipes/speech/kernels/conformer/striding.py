"""The strided convolutions before a Conformer: mels to a quarter of their frames, then to an eighth.

The first convolution (one channel to many, 3 x 3, stride 2) and the depthwise one behind it are one kernel: the output
of the first, by far the largest activation of the network, is never in memory. Nine times over, a tile of it is
computed as a product of patches of mels with the filters, masked, and added to the tile of the depthwise convolution.
Backward computes it again. Activations are (batch, time, mel, channel), channels side by side. Sums are in a fixed
order, without atomics: the same inputs give the same bits.
"""

# ruff: noqa: RUF005 (Triton knows no unpacking)
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.recipes.speech.kernels.tiles import product_dtype

PLACES, CHANNELS, WARPS = 64, 128, 4
"""Of a tile of the first kernel."""
PLACES_BACK, CHANNELS_BACK, WARPS_BACK = 32, 32, 4
PLACES_SECOND, WARPS_SECOND = 4, 8
PROGRAMS = 264
"""With sums of their own: two for each multiprocessor of an H200."""


@triton.jit
def _split(place, times, mels):
    """Utterance, frame and mel of a place."""
    f = place % mels
    rest = place // mels
    return rest // times, rest % times, f


@triton.jit
def _patches(mels, b, t, f, is_there, length, time_0, mels_0):
    """(places, 16): what the first filters see at frame t and mel f of their output, and 1 for the bias; zeros where
    there is no such place, so that a product is zero there."""
    k = tl.arange(0, 16)
    t_0 = 2 * t[:, None] - 1 + (k // 3)[None, :]
    f_0 = 2 * f[:, None] - 1 + (k % 3)[None, :]
    there = is_there[:, None] & (k < 9)[None, :]
    there = there & (t_0 >= 0) & (t_0 < length[:, None]) & (f_0 >= 0) & (f_0 < mels_0)
    values = tl.load(mels + (b[:, None] * mels_0 + f_0) * time_0 + t_0, mask=there, other=0.0).to(tl.float32)
    return tl.where((k == 9)[None, :] & is_there[:, None], 1.0, values)


@triton.jit
def _first(
    mels, lengths, weight, depth_weight, depth_bias, out,
    time_0, mels_0, time_1, mels_1, time_2, mels_2, places, channels,
    PLACES: tl.constexpr, CHANNELS: tl.constexpr, PRODUCT: tl.constexpr,
):  # fmt: skip
    """`weight` is (16, channels): nine taps, the bias, zeros; `depth_weight` (9, channels)."""
    place = tl.program_id(0) * PLACES + tl.arange(0, PLACES)
    c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    inside = place < places
    b, t, f = _split(place, time_2, mels_2)
    length = tl.load(lengths + b, mask=inside, other=0)
    length_1 = (length + 1) // 2
    length_2 = (length_1 + 1) // 2
    held = inside & (t < length_2)
    k = tl.arange(0, 16)
    filters = tl.load(weight + k[:, None] * channels + c[None, :]).to(PRODUCT)
    total = tl.zeros([PLACES, CHANNELS], tl.float32) + tl.load(depth_bias + c)[None, :]
    for tap in range(9):
        t_1 = 2 * t - 1 + tap // 3
        f_1 = 2 * f - 1 + tap % 3
        there = held & (t_1 >= 0) & (t_1 < length_1) & (f_1 >= 0) & (f_1 < mels_1)
        seen = _patches(mels, b, t_1, f_1, there, length, time_0, mels_0).to(PRODUCT)
        total += tl.maximum(tl.dot(seen, filters), 0.0) * tl.load(depth_weight + tap * channels + c)[None, :]
    total = tl.where(held[:, None], total, 0.0)
    at = place.to(tl.int64)[:, None] * channels + c[None, :]
    tl.store(out + at, total.to(out.dtype.element_ty), mask=inside[:, None])


@triton.jit
def _first_backward(
    g, mels, lengths, weight, depth_weight, parts,
    time_0, mels_0, time_1, mels_1, time_2, mels_2, places, channels, places_each,
    PLACES: tl.constexpr, CHANNELS: tl.constexpr, PRODUCT: tl.constexpr,
):  # fmt: skip
    """Sums of some places: (26, channels) of the filters with their bias in 16 rows, of the depthwise filters in 9, of
    its bias.

    A program goes through squares of 2 x 2 outputs of the first convolution, which see the outputs of the second one at
    their place and right and below of it.
    """
    group = tl.program_id(0)
    c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    k = tl.arange(0, 16)
    filters = tl.load(weight + k[:, None] * channels + c[None, :]).to(PRODUCT)
    of_filters = tl.zeros([16, CHANNELS], tl.float32)
    sums = ()
    for _ in tl.static_range(9):
        sums = sums + (tl.zeros([PLACES, CHANNELS], tl.float32),)  # type: ignore[assignment]
    of_bias = tl.zeros([PLACES, CHANNELS], tl.float32)
    begin = group * places_each
    for start in range(begin, tl.minimum(begin + places_each, places), PLACES):
        place = start + tl.arange(0, PLACES)
        inside = place < places
        b, t, f = _split(place, time_2, mels_2)
        length = tl.load(lengths + b, mask=inside, other=0)
        length_1 = (length + 1) // 2
        length_2 = (length_1 + 1) // 2
        uppers = ()
        for corner in tl.static_range(4):
            t_2 = t + corner // 2
            f_2 = f + corner % 2
            there = inside & (t_2 < length_2) & (f_2 < mels_2)
            at = ((b * time_2 + t_2) * mels_2 + f_2).to(tl.int64)[:, None] * channels + c[None, :]
            uppers = uppers + (tl.load(g + at, mask=there[:, None], other=0.0),)  # type: ignore[assignment]
        of_bias += uppers[0].to(tl.float32)  # type: ignore[misc]
        for corner in tl.static_range(4):
            t_1 = 2 * t + corner // 2
            f_1 = 2 * f + corner % 2
            there = inside & (t_1 < length_1) & (f_1 < mels_1)
            seen = _patches(mels, b, t_1, f_1, there, length, time_0, mels_0).to(PRODUCT)
            h = tl.maximum(tl.dot(seen, filters), 0.0)
            gradient = tl.zeros([PLACES, CHANNELS], tl.float32)
            # Place 2 t is tap 1 of output t; place 2 t + 1 is tap 2 of output t and tap 0 of output t + 1.
            for lower in tl.static_range(1 + corner // 2):
                for further in tl.static_range(1 + corner % 2):
                    upper = uppers[2 * lower + further].to(tl.float32)  # type: ignore[var-annotated]
                    tap = 3 * (1 + corner // 2 - 2 * lower) + 1 + corner % 2 - 2 * further
                    gradient += upper * tl.load(depth_weight + tap * channels + c)[None, :]
                    added = ()
                    for each in tl.static_range(9):
                        if each == 3 * (1 + corner // 2 - 2 * lower) + 1 + corner % 2 - 2 * further:
                            added = added + (sums[each] + upper * h,)
                        else:
                            added = added + (sums[each],)
                    sums = added
            steep = tl.where(h > 0.0, gradient, 0.0).to(PRODUCT)
            of_filters += tl.dot(tl.trans(seen), steep)
    base = parts + group * 26 * channels
    tl.store(base + k[:, None] * channels + c[None, :], of_filters)
    base += 16 * channels + c
    for each in tl.static_range(9):
        tl.store(base + each * channels, tl.sum(sums[each], 0))
    tl.store(base + 9 * channels, tl.sum(of_bias, 0))


@triton.jit
def _second(
    x, lengths, weight, bias, out, time_2, mels_2, time_3, mels_3, places, channels,
    PLACES: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Depthwise, 3 x 3, stride 2, of ReLU of the input; `weight` is (9, channels)."""
    place = tl.program_id(0) * PLACES + tl.arange(0, PLACES)
    c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    inside = place < places
    b, t, f = _split(place, time_3, mels_3)
    length = tl.load(lengths + b, mask=inside, other=0)
    length_2 = ((length + 1) // 2 + 1) // 2
    held = inside & (t < (length_2 + 1) // 2)
    total = tl.zeros([PLACES, CHANNELS], tl.float32) + tl.load(bias + c)[None, :]
    for tap in tl.static_range(9):
        t_2 = 2 * t - 1 + tap // 3
        f_2 = 2 * f - 1 + tap % 3
        there = held & (t_2 >= 0) & (t_2 < length_2) & (f_2 >= 0) & (f_2 < mels_2)
        at = ((b * time_2 + t_2) * mels_2 + f_2).to(tl.int64)[:, None] * channels + c[None, :]
        values = tl.maximum(tl.load(x + at, mask=there[:, None], other=0.0).to(tl.float32), 0.0)
        total += values * tl.load(weight + tap * channels + c)[None, :]
    total = tl.where(held[:, None], total, 0.0)
    tl.store(
        out + place.to(tl.int64)[:, None] * channels + c[None, :], total.to(out.dtype.element_ty), mask=inside[:, None]
    )


@triton.jit
def _second_backward(
    g, x, lengths, weight, of_x, parts, time_2, mels_2, time_3, mels_3, quads_t, quads_f, quads, channels, quads_each,
    PLACES: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Gradient of the input before its ReLU, and sums: (11, channels) of 9 taps, the bias, and of that gradient.

    A program goes through squares of 2 x 2 inputs, which see the outputs at their place and right and below of it.
    """
    group = tl.program_id(0)
    c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    sums = ()
    for _ in tl.static_range(9):
        sums = sums + (tl.zeros([PLACES, CHANNELS], tl.float32),)  # type: ignore[assignment]
    of_bias = tl.zeros([PLACES, CHANNELS], tl.float32)
    of_all = tl.zeros([PLACES, CHANNELS], tl.float32)
    begin = group * quads_each
    for start in range(begin, tl.minimum(begin + quads_each, quads), PLACES):
        quad = start + tl.arange(0, PLACES)
        inside = quad < quads
        b, t, f = _split(quad, quads_t, quads_f)
        length = tl.load(lengths + b, mask=inside, other=0)
        length_2 = ((length + 1) // 2 + 1) // 2
        length_3 = (length_2 + 1) // 2
        uppers = ()
        for corner in tl.static_range(4):
            t_3 = t + corner // 2
            f_3 = f + corner % 2
            there = inside & (t_3 < length_3) & (f_3 < mels_3)
            at = ((b * time_3 + t_3) * mels_3 + f_3).to(tl.int64)[:, None] * channels + c[None, :]
            uppers = uppers + (tl.load(g + at, mask=there[:, None], other=0.0).to(tl.float32),)  # type: ignore[assignment]
        of_bias += uppers[0]  # type: ignore[misc]
        for corner in tl.static_range(4):
            t_2 = 2 * t + corner // 2
            f_2 = 2 * f + corner % 2
            exists = inside & (t_2 < time_2) & (f_2 < mels_2)
            at = ((b * time_2 + t_2) * mels_2 + f_2).to(tl.int64)[:, None] * channels + c[None, :]
            values = tl.load(x + at, mask=(exists & (t_2 < length_2))[:, None], other=0.0).to(tl.float32)
            values = tl.maximum(values, 0.0)
            gradient = tl.zeros([PLACES, CHANNELS], tl.float32)
            # Input 2 t is tap 1 of output t; input 2 t + 1 is tap 2 of output t and tap 0 of output t + 1.
            for lower in tl.static_range(1 + corner // 2):
                for further in tl.static_range(1 + corner % 2):
                    upper = uppers[2 * lower + further]  # type: ignore[var-annotated]
                    place = 3 * (1 + corner // 2 - 2 * lower) + 1 + corner % 2 - 2 * further
                    gradient += upper * tl.load(weight + place * channels + c)[None, :]
                    added = ()
                    for each in tl.static_range(9):
                        if each == 3 * (1 + corner // 2 - 2 * lower) + 1 + corner % 2 - 2 * further:
                            added = added + (sums[each] + upper * values,)  # type: ignore[assignment]
                        else:
                            added = added + (sums[each],)  # type: ignore[assignment]
                    sums = added
            gradient = tl.where(values > 0.0, gradient, 0.0)
            of_all += gradient
            tl.store(of_x + at, gradient.to(of_x.dtype.element_ty), mask=exists[:, None])
    base = parts + group * 11 * channels + c
    for tap in tl.static_range(9):
        tl.store(base + tap * channels, tl.sum(sums[tap], 0))
    tl.store(base + 9 * channels, tl.sum(of_bias, 0))
    tl.store(base + 10 * channels, tl.sum(of_all, 0))


def halved(size: int) -> int:
    """Return what a stride of 2 leaves."""
    return (size + 1) // 2


def first(mels: Tensor, lengths: Tensor, weight: Tensor, depth_weight: Tensor, depth_bias: Tensor) -> Tensor:
    """As `subsampling.first`."""
    batch, mels_0, time_0 = mels.shape
    channels = weight.shape[1]
    time_2, mels_2 = halved(halved(time_0)), halved(halved(mels_0))
    out = torch.empty(batch, time_2, mels_2, channels, dtype=mels.dtype, device=mels.device)
    places = batch * time_2 * mels_2
    wide = min(CHANNELS, channels)
    _first[(triton.cdiv(places, PLACES), channels // wide)](
        mels, lengths, weight, depth_weight, depth_bias, out,
        time_0, mels_0, halved(time_0), halved(mels_0), time_2, mels_2, places, channels,
        PLACES=PLACES, CHANNELS=wide, PRODUCT=product_dtype(), num_warps=WARPS,
    )  # fmt: skip
    return out


def first_backward(g: Tensor, mels: Tensor, lengths: Tensor, weight: Tensor, depth_weight: Tensor) -> Tensor:
    """As `subsampling.first_backward`."""
    batch, mels_0, time_0 = mels.shape
    _, time_2, mels_2, channels = g.shape
    places = batch * time_2 * mels_2
    wide = min(CHANNELS_BACK, channels)
    blocks = channels // wide
    groups = max(1, 2 * PROGRAMS // blocks)
    places_each = triton.cdiv(triton.cdiv(places, groups), PLACES_BACK) * PLACES_BACK
    groups = triton.cdiv(places, places_each)
    parts = torch.empty(groups, 26, channels, dtype=torch.float32, device=g.device)
    _first_backward[(groups, blocks)](
        g, mels, lengths, weight, depth_weight, parts,
        time_0, mels_0, halved(time_0), halved(mels_0), time_2, mels_2, places, channels, places_each,
        PLACES=PLACES_BACK, CHANNELS=wide, PRODUCT=product_dtype(), num_warps=WARPS_BACK,
    )  # fmt: skip
    return parts.sum(0)


def second(x: Tensor, lengths: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """As `subsampling.second`."""
    batch, time_2, mels_2, channels = x.shape
    time_3, mels_3 = halved(time_2), halved(mels_2)
    out = torch.empty(batch, time_3, mels_3, channels, dtype=x.dtype, device=x.device)
    places, wide = batch * time_3 * mels_3, min(256, channels)
    _second[(triton.cdiv(places, 8), channels // wide)](
        x, lengths, weight, bias, out, time_2, mels_2, time_3, mels_3, places, channels,
        PLACES=8, CHANNELS=wide, num_warps=8,
    )  # fmt: skip
    return out


def second_backward(g: Tensor, x: Tensor, lengths: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """As `subsampling.second_backward`."""
    batch, time_2, mels_2, channels = x.shape
    _, time_3, mels_3, _ = g.shape
    of_x, wide = torch.empty_like(x), min(256, channels)
    quads = batch * time_3 * mels_3
    groups = max(1, 4 * PROGRAMS // (channels // wide))
    quads_each = triton.cdiv(triton.cdiv(quads, groups), PLACES_SECOND) * PLACES_SECOND
    groups = triton.cdiv(quads, quads_each)
    parts = torch.empty(groups, 11, channels, dtype=torch.float32, device=g.device)
    _second_backward[(groups, channels // wide)](
        g, x, lengths, weight, of_x, parts, time_2, mels_2, time_3, mels_3, time_3, mels_3, quads, channels, quads_each,
        PLACES=PLACES_SECOND, CHANNELS=wide, num_warps=WARPS_SECOND,
    )  # fmt: skip
    return of_x, parts.sum(0)
