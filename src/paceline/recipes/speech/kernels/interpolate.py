"""Values of a signal between its points, each row at a speed and a shift of its own, in one kernel.

The resampling in `recipes.speech.sound.resample` uses it; `interpolated` there computes the same in plain operations.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 512
ROUNDING = tl.constexpr(12582912.0)
"""1.5 * 2 ** 23: adding it leaves no digit behind the point, halves going to the even number."""


@triton.jit
def interpolate_kernel(
    source,  # (rows, source_width) float32, around in a circle
    audio,  # (rows, audio_width) int16
    speeds,  # (rows,) float64
    shifts,  # (rows,) int64
    gains,  # (rows,) float32
    lengths,  # (rows,) int64
    factors,  # (NEIGHBOURS, DEGREE + 1) float32
    out,  # (rows, width) float32 or int16
    source_width,
    audio_width,
    width,
    HAS_SOURCE: tl.constexpr,
    ROUNDS: tl.constexpr,
    NEIGHBOURS: tl.constexpr,
    DEGREE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """BLOCK outputs of one row."""
    row = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    length = tl.load(lengths + row).to(tl.int32)
    index = column - tl.load(shifts + row).to(tl.int32)
    is_inside = (index >= 0) & (index < length) & (column < length)
    speed = tl.load(speeds + row)
    is_plain = is_inside & (index < audio_width)
    if HAS_SOURCE:
        changes = tl.where(speed == 1.0, 0, 1)
        is_plain = is_plain & (changes == 0)
        is_inside = is_inside & (changes == 1)
    value = tl.load(audio + row * audio_width + index, mask=is_plain, other=0).to(tl.float32)
    if HAS_SOURCE:
        # float64: a place among half a million points, to a millionth of their distance
        position = index.to(tl.float64) * (2.0 * speed)
        base = tl.floor(position)
        place = (position - base).to(tl.float32) - 0.5
        first = base.to(tl.int32) - (NEIGHBOURS // 2 - 1)
        begin = source + row * source_width
        for neighbour in tl.static_range(NEIGHBOURS):
            factor = tl.load(factors + neighbour * (DEGREE + 1)) + tl.zeros_like(place)
            for power in tl.static_range(1, DEGREE + 1):
                factor = factor * place + tl.load(factors + neighbour * (DEGREE + 1) + power)
            where = first + neighbour
            where = tl.where(where < 0, where + source_width, where)
            where = tl.where(where >= source_width, where - source_width, where)
            value += factor * tl.load(begin + where, mask=is_inside, other=0.0)
    value = value * tl.load(gains + row)
    if ROUNDS:
        value = tl.minimum(tl.maximum(value, -32768.0), 32767.0)
        value = ((value + ROUNDING) - ROUNDING).to(tl.int16)
    tl.store(out + row * width + column, value, mask=column < width)


def interpolate(
    source: Tensor,
    audio: Tensor,
    speeds: Tensor,
    shifts: Tensor,
    gains: Tensor,
    lengths: Tensor,
    factors: Tensor,
    out: Tensor,
) -> None:
    """Fill `out`, (rows, width) float32 or int16: sample n of a row is the source at 2 n speed times the gain, `shifts`
    samples later, and 0 outside of its length; rows of speed 1, and all rows where the source has no width, are taken
    from `audio`. To int16 values are rounded, and cut at full scale.

    `factors` (neighbours, degree + 1) are polynomials, highest power first, in the place between two points less 1/2.
    """
    width, (neighbours, powers) = out.shape[1], factors.shape
    interpolate_kernel[(triton.cdiv(width, BLOCK), len(audio))](
        source,
        audio,
        speeds,
        shifts,
        gains,
        lengths,
        factors,
        out,
        source.shape[1],
        audio.shape[1],
        width,
        HAS_SOURCE=source.shape[1] > 0,
        ROUNDS=not out.is_floating_point(),
        NEIGHBOURS=neighbours,
        DEGREE=powers - 1,
        BLOCK=BLOCK,
    )
