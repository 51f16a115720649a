"""Silence at both ends of a recording, cut off by the rule of NeMo's `trim_silence` (librosa's `effects.trim`).

Frames of 2048 samples, 512 apart and centred, with zeros beyond the ends. A frame is silent if its mean square is 60 dB
or more below that of the loudest one, where mean squares below 1e-10 (-100 dB of full scale) count as that much; so a
recording whose loudest frame is below -40 dB stays whole.
"""

from __future__ import annotations

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
    power = np.maximum((sums[ends] - sums[begins]) / (FRAME * _FULL_SCALE**2), FLOOR)
    loud = np.flatnonzero(10 * np.log10(power) - 10 * np.log10(power.max()) > -TOP_DB)
    return int(loud[0]) * HOP, min(number, (int(loud[-1]) + 1) * HOP)
