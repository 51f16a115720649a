"""Perturbation of a whole batch on its device: what `perturb` does to one utterance, with the same draws.

The host draws (`perturb.draw`, keyed by the sample) and uploads raw rows with a few numbers each; noise comes as rows,
too. The device resamples, shifts, scales and adds, in float32, and rounds to 16 bits once, as `perturb` does. Nothing
here waits for the device, and shapes follow from the widths of the batch alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.recipes.speech.sound import resample
from paceline.recipes.speech.sound.perturb import Draw, PerturbSettings
from paceline.world.installed import has_triton

BYTES_AT_ONCE = 64 << 20
"""Of filtered rows at a time, each sample of which takes 8 bytes: about what a GPU's cache holds, and little beside a
model."""


@dataclass(frozen=True)
class Pending:
    """What is to be done to the rows of a batch on the device; fields are those of `Draw`, by row."""

    width: int
    """Of the batch afterwards."""
    speeds: Tensor
    """(batch,) float64"""
    shifts: Tensor
    """(batch,) int64"""
    gains: Tensor
    """(batch,) float32"""
    snrs: Tensor
    """(batch,) float64, infinite for rows without noise."""
    noise: Tensor | None = None
    """(batch, width) int16"""
    white_noise: Tensor | None = None
    """(batch, width) float32"""


def pending(
    draws: Sequence[Draw], width: int, noise: NDArray[np.int16] | None, white_noise: NDArray[np.float32] | None
) -> Pending:
    """Collect the draws of a batch; `noise` and `white_noise` are (batch, width), and are filled here."""
    for row, drawn in enumerate(draws):
        if noise is not None:
            length = 0 if drawn.noise is None else len(drawn.noise)
            noise[row, :length], noise[row, length:] = 0 if drawn.noise is None else drawn.noise, 0
        if white_noise is not None:
            length = drawn.length if drawn.white_level else 0
            drawn.white_noise(white_noise[row, :length])
            white_noise[row, length:] = 0
    return Pending(
        width,
        torch.tensor([drawn.speed for drawn in draws], dtype=torch.float64, device="cpu"),
        torch.tensor([drawn.shift for drawn in draws], dtype=torch.int64, device="cpu"),
        torch.tensor([drawn.gain for drawn in draws], dtype=torch.float32, device="cpu"),
        torch.tensor(
            [np.inf if drawn.noise is None else drawn.noise_snr for drawn in draws], dtype=torch.float64, device="cpu"
        ),
        None if noise is None else torch.from_numpy(noise),
        None if white_noise is None else torch.from_numpy(white_noise),
    )


@dataclass(frozen=True)
class Augmentation:
    """The changes that settings ask for, made on the device."""

    max_speed: float
    """1 where no speed is changed."""
    changes_speed: bool
    adds_noise: bool
    adds_white_noise: bool

    @classmethod
    def of(cls, settings: PerturbSettings) -> Augmentation:
        speeds = settings.speed_range or settings.speed_factors
        return cls(
            max_speed=max(speeds, default=1.0),
            changes_speed=bool(speeds),
            adds_noise=settings.noise_from is not None,
            adds_white_noise=settings.white_noise_db is not None,
        )

    @torch.no_grad()
    def finish(self, data: dict[str, Any]) -> dict[str, Any]:
        """Return a grain's data with its `pending` changes made; a grain without any is returned as it is."""
        if "pending" not in data:
            return data
        rest = dict(data)
        waiting: Pending = rest.pop("pending")
        audio, lengths = data["audio"], data["lengths"]
        changed = torch.empty((len(audio), waiting.width), dtype=torch.int16, device=audio.device)
        points = resample.num_points(audio.shape[1], self.max_speed) if self.changes_speed else 0
        num_parts = -(-len(audio) * 8 * max(points, waiting.width) // BYTES_AT_ONCE)
        rows = -(-len(audio) // max(1, num_parts))  # parts of one size, since each size is planned
        for first in range(0, len(audio), rows):
            some = slice(first, first + rows)
            self._change(audio[some], lengths[some], _rows(waiting, some), points, changed[some])
        return {**rest, "audio": changed}

    def _change(self, audio: Tensor, lengths: Tensor, waiting: Pending, points: int, out: Tensor) -> None:
        constants, device = resample.filter_on(audio.device), audio.device
        if points:
            source = resample.doubled(audio, waiting.speeds, self.max_speed, points, constants)
        else:
            source = torch.empty((len(audio), 0), dtype=torch.float32, device=device)
        is_done = waiting.noise is None and waiting.white_noise is None
        values = out if is_done else torch.empty(out.shape, dtype=torch.float32, device=device)
        rows = (source, audio, waiting.speeds, waiting.shifts, waiting.gains, lengths)
        _interpolation(device)(*rows, constants.factors, values)
        if is_done:
            return
        if waiting.noise is not None:
            values.addcmul_(waiting.noise.to(torch.float32), _noise_gains(values, waiting)[:, None])
        if waiting.white_noise is not None:
            values.add_(waiting.white_noise)
        out.copy_(values.round_().clamp_(-32768, 32767))


def _interpolation(device: torch.device) -> Callable[..., None]:
    """Return the kernel, or the plain operations where there is none."""
    if device.type == "cuda" and has_triton():
        from paceline.recipes.speech.kernels import interpolate

        return interpolate.interpolate
    return resample.interpolate


def _noise_gains(values: Tensor, waiting: Pending) -> Tensor:
    """Return the factor of each row's noise; 0 where there is none, or no ratio to it: silence stays silent."""
    assert waiting.noise is not None
    loudness = torch.linalg.vector_norm(values, dim=1, dtype=torch.float64)
    noise = torch.linalg.vector_norm(waiting.noise.to(torch.float32), dim=1, dtype=torch.float64)
    gains = torch.where(noise > 0, loudness / noise.clamp(min=1.0) / waiting.snrs, 0.0)
    return gains.to(torch.float32)


def _rows(waiting: Pending, some: slice) -> Pending:
    return Pending(
        waiting.width,
        waiting.speeds[some],
        waiting.shifts[some],
        waiting.gains[some],
        waiting.snrs[some],
        None if waiting.noise is None else waiting.noise[some],
        None if waiting.white_noise is None else waiting.white_noise[some],
    )
