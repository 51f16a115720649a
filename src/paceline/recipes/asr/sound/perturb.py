"""Changes to the sound of a training utterance, made by loader workers: speed, room, shift, gain, noise.

All are off unless set. What is drawn comes from the generator that is handed in, which the caller keys by the sample.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import AfterValidator, Field, model_validator

from paceline.config.settings import Section
from paceline.core.paths import AbsolutePath
from paceline.recipes.asr.sound.clips import Clip, find_clips

FULL_SCALE = 32768.0
SHORTEST_READ_S = 0.1
"""Of a noise: a few samples at another rate could be none at ours."""
Samples = NDArray[np.float32]
"""In steps of int16, so that full scale is 32768."""
Change = Callable[[Samples, int, np.random.Generator], Samples]
"""From samples, their rate and a generator to draw from, to samples that sound different."""


def _ascending(pair: tuple[float, float]) -> tuple[float, float]:
    if pair[0] > pair[1]:
        raise ValueError(f"from {pair[0]:g} to {pair[1]:g}: the lower one comes first")
    return pair


Probability = Annotated[float, Field(ge=0, le=1)]
Speed = Annotated[float, Field(ge=0.25, le=4)]
Decibels = Annotated[float, Field(ge=-200, le=200)]
Milliseconds = Annotated[float, Field(ge=-10_000, le=10_000)]
SpeedRange = Annotated[tuple[Speed, Speed], AfterValidator(_ascending)]
DecibelRange = Annotated[tuple[Decibels, Decibels], AfterValidator(_ascending)]
MillisecondRange = Annotated[tuple[Milliseconds, Milliseconds], AfterValidator(_ascending)]


class PerturbSettings(Section):
    """How the sound of training utterances is varied, in this order; what is not set is not done."""

    speed_range: SpeedRange | None = None
    """Play at a speed between these two, pitch included, such as 0.85,1.15."""
    speed_factors: tuple[Speed, ...] = ()
    """Play at one of these speeds, such as 0.9,1.0,1.1, instead of one out of a range."""
    speed_prob: Probability = 1.0
    """Share of utterances whose speed is changed."""
    impulse_from: AbsolutePath | None = None
    """Folder, manifest or packed file of impulse responses: utterances sound as if in such rooms, as loud as before."""
    impulse_prob: Probability = 1.0
    """Share of utterances put into a room."""
    shift_ms: MillisecondRange | None = None
    """Begin so many milliseconds later (or earlier, below 0), such as -5,5; zeros take the place."""
    shift_prob: Probability = 1.0
    """Share of utterances shifted."""
    gain_db: DecibelRange | None = None
    """Louder by so many decibels (or softer, below 0), such as -10,10; what is too loud is cut at full scale."""
    gain_prob: Probability = 1.0
    """Share of utterances made louder or softer."""
    noise_from: AbsolutePath | None = None
    """Folder, manifest or packed file of noises to add, from a random place on and repeated where too short."""
    noise_snr_db: DecibelRange = (10.0, 40.0)
    """Decibels by which the utterance is louder than the noise."""
    noise_prob: Probability = 1.0
    """Share of utterances with added noise."""
    white_noise_db: DecibelRange | None = None
    """Add white noise of a level between these, in decibels below full scale, such as -90,-46."""
    white_noise_prob: Probability = 1.0
    """Share of utterances with added white noise."""

    @model_validator(mode="after")
    def _one_way_to_choose_speed(self) -> PerturbSettings:
        if self.speed_range is not None and self.speed_factors:
            raise ValueError("set `speed_range` or `speed_factors`, not both")
        return self


def is_active(settings: PerturbSettings) -> bool:
    """Return True if anything is set that changes the sound."""
    ways = (settings.speed_range, settings.speed_factors, settings.impulse_from, settings.shift_ms)
    return any((*ways, settings.gain_db, settings.noise_from, settings.white_noise_db))


def max_stretch(settings: PerturbSettings) -> float:
    """Return the factor by which an utterance can become longer."""
    speeds = settings.speed_range or settings.speed_factors
    return max(1.0, 1.0 / min(speeds)) if speeds and settings.speed_prob > 0 else 1.0


def check_clips(settings: PerturbSettings) -> None:
    """Find all noises and impulse responses before they are needed; raises where some cannot be used.

    Done before loader workers are forked, it also saves each of them from looking.
    """
    for source in (settings.noise_from, settings.impulse_from):
        if source is not None:
            find_clips(source)


def perturb(
    audio: NDArray[np.int16], sample_rate: int, settings: PerturbSettings, rng: np.random.Generator
) -> NDArray[np.int16]:
    """Return the utterance as another speaker, room or microphone might have had it; mono, saturated at full scale.

    A function of the audio, the settings (and the files they name) and the state of `rng`.
    """
    unchanged: Samples = audio.astype(np.float32)
    samples = unchanged
    for probability, change in _changes(settings):
        if len(samples) and rng.random() < probability:
            samples = change(samples, sample_rate, rng)
    return audio if samples is unchanged else np.clip(np.rint(samples), -32768, 32767).astype(np.int16)


def _changes(settings: PerturbSettings) -> Iterator[tuple[float, Change]]:
    """Yield the changes that are set, each with its probability, in the order in which they are made."""
    if settings.speed_range is not None or settings.speed_factors:
        yield settings.speed_prob, partial(_change_speed, settings)
    if settings.impulse_from is not None:
        yield settings.impulse_prob, partial(_add_room, settings.impulse_from)
    if settings.shift_ms is not None:
        yield settings.shift_prob, partial(_shift, settings.shift_ms)
    if settings.gain_db is not None:
        yield settings.gain_prob, partial(_change_gain, settings.gain_db)
    if settings.noise_from is not None:
        yield settings.noise_prob, partial(_add_noise, settings.noise_from, settings.noise_snr_db)
    if settings.white_noise_db is not None:
        yield settings.white_noise_prob, partial(_add_white_noise, settings.white_noise_db)


def _change_speed(settings: PerturbSettings, samples: Samples, sample_rate: int, rng: np.random.Generator) -> Samples:
    return _at_speed(samples, sample_rate, _draw_speed(settings, rng))


def _add_room(source: Path, samples: Samples, sample_rate: int, rng: np.random.Generator) -> Samples:
    return _in_room(samples, _read(_pick(source, rng), sample_rate))


def _shift(range_ms: tuple[float, float], samples: Samples, sample_rate: int, rng: np.random.Generator) -> Samples:
    return _shifted(samples, round(rng.uniform(*range_ms) * sample_rate / 1000))


def _change_gain(
    range_db: tuple[float, float], samples: Samples, sample_rate: int, rng: np.random.Generator
) -> Samples:
    return samples * np.float32(_amplitude(rng.uniform(*range_db)))


def _add_noise(
    source: Path, snr_db: tuple[float, float], samples: Samples, sample_rate: int, rng: np.random.Generator
) -> Samples:
    noise = _draw_noise(_pick(source, rng), len(samples), sample_rate, rng)
    return _with_noise(samples, noise, rng.uniform(*snr_db))


def _add_white_noise(
    range_db: tuple[float, float], samples: Samples, sample_rate: int, rng: np.random.Generator
) -> Samples:
    level = FULL_SCALE * _amplitude(rng.uniform(*range_db))
    return samples + np.float32(level) * rng.standard_normal(len(samples), dtype=np.float32)


def _draw_speed(settings: PerturbSettings, rng: np.random.Generator) -> float:
    if settings.speed_range is not None:
        return float(rng.uniform(*settings.speed_range))
    return settings.speed_factors[rng.integers(len(settings.speed_factors))]


def _at_speed(samples: Samples, sample_rate: int, speed: float) -> Samples:
    """Return samples recorded at `speed` times the rate, resampled to the rate."""
    import soxr

    if speed == 1.0:
        return samples
    played: Samples = soxr.resample(samples, sample_rate * speed, sample_rate)
    return played


def _in_room(samples: Samples, response: Samples) -> Samples:
    """Return samples convolved with a room's response, not delayed by the direct sound, and as loud as before."""
    peak = int(np.argmax(np.abs(response))) if len(response) else 0
    loudness = _rms(samples)
    if loudness == 0 or not len(response) or response[peak] == 0:
        return samples
    points = 2 ** math.ceil(math.log2(len(samples) + len(response)))
    spectrum = np.fft.rfft(samples, points) * np.fft.rfft(response / response[peak], points)
    heard: Samples = np.fft.irfft(spectrum, points)[peak : peak + len(samples)].astype(np.float32)
    loudness_heard = _rms(heard)
    return heard * np.float32(loudness / loudness_heard) if loudness_heard > 0 else samples


def _shifted(samples: Samples, places: int) -> Samples:
    """Return samples shifted by `places`; an utterance shorter than that stays, or it would be gone."""
    if places == 0 or abs(places) >= len(samples):
        return samples
    shifted = np.zeros_like(samples)
    if places > 0:
        shifted[places:] = samples[:-places]
    else:
        shifted[:places] = samples[-places:]
    return shifted


def _with_noise(samples: Samples, noise: Samples, snr_db: float) -> Samples:
    """Silence has no ratio to noise and stays silent."""
    signal_rms, noise_rms = _rms(samples), _rms(noise)
    if signal_rms == 0 or noise_rms == 0:
        return samples
    return samples + noise * np.float32(signal_rms / noise_rms / _amplitude(snr_db))


def _draw_noise(clip: Clip, count: int, sample_rate: int, rng: np.random.Generator) -> Samples:
    """Return `count` samples of a clip from a random place on, only these being read where the clip is longer."""
    wanted_s = max(count / sample_rate, SHORTEST_READ_S)
    if clip.seconds > wanted_s:
        offset_s = clip.offset_s + rng.uniform(0.0, clip.seconds - wanted_s)
        return np.resize(_read(clip._replace(offset_s=offset_s, seconds=wanted_s), sample_rate), count)
    noise = _read(clip, sample_rate)
    return np.resize(np.roll(noise, -int(rng.integers(max(len(noise), 1)))), count)


def _pick(source: Path, rng: np.random.Generator) -> Clip:
    clips = find_clips(source)
    return clips[rng.integers(len(clips))]


def _read(clip: Clip, sample_rate: int) -> Samples:
    if clip.row is None:
        from paceline.data.audio.read import read_audio

        audio = read_audio(clip.path, sample_rate=sample_rate, offset_s=clip.offset_s, duration_s=clip.seconds)
    else:
        from paceline.data.audio.recordings import read_packed_audio

        audio = read_packed_audio(clip.path, clip.row, sample_rate, offset_s=clip.offset_s, duration_s=clip.seconds)
    return audio.astype(np.float32)


def _rms(samples: Samples) -> float:
    return math.sqrt(np.square(samples, dtype=np.float64).mean()) if len(samples) else 0.0


def _amplitude(decibels: float) -> float:
    return float(10.0 ** (decibels / 20))
