"""Sounds for tests, in every format that speech comes in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import soundfile
from numpy.typing import NDArray

FORMATS = {
    "wav": ("WAV", "PCM_16"),
    "flac": ("FLAC", "PCM_16"),
    "ogg": ("OGG", "VORBIS"),
    "opus": ("OGG", "OPUS"),
    "mp3": ("MP3", "MPEG_LAYER_III"),
}
LOSSLESS = ("wav", "flac")


def tone(seconds: float, rate: int = 16000, hertz: float = 440.0, volume: float = 0.3) -> NDArray[np.int16]:
    """A sine with a little noise, 16 bits."""
    time = np.arange(round(seconds * rate)) / rate
    noise = np.random.default_rng(len(time)).normal(0, 0.002, len(time))
    return np.rint(32767 * (volume * np.sin(2 * np.pi * hertz * time) + noise)).astype(np.int16)


def write(path: Path, samples: NDArray[Any], rate: int = 16000, kind: str | None = None, subtype: str = "") -> Path:
    """A file in the format that its name, or `kind`, says."""
    form, usual = FORMATS[kind or path.suffix[1:]]
    soundfile.write(path, samples, rate, format=form, subtype=subtype or usual)
    return path
