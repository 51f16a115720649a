"""Changes to the sound of a training utterance: speed, room, shift, gain, noise.

All are off unless set. `draw` decides what is done to an utterance, by the generator that is handed in, which the
caller keys by the sample; `perturb` does it to one utterance, where that is read, and `augment.Augmentation` to a whole
batch on its device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import AfterValidator, Field, model_validator

from paceline.config.settings import Section, free
from paceline.core.paths import AbsolutePath
from paceline.recipes.speech.sound.clips import Clip, find_clips

FULL_SCALE = 32768.0
SHORTEST_READ_S = 0.1
"""Of a noise: a few samples at another rate could be none at ours."""
Samples = NDArray[np.float32]
"""In steps of int16, so that full scale is 32768."""
DrawChange = Callable[[int, int, np.random.Generator], dict[str, Any]]
"""From a number of samples, their rate and a generator to draw from, to fields of a `Draw`."""


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

    augment_on: Literal["auto", "device", "workers"] = free("auto")
    """Where the sound is varied: on the GPU, a whole batch at once (`device`: packed audio, all changes but rooms), or
    where it is read (`workers`); `auto` takes the GPU where it can. What is drawn is the same, and so are 99 of 100
    samples of speech, the others but for the last bits."""

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


@dataclass(frozen=True, slots=True)
class Draw:
    """What is done to one utterance, in the order of these fields."""

    length: int
    """Samples of the utterance afterwards."""
    generator: np.random.Generator
    """Draws the samples of white noise, after everything else."""
    speed: float = 1.0
    room: Clip | None = None
    shift: int = 0
    """Samples by which it begins later."""
    gain: float = 1.0
    noise: NDArray[np.int16] | None = None
    """As many samples as the utterance has."""
    noise_snr: float = 1.0
    """Amplitude of the utterance over that of the noise."""
    white_level: float = 0.0
    """Standard deviation of the white noise."""

    def white_noise(self, out: Samples) -> None:
        """Fill `out`, as long as the utterance; once."""
        self.generator.standard_normal(dtype=np.float32, out=out)
        out *= np.float32(self.white_level)


def draw(length: int, sample_rate: int, settings: PerturbSettings, rng: np.random.Generator) -> Draw:
    """Return what is done to an utterance of so many samples; noise that is added is read from its file."""
    drawn: dict[str, Any] = {}
    for probability, draw_change in _changes(settings):
        if length and rng.random() < probability:
            drawn |= draw_change(length, sample_rate, rng)
            length = drawn.get("length", length)
    return Draw(**{"length": length, "generator": rng, **drawn})


def perturb(
    audio: NDArray[np.int16], sample_rate: int, settings: PerturbSettings, rng: np.random.Generator
) -> NDArray[np.int16]:
    """Return the utterance as another speaker, room or microphone might have had it; mono, saturated at full scale.

    A function of the audio, the settings (and the files they name) and the state of `rng`.
    """
    drawn = draw(len(audio), sample_rate, settings, rng)
    unchanged: Samples = audio.astype(np.float32)
    samples = _at_speed(unchanged, sample_rate, drawn.speed)
    assert len(samples) == drawn.length, f"{len(audio)} samples at speed {drawn.speed} are {len(samples)}"
    if drawn.room is not None:
        samples = _in_room(samples, _read(drawn.room, sample_rate).astype(np.float32))
    samples = _shifted(samples, drawn.shift)
    if drawn.gain != 1.0:
        samples = samples * np.float32(drawn.gain)
    if drawn.noise is not None:
        samples = _with_noise(samples, drawn.noise.astype(np.float32), drawn.noise_snr)
    if drawn.white_level:
        white = np.empty_like(samples)
        drawn.white_noise(white)
        samples = samples + white
    return audio if samples is unchanged else np.clip(np.rint(samples), -32768, 32767).astype(np.int16)


def _changes(settings: PerturbSettings) -> Iterator[tuple[float, DrawChange]]:
    """Yield the changes that are set, each with its probability, in the order in which they are made."""
    if settings.speed_range is not None or settings.speed_factors:
        yield settings.speed_prob, partial(_draw_speed, settings)
    if settings.impulse_from is not None:
        yield settings.impulse_prob, partial(_draw_room, settings.impulse_from)
    if settings.shift_ms is not None:
        yield settings.shift_prob, partial(_draw_shift, settings.shift_ms)
    if settings.gain_db is not None:
        yield settings.gain_prob, partial(_draw_gain, settings.gain_db)
    if settings.noise_from is not None:
        yield settings.noise_prob, partial(_draw_noise, settings.noise_from, settings.noise_snr_db)
    if settings.white_noise_db is not None:
        yield settings.white_noise_prob, partial(_draw_white_noise, settings.white_noise_db)


def _draw_speed(settings: PerturbSettings, length: int, sample_rate: int, rng: np.random.Generator) -> dict[str, Any]:
    if settings.speed_range is not None:
        speed = float(rng.uniform(*settings.speed_range))
    else:
        speed = settings.speed_factors[rng.integers(len(settings.speed_factors))]
    return {"speed": speed, "length": _played_length(length, sample_rate, speed)}


def _draw_room(source: Path, length: int, sample_rate: int, rng: np.random.Generator) -> dict[str, Any]:
    return {"room": _pick(source, rng)}


def _draw_shift(
    range_ms: tuple[float, float], length: int, sample_rate: int, rng: np.random.Generator
) -> dict[str, Any]:
    """An utterance shorter than the shift stays, or it would be gone."""
    places = round(rng.uniform(*range_ms) * sample_rate / 1000)
    return {"shift": places} if abs(places) < length else {}


def _draw_gain(
    range_db: tuple[float, float], length: int, sample_rate: int, rng: np.random.Generator
) -> dict[str, Any]:
    return {"gain": _amplitude(rng.uniform(*range_db))}


def _draw_noise(
    source: Path, snr_db: tuple[float, float], length: int, sample_rate: int, rng: np.random.Generator
) -> dict[str, Any]:
    """Only as much of a clip is read as is wanted, from a random place on; a short clip is repeated."""
    clip = _pick(source, rng)
    wanted_s = max(length / sample_rate, SHORTEST_READ_S)
    if clip.seconds > wanted_s:
        offset_s = clip.offset_s + rng.uniform(0.0, clip.seconds - wanted_s)
        noise = _read(clip._replace(offset_s=offset_s, seconds=wanted_s), sample_rate)
    else:
        noise = _read(clip, sample_rate)
        noise = np.roll(noise, -int(rng.integers(max(len(noise), 1))))
    return {"noise": np.resize(noise, length), "noise_snr": _amplitude(rng.uniform(*snr_db))}


def _draw_white_noise(
    range_db: tuple[float, float], length: int, sample_rate: int, rng: np.random.Generator
) -> dict[str, Any]:
    return {"white_level": FULL_SCALE * _amplitude(rng.uniform(*range_db))}


def _played_length(length: int, sample_rate: int, speed: float) -> int:
    """Return the number of samples that `_at_speed` makes of so many, by soxr's own rule."""
    return length if speed == 1.0 else int(length / (sample_rate * speed / sample_rate) + 0.5)


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
    if places == 0:
        return samples
    shifted = np.zeros_like(samples)
    if places > 0:
        shifted[places:] = samples[:-places]
    else:
        shifted[:places] = samples[-places:]
    return shifted


def _with_noise(samples: Samples, noise: Samples, snr: float) -> Samples:
    """Silence has no ratio to noise and stays silent."""
    signal_rms, noise_rms = _rms(samples), _rms(noise)
    if signal_rms == 0 or noise_rms == 0:
        return samples
    return samples + noise * np.float32(signal_rms / noise_rms / snr)


def _pick(source: Path, rng: np.random.Generator) -> Clip:
    clips = find_clips(source)
    return clips[rng.integers(len(clips))]


def _read(clip: Clip, sample_rate: int) -> NDArray[np.int16]:
    if clip.row is None:
        from paceline.recipes.speech.audio.read import read_audio

        return read_audio(clip.path, sample_rate=sample_rate, offset_s=clip.offset_s, duration_s=clip.seconds)
    from paceline.recipes.speech.audio.recordings import read_packed_audio

    return read_packed_audio(clip.path, clip.row, sample_rate, offset_s=clip.offset_s, duration_s=clip.seconds)


def _rms(samples: Samples) -> float:
    return math.sqrt(np.square(samples, dtype=np.float64).mean()) if len(samples) else 0.0


def _amplitude(decibels: float) -> float:
    return float(10.0 ** (decibels / 20))
