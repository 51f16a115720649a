"""Values of a signal between its points, each row at a speed and a shift of its own, in one kernel.

Of the resampling in `paceline.recipes.asr.sound.resample`, whose `interpolated` computes the same in plain operations.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 512


@triton.jit
def interpolate_kernel(
    source,  # (rows, source_width) float32, around in a circle
    audio,  # (rows, audio_width) int16
    speeds,  # (rows,) float64
    shifts,  # (rows,) int64
    lengths,  # (rows,) int64
    factors,  # (NEIGHBOURS, DEGREE + 1) float32
    out,  # (rows, width) float32
    source_width,
    audio_width,
    width,
    HAS_SOURCE: tl.constexpr,
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
        is_plain = is_plain & (speed == 1.0)
        is_inside = is_inside & (speed != 1.0)
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
    tl.store(out + row * width + column, value, mask=column < width)


def interpolated(
    source: Tensor, audio: Tensor, speeds: Tensor, shifts: Tensor, lengths: Tensor, width: int, factors: Tensor
) -> Tensor:
    """Return (rows, width) float32: sample n of a row is the source at 2 n speed, `shifts` samples later, and 0 outside
    of its length; rows of speed 1, and all rows where the source has no width, are taken from `audio`.

    `factors` (neighbours, degree + 1) are polynomials, highest power first, in the place between two points less 1/2.
    """
    neighbours, powers = factors.shape
    out = torch.empty((len(audio), width), dtype=torch.float32, device=audio.device)
    interpolate_kernel[(triton.cdiv(width, BLOCK), len(audio))](
        source,
        audio,
        speeds,
        shifts,
        lengths,
        factors,
        out,
        source.shape[1],
        audio.shape[1],
        width,
        HAS_SOURCE=source.shape[1] > 0,
        NEIGHBOURS=neighbours,
        DEGREE=powers - 1,
        BLOCK=BLOCK,
    )
    return out
