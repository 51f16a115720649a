"""Silence at the ends of recordings: against the definition written out frame by frame, on real and made-up sound."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import soundfile
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from paceline.recipes.speech.audio.trim import bounds, trimmed

SHARED = Path(__file__).parents[5] / "shared" / "data"


def by_definition(samples: NDArray[np.int16]) -> tuple[int, int]:
    """librosa.effects.trim with top_db 60, as its documentation defines it: rms of centred frames, relative to the
    loudest; amplitudes below 1e-5 count as 1e-5."""
    sound = np.pad(samples.astype(np.float64) / 32768, 1024)
    levels = []
    for first in range(0, len(samples) + 1, 512):
        rms = math.sqrt(float(np.mean(sound[first : first + 2048] ** 2)))
        levels.append(20 * math.log10(max(rms, 1e-5)))
    loud = [number for number, level in enumerate(levels) if level - max(levels) > -60]
    return loud[0] * 512, min(len(samples), (loud[-1] + 1) * 512)


@pytest.mark.parametrize("pattern", ["fsdd/recordings/*_1*.flac", "librispeech/audio/test/*.opus"])
def test_real_recordings(pattern: str) -> None:
    files = sorted(SHARED.glob(pattern))[::7][:40]
    if not files:
        pytest.skip(f"no {SHARED / pattern}")
    for file in files:
        samples = soundfile.read(file, dtype="int16")[0]
        quiet = np.random.default_rng(0).integers(-1, 2, 9000).astype(np.int16)
        for sound in (samples, np.concatenate([quiet, samples, quiet[:5000]])):
            assert bounds(sound) == by_definition(sound)


@given(
    st.lists(st.tuples(st.sampled_from([0, 1, 3, 40, 900, 32767]), st.integers(0, 3000)), max_size=6),
    st.integers(0, 2**31),
)
def test_made_up_sound(parts: list[tuple[int, int]], seed: int) -> None:
    random = np.random.default_rng(seed)
    pieces = [random.integers(-loud, loud + 1, number).astype(np.int16) for loud, number in parts]
    sound = np.concatenate([np.zeros(0, np.int16), *pieces])
    assert bounds(sound) == by_definition(sound)
    assert 0 < len(trimmed(sound)) <= len(sound) or not len(sound)


def test_a_tone_between_silences() -> None:
    tone = np.rint(8000 * np.sin(np.arange(16000) * 0.3)).astype(np.int16)
    padded = np.concatenate([np.zeros(20_000, np.int16), tone, np.zeros(30_000, np.int16)])
    first, end = bounds(padded)
    assert 20_000 - 1024 <= first <= 20_000
    assert 36_000 <= end <= 36_000 + 2048
    assert bounds(np.zeros(5000, np.int16)) == (0, 5000), "all silent: nothing is louder"
