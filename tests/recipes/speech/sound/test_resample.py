"""Rows at speeds of their own against the sum in float64, and against soxr."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from paceline.recipes.speech.sound import resample

soxr = pytest.importorskip("soxr")
RATE = 16000
SPEEDS = (0.5, 0.9, 0.93712, 1.0, 1.0499, 1.1, 2.0)


def rows_of(*signals: NDArray[np.int16]) -> torch.Tensor:
    padded = np.zeros((len(signals), max(map(len, signals))), np.int16)
    for row, signal in enumerate(signals):
        padded[row, : len(signal)] = signal
    return torch.from_numpy(padded)


def played(
    audio: torch.Tensor,
    speeds: tuple[float, ...],
    lengths: list[int],
    interpolate: Callable[..., None] = resample.interpolate,
    *,
    shifts: list[int] | None = None,
    gains: list[float] | None = None,
    dtype: torch.dtype = torch.float32,
    has_speeds: bool = True,
) -> NDArray[Any]:
    constants = resample.filter_on(audio.device)
    each = torch.tensor(speeds, dtype=torch.float64)
    points = resample.num_points(audio.shape[1], max(speeds))
    source = resample.doubled(audio, each, max(speeds), points, constants) if has_speeds else torch.empty(len(audio), 0)
    shift, gain = torch.tensor(shifts or [0] * len(audio)), torch.tensor(gains or [1.0] * len(audio))
    out = torch.full((len(audio), max(lengths) + 37), 99, dtype=dtype)
    interpolate(source, audio, each, shift, gain, torch.tensor(lengths), constants.factors, out)
    return out.numpy()


def kaiser_sinc(times: NDArray[np.float64]) -> NDArray[np.float64]:
    """Written down apart from the code, by the formula in its words."""
    inside = np.clip(1 - (times / 110.45) ** 2, 0, None)
    window = np.i0(16.06 * np.sqrt(inside)) / np.i0(16.06) * (np.abs(times) < 110.45)
    return 0.95684 * np.sinc(0.95684 * times) * window


def speech_like(samples: int, seed: int) -> NDArray[np.int16]:
    """Harmonics that fall by 9 dB an octave under a slow envelope, as vowels do, that come and go softly."""
    random = np.random.default_rng(seed)
    time = np.arange(samples) / RATE
    pitch = 2 * np.pi * np.cumsum(120 + 20 * np.sin(2 * np.pi * 2 * time)) / RATE
    voice = sum(np.sin(n * pitch + random.uniform(0, 6)) / n**1.5 for n in range(1, 45))
    envelope = np.sin(np.pi * np.arange(samples) / samples) * (1.2 + np.sin(2 * np.pi * 3 * time))
    return np.rint(4000 * voice * envelope + random.normal(0, 20, samples)).clip(-32768, 32767).astype(np.int16)


def test_every_row_is_the_sum_in_float64() -> None:
    """Noise at full scale, to its ends, within a tenth of a step of 16 bits."""
    random = np.random.default_rng(0)
    signals = [random.integers(-32768, 32768, size).astype(np.int16) for size in (300, 500, 240, 40, 400, 1, 600)]
    lengths = [int(len(signal) / speed + 0.5) for signal, speed in zip(signals, SPEEDS, strict=True)]
    found = played(rows_of(*signals), SPEEDS, lengths)
    for row, (signal, speed, length) in enumerate(zip(signals, SPEEDS, lengths, strict=True)):
        stretch = max(1.0, speed)
        distances = np.arange(length)[:, None] * speed - np.arange(len(signal))
        exact = (kaiser_sinc(distances / stretch) / stretch) @ signal.astype(np.float64) if speed != 1 else signal
        np.testing.assert_allclose(found[row, :length], exact, rtol=0, atol=0.1)
        assert not found[row, length:].any()


def test_rows_of_speed_1_stay_as_they_are() -> None:
    random = np.random.default_rng(1)
    signals = [random.integers(-32768, 32768, 500).astype(np.int16) for _ in range(2)]
    assert np.array_equal(played(rows_of(*signals), (1.0, 0.9), [500, 556])[0, :500], signals[0])


@pytest.mark.parametrize("speed", [0.9, 0.97531, 1.03, 1.1])
def test_speech_is_what_soxr_makes_of_it(speed: float) -> None:
    """Within a step of 16 bits, and 90 dB apart; lengths are the same."""
    signal = speech_like(24000, seed=3)
    expected = soxr.resample(signal.astype(np.float64), RATE * speed, RATE)
    found = played(rows_of(signal), (speed,), [len(expected)])[0, : len(expected)]
    assert np.abs(np.rint(found) - np.rint(expected)).max() <= 1
    assert np.square(found - expected).mean() < 1e-9 * np.square(expected).mean()


@pytest.mark.parametrize("speed", [0.85, 1.15])
@pytest.mark.parametrize(("share", "least", "most"), [(0.1, 0.9999, 1.0001), (0.9, 0.998, 1.0001), (1.01, 0.0, 1e-4)])
def test_what_passes_and_what_does_not(speed: float, share: float, least: float, most: float) -> None:
    """Tones up to 0.9 of the band stay as loud as they were; above the band there is nothing left that folds back."""
    band = min(1.0, 1 / speed)
    if share * band > 1:
        share = 1.0  # the highest tone that there is
    tone = np.rint(20000 * np.sin(np.pi * share * band * np.arange(8000) + 0.3)).astype(np.int16)
    length = int(len(tone) / speed + 0.5)
    inner = played(rows_of(tone), (speed,), [length])[0, 500 : length - 500].astype(np.float64)
    waves = np.exp(1j * np.pi * share * band * speed * np.arange(500, length - 500))
    [fitted, *_] = np.linalg.lstsq(np.stack([waves.real, waves.imag], 1), inner, rcond=None)
    assert least <= np.hypot(*fitted) / 20000 <= most
    assert np.abs(inner - np.stack([waves.real, waves.imag], 1) @ fitted).max() < 2  # and nothing else is there


@pytest.mark.parametrize("has_speeds", [True, False])
def test_the_kernel_computes_the_same(has_speeds: bool) -> None:
    kernel = pytest.importorskip("paceline.recipes.speech.kernels.interpolate").interpolate
    random = np.random.default_rng(2)
    speeds = (0.9, 1.0, 1.1) if has_speeds else (1.0,) * 3
    sizes = [500, 400, 3]
    audio = rows_of(*(random.integers(-32768, 32768, size).astype(np.int16) for size in sizes))
    lengths = [int(size / speed + 0.5) for size, speed in zip(sizes, speeds, strict=True)]
    rows: dict[str, Any] = {"shifts": [-9, 60, 1], "gains": [2.0, 0.5, 9.0], "has_speeds": has_speeds}
    plain, found = played(audio, speeds, lengths, **rows), played(audio, speeds, lengths, kernel, **rows)
    np.testing.assert_allclose(found, plain, rtol=0, atol=0.05)
    assert np.array_equal(found == 0, plain == 0)
    rounded = played(audio, speeds, lengths, kernel, **rows, dtype=torch.int16)
    assert np.array_equal(rounded, np.rint(found).clip(-32768, 32767))
    plain = played(audio, speeds, lengths, **rows, dtype=torch.int16)
    assert np.abs(rounded.astype(int) - plain).max() <= 1
    assert (rounded != plain).mean() < 0.01


def test_transforms_are_of_few_sizes_with_small_factors_and_room_for_both_ends() -> None:
    sizes = set()
    for width in (1, 160, 10_240, 267_200, *range(134_000, 267_000, 777)):
        points = resample.num_points(width, 1.1)
        assert width + 2 * 110 * 1.1 < points < 1.08 * width + 320
        sizes.add(points)
        rest = points // 2
        for prime in (2, 3, 5, 7):
            while rest % prime == 0:
                rest //= prime
        assert rest == 1
    assert len(sizes) <= 30
