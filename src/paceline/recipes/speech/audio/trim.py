"""Silence at both ends of a recording, cut off by the rule of NeMo's `trim_silence` (librosa's `effects.trim`).

Frames of 2048 samples, 512 apart and centred, with zeros beyond the ends. A frame is silent if its mean square is 60 dB
or more below that of the loudest one, where mean squares below 1e-10 (-100 dB of full scale) count as that much; so a
recording whose loudest frame is below -40 dB stays whole.
"""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
from numpy.typing import NDArray

FRAME, HOP = 2048, 512
TOP_DB = 60.0
FLOOR = 1e-10
"""Smallest mean square that is told from silence, of samples between -1 and 1."""
_FULL_SCALE = 32768.0


def trimmed(samples: NDArray[Any]) -> NDArray[Any]:
    """Return 16-bit samples without the silence at their ends, as a view."""
    first, end = bounds(samples)
    return samples[first:end]


def bounds(samples: NDArray[Any]) -> tuple[int, int]:
    """Return where the sound begins and ends, in samples: at most a hop of silence is kept at the end."""
    number = len(samples)
    sums = np.zeros(number + 1, np.int64)  # exact: 2^30 per sample leaves room for 2^33 of them
    np.cumsum(np.square(samples, dtype=np.int64), out=sums[1:])
    centers = np.arange(0, number + 1, HOP)
    ends, begins = np.minimum(centers + FRAME // 2, number), np.maximum(centers - FRAME // 2, 0)
    return _loud(sums[ends] - sums[begins], number)


class Loudness:
    """`bounds` of a recording that is heard piece by piece: a number per hop is kept, about a megabyte per hour."""

    def __init__(self) -> None:
        self._energies = array("q")
        """Sum of squares of each whole hop."""
        self._rest: NDArray[np.int16] = np.zeros(0, np.int16)

    def add(self, samples: NDArray[np.int16]) -> None:
        """Hear the next 16-bit samples."""
        samples = np.concatenate([self._rest, samples])
        whole = len(samples) // HOP
        squares = np.square(samples[: whole * HOP].reshape(whole, HOP), dtype=np.int64)
        self._energies.extend(squares.sum(1).tolist())
        self._rest = samples[whole * HOP :]

    def bounds(self) -> tuple[int, int]:
        """Return where the sound begins and ends, in samples."""
        last = np.square(self._rest, dtype=np.int64).sum()
        energies = np.append(np.frombuffer(self._energies, np.int64), last)  # (hop); the last one is not whole
        num_frames, reach = len(energies), FRAME // 2 // HOP
        sums = np.zeros(num_frames + 2 * reach, np.int64)
        np.cumsum(energies, out=sums[reach + 1 : reach + 1 + num_frames])
        sums[reach + 1 + num_frames :] = sums[reach + num_frames]
        power = sums[2 * reach :][:num_frames] - sums[:num_frames]
        return _loud(power, HOP * (num_frames - 1) + len(self._rest))


def _loud(energies: NDArray[np.int64], number: int) -> tuple[int, int]:
    """Return first and last sample of the loud frames, given each frame's sum of squares."""
    power = np.maximum(energies / (FRAME * _FULL_SCALE**2), FLOOR)
    loud = np.flatnonzero(10 * np.log10(power) - 10 * np.log10(power.max()) > -TOP_DB)
    return int(loud[0]) * HOP, min(number, (int(loud[-1]) + 1) * HOP)
