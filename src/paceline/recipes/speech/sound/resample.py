"""Resampling of a whole batch on its device, each row at a speed of its own: what soxr does for one utterance.

A row played at speed s is sum_k x[k] h(n s - k) for n = 0, 1, ..., where h is a sinc under a Kaiser window, and
m = max(1, s) times as wide where the sound becomes shorter, so that nothing above half the rate is left to fold back:

    h(t) = g(t / m) / m        g(t) = c sinc(c t) kaiser(t / T)        c = 0.95684, T = 110.45, beta = 16.06

These are the numbers of soxr's "HQ" (measured: the responses differ by at most 0.0012, and there only above 0.8 of the
band). Summed up as it stands, an output would cost 221 products with factors of its own. Here it costs 16:

1. `doubled`: h is applied by a Fourier transform of the row, and the inverse transform has twice as many points.
2. `interpolate`: of a signal that fills half of its band, 16 points give any value in between (sinc under a Kaiser
   window again, images 120 dB down), their factors being polynomials in the place between two points.

Both together are within 3e-6 of full scale of the sum in float64, a tenth of a step of 16-bit audio; soxr gives the
same 16 bits for 99 of 100 samples of speech, and one step more or less for most others (docs/speech.md).
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

CUTOFF, HALF_WIDTH, BETA = 0.95684, 110.45, 16.06
"""Of g: its cutoff as a share of the band, and its window, in samples of the lower rate."""
NEIGHBOURS, NEIGHBOUR_BETA = 16, 12.27
"""Points that an interpolated value is made of, and the window of their factors."""
DEGREE = 8
"""Of the polynomials, which then are within 2e-7 of the factors."""
_LEAST, _MOST, _STEPS = 0.88, 1.04, 2048
"""The response is 1 below the first of these shares of the band and 0 above the second."""
_SAMPLED = 0.25
"""Distance at which h is sampled for its response: h has nothing above 1.04 of the band, so 0.5 would do."""


class Filter(NamedTuple):
    """Constants of a resampling, on a device."""

    response: Tensor
    """(steps + 1,) float32 over the shares of the band from `_LEAST` to `_MOST`."""
    factors: Tensor
    """(neighbours, degree + 1) float32: polynomials in the place between two points, less 1/2; highest power first, and
    twice as large as they should be, because the source is half as large."""


def impulse_response(times: NDArray[np.float64], speed: float) -> NDArray[np.float64]:
    """Return h at these times, in samples of the input, for a speed."""
    stretch = max(1.0, speed)
    values: NDArray[np.float64] = _windowed_sinc(times / stretch, CUTOFF, HALF_WIDTH, BETA) / stretch
    return values


def num_points(width: int, max_speed: float) -> int:
    """Return the points of the transform of rows of a width: enough that an end of a row does not reach the other."""
    reach = 2 * int(HALF_WIDTH * max(1.0, max_speed)) + NEIGHBOURS
    return _smooth(width + reach)


def filter_on(device: torch.device) -> Filter:
    """Return the constants on a device, uploaded once."""
    return _filter_on(str(device))


def doubled(audio: Tensor, speeds: Tensor, max_speed: float, points: int, constants: Filter) -> Tensor:
    """(rows, samples), (rows,) float64 -> (rows, 2 * points) float32: half of each row, filtered for its speed, between
    its samples, too. What comes before the first sample is at the end."""
    padded = torch.zeros((len(audio), points), dtype=torch.float32, device=audio.device)
    padded[:, : audio.shape[1]] = audio
    spectrum = torch.fft.rfft(padded)
    first = int(_LEAST / max(1.0, max_speed) * (points // 2))  # below, no row is changed
    band = torch.arange(first, points // 2 + 1, dtype=torch.float32, device=audio.device) * (2.0 / points)
    places = band * speeds.clamp(min=1.0).to(torch.float32)[:, None]
    places.sub_(_LEAST).mul_(_STEPS / (_MOST - _LEAST)).clamp_(0.0, _STEPS - 1e-3)
    lower = places.to(torch.int64)
    response = constants.response
    spectrum[:, first:].mul_(torch.lerp(response[lower], response[lower + 1], places.sub_(lower)))
    # Half, because the inverse transform divides by twice as many points; the factors make up for it.
    signal: Tensor = torch.fft.irfft(spectrum, n=2 * points)
    return signal


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

    The same as `paceline.recipes.speech.kernels.interpolate`, in plain operations.
    """
    columns = torch.arange(out.shape[1], device=audio.device)
    index = columns - shifts[:, None]
    is_inside = (index >= 0) & (index < lengths[:, None]) & (columns < lengths[:, None])
    index = torch.where(is_inside, index, 0)
    values = audio.gather(1, index.clamp(max=audio.shape[1] - 1)).to(torch.float32)
    if source.shape[1]:
        positions = index * (2.0 * speeds)[:, None]
        base = positions.floor()
        place = (positions - base).to(torch.float32).sub_(0.5)
        first = base.to(torch.int64) - (NEIGHBOURS // 2 - 1)
        played = torch.zeros_like(values)
        for neighbour in range(NEIGHBOURS):
            factor = factors[neighbour, 0].expand_as(place)
            for power in range(1, DEGREE + 1):
                factor = torch.addcmul(factors[neighbour, power], factor, place)
            played.addcmul_(factor, source.gather(1, (first + neighbour).remainder(source.shape[1])))
        values = torch.where((speeds == 1.0)[:, None], values, played)
    values.mul_(is_inside).mul_(gains[:, None])
    out.copy_(values if out.is_floating_point() else values.round_().clamp_(-32768, 32767))


def _windowed_sinc(times: NDArray[np.float64], cutoff: float, half: float, beta: float) -> NDArray[np.float64]:
    inside = np.sqrt(np.maximum(0.0, 1.0 - np.square(times / half)))
    values: NDArray[np.float64] = cutoff * np.sinc(cutoff * times) * np.i0(beta * inside) / np.i0(beta)
    return np.where(np.abs(times) < half, values, 0.0)


@functools.cache
def _response() -> NDArray[np.float64]:
    times = np.arange(1, int(HALF_WIDTH / _SAMPLED) + 1, dtype=np.float64) * _SAMPLED
    shares = np.linspace(_LEAST, _MOST, _STEPS + 1)
    waves = np.cos(np.pi * shares[:, None] * times) @ impulse_response(times, 1.0)
    values: NDArray[np.float64] = _SAMPLED * (impulse_response(np.zeros(1), 1.0) + 2.0 * waves)
    values[0], values[-1] = 1.0, 0.0
    return values


@functools.cache
def _factors() -> NDArray[np.float64]:
    """Fitted at the Chebyshev nodes of [0, 1]."""
    nodes = 0.5 * np.cos(np.pi * (np.arange(64) + 0.5) / 64)
    fitted = []
    for neighbour in range(NEIGHBOURS):
        distances = neighbour - (NEIGHBOURS // 2 - 1) - (nodes + 0.5)
        values = _windowed_sinc(distances, 1.0, NEIGHBOURS / 2, NEIGHBOUR_BETA)
        series = np.polynomial.Chebyshev.fit(nodes, values, DEGREE, domain=[-0.5, 0.5])
        fitted.append(series.convert(kind=np.polynomial.Polynomial, domain=[-1, 1], window=[-1, 1]).coef[::-1])
    return np.array(fitted)


@functools.cache
def _filter_on(device: str) -> Filter:
    response, factors = (torch.from_numpy(values.astype(np.float32)) for values in (_response(), 2.0 * _factors()))
    return Filter(response.to(device), factors.to(device))


def _smooth(least: int) -> int:
    """Return an even number of at least this, at most a few percent more, without a prime factor above 7: fast to
    transform, and one of 25 per octave, since every size that is used has to be planned."""
    unit = 1 << max(1, least.bit_length() - 8)
    number = -(-least // unit)
    while _has_large_factor(number):
        number += 1
    return number * unit


def _has_large_factor(number: int) -> bool:
    for prime in (2, 3, 5, 7):
        while number % prime == 0:
            number //= prime
    return number > 1
