"""Audio files decoded to 16-bit mono at a model's rate, through libsndfile: WAV, FLAC, Ogg Vorbis and Opus, MP3.

Nothing stays open after a read, so that a data set of files is the same before and after a fork.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import soxr
from numpy.typing import NDArray

from paceline.core.units import counted
from paceline.recipes.speech.audio.file import (
    AudioUnreadable,
    is_short,
    known_frames,
    missing_end,
    opened,
    read_frames,
    truncated,
)

_LOUDEST = 64.0
"""In full scales. Decoded sound may reach a few; more is damage, or integers stored as floats."""
EXACT = frozenset(("PCM_16", "PCM_S8", "PCM_U8", "ULAW", "ALAW"))
"""Encodings that libsndfile converts to 16 bits exactly. It truncates others (PCM_24), does not scale them (FLOAT) or
lets them wrap around above full scale (Vorbis and Opus, observed with 1.2.2): those are read as floats."""


def read_audio(
    path: Path, *, sample_rate: int, offset_s: float = 0.0, duration_s: float | None = None
) -> NDArray[np.int16]:
    """Return the samples of a file, or of a part of it, at `sample_rate`; channels are averaged."""
    if duration_s is None and (why := missing_end(path)) is not None:
        raise AudioUnreadable(path, why)
    with opened(path) as file:
        rate, frames = file.samplerate, known_frames(file)
        start = round(offset_s * rate)
        wanted = frames - start if duration_s is None else round(duration_s * rate)
        if is_short(frames - start, wanted, rate):
            end_s = offset_s + (duration_s or 0.0)
            why = missing_end(path) or f"ends after {frames / rate:.2f} s, and {end_s:.2f} s are asked for"
            raise AudioUnreadable(path, why)
        wanted = min(wanted, frames - start)
        if start:
            file.seek(start)
        samples = read_frames(file, wanted, "int16" if file.subtype in EXACT else "float32")
        if is_short(len(samples), wanted, rate):
            raise AudioUnreadable(path, truncated(start + len(samples), frames, rate))
    if samples.dtype == np.int16 and samples.ndim == 1 and rate == sample_rate:
        return samples
    return converted(path, samples, rate, sample_rate)


def converted(path: Path, samples: NDArray[Any], rate: int, wanted_rate: int) -> NDArray[np.int16]:
    """Convert samples of a file, (frames) or (frames, channels), to 16-bit mono at another rate."""
    if samples.dtype == np.int16:
        sound = samples.astype(np.float32)
    elif not (loudest := float(np.abs(samples).max(initial=0.0))) <= _LOUDEST:  # also NaN
        why = f"is damaged: it holds values of {loudest:.3g}, where 1 is full scale"
        raise AudioUnreadable(path, why)
    else:
        sound = samples * np.float32(32768)
    if sound.ndim == 2:
        sound = sound.mean(axis=1, dtype=np.float32)
    if rate != wanted_rate:
        # In floats: to 16 bits soxr would add dither.
        sound = soxr.resample(sound, rate, wanted_rate)
        if not len(sound):
            why = f"is too short: {counted(len(samples), 'sample')} at {rate} Hz"
            raise AudioUnreadable(path, why)
    return np.clip(np.rint(sound), -32768, 32767).astype(np.int16)
