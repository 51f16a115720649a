"""The acoustic front end: from int16 audio to normalised log-mel features, on the audio's own device.

The numbers are those of NeMo's front end on each utterance alone (pre-emphasis, centred STFT, power, Slaney's mel
filters, log, mean 0 and deviation 1 per utterance), however far the batch is padded. NeMo changed the number of frames
and the edges twice: `front_end` says which of its versions is meant.

Everything is computed in float64 and rounded to float32 at the end. A float32 FFT moves features of real speech by more
than 1e-4, since the logarithm and the division by a small deviation magnify its rounding. And float64 is what neither
autocast nor TF32 touches, so that features do not depend on the level.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any, Literal, overload

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator
from torch import Tensor, nn

from paceline.config.settings import Fraction, PositiveFloat, Section
from paceline.core.errors import PacelineError
from paceline.core.keys_torch import normal
from paceline.core.torch_private import not_compiled
from paceline.core.units import counted
from paceline.recipes.speech.sound.key_streams import KeyStream

STD_GUARD = 1e-5
"""Added to the standard deviation, as the reference does."""
FRAMES_AT_ONCE = {"cpu": 1024, "cuda": 131072}
"""Spectra held at a time: on a CPU what the cache holds, on a GPU what fits beside a model (1.3 GB at 512 points)."""
FrontEnd = Literal["nemo-0.11", "nemo-1.0", "nemo-2.5"]
"""The first of NeMo's versions since 0.11 that counts frames and treats edges like this."""


class FeatureSettings(Section):
    """How audio becomes features."""

    front_end: FrontEnd = "nemo-0.11"
    """Frames and edges of NeMo's versions. `nemo-0.11` (0.x and the pre-releases of 1.0): ceil(samples / stride)
    frames, reflected edges. `nemo-1.0` (1.0 to 2.4): floor(samples / stride) + 1 frames, reflected edges. `nemo-2.5`
    (since 2.5): floor(samples / stride) frames, zeros beyond the edges."""
    num_mels: Annotated[int, Field(gt=0, le=4096)] = 64
    """Mel filters, the features per frame."""
    window_s: Annotated[float, Field(gt=0, le=10)] = 0.02
    """Seconds that a frame looks at."""
    stride_s: Annotated[float, Field(gt=0, le=10)] = 0.01
    """Seconds from frame to frame."""
    n_fft: Annotated[int, Field(gt=0, le=2**20)] | None = None
    """Points of the Fourier transform; the next power of two of the window if not set."""
    window: Literal["hann", "hamming", "blackman", "bartlett", "ones"] = "hann"
    """Shape of the window, symmetric."""
    preemphasis: Fraction = 0.97
    """Share of the sample before that is taken off each sample; 0: none."""
    dither: Annotated[float, Field(ge=0)] = 1e-5
    """Standard deviation of the noise added in training, where full scale is 1."""
    mag_power: PositiveFloat = 2.0
    """Power of the magnitudes that the filters add up: 2 for energies."""
    log_guard: PositiveFloat = 2.0**-24
    """Smallest energy that is told from silence: added before the logarithm."""
    log_guard_type: Literal["add", "clamp"] = "add"
    """Energies are added to `log_guard`, or raised to it where they are below."""
    normalize: Literal["per_feature", "all_features", "none"] = "per_feature"
    """What gets mean 0 and deviation 1 in each utterance: every filter, all together, or nothing."""
    low_hz: Annotated[float, Field(ge=0)] = 0.0
    """Where the lowest filter begins."""
    high_hz: PositiveFloat | None = None
    """Where the highest filter ends; half the sample rate if not set."""
    pad_to: Annotated[int, Field(ge=0)] = 16
    """The number of frames in a batch is a multiple of this; 0: as it comes."""

    @model_validator(mode="after")
    def _has_band(self) -> FeatureSettings:
        if self.high_hz is not None and self.high_hz <= self.low_hz:
            raise ValueError(f"`high_hz` {self.high_hz:g} is not above `low_hz` {self.low_hz:g}")
        return self

    @model_serializer(mode="wrap")
    def _only_if_chosen(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out what earlier versions did not know, where it changes nothing: their runs go on."""
        values: dict[str, Any] = dump(self)
        for name in ("front_end", "log_guard_type"):
            if values.get(name) == FeatureSettings.model_fields[name].default:
                del values[name]
        return values


@dataclass(frozen=True)
class FrameRule:
    """Number of frames of an utterance, by the front end's version."""

    hop_samples: int
    front_end: FrontEnd = "nemo-0.11"
    is_odd: bool = False
    """The transform has an odd number of points, and half of it on both sides of a frame is one less."""

    @overload
    def __call__(self, samples: int) -> int: ...
    @overload
    def __call__(self, samples: Tensor) -> Tensor: ...
    @overload
    def __call__(self, samples: NDArray[np.int64]) -> NDArray[np.int64]: ...
    def __call__(self, samples: Any) -> Any:
        """Return the number of frames of `samples`; nothing has none."""
        if self.front_end == "nemo-0.11":
            return -(-samples // self.hop_samples)
        whole = (samples - int(self.is_odd)) // self.hop_samples
        if self.front_end == "nemo-1.0":
            return (whole + 1) * (samples > 0)
        return whole * (samples > 0)


class FrontEndMisfit(PacelineError):
    """Feature settings that cannot work at the sample rate."""

    sample_rate: int
    reason: str
    advice: str
    sentence = "no features at {sample_rate} Hz: {reason}"
    hint = "{advice}"


class LogMel(nn.Module):
    """Log-mel features of a batch of audio, in one pass without waiting for the device.

    An utterance shorter than half a window is reflected as often as needed to fill one; a single sample is repeated.
    One frame alone has no deviation and becomes 0 (with `per_feature`), as does an utterance of silence.
    """

    window_bits: Tensor
    filter_bits: Tensor

    def __init__(self, settings: FeatureSettings, sample_rate: int) -> None:
        super().__init__()
        self.settings = settings
        self.sample_rate = sample_rate
        self.window_samples = _samples(settings.window_s, sample_rate)
        self.hop_samples = _samples(settings.stride_s, sample_rate)
        self.n_fft = settings.n_fft or 2 ** math.ceil(math.log2(max(self.window_samples, 1)))
        _check(settings, sample_rate, self.window_samples, self.hop_samples, self.n_fft)
        filters = mel_filters(
            sample_rate, self.n_fft, settings.num_mels, settings.low_hz, settings.high_hz or sample_rate / 2
        )
        _check_filters(filters, sample_rate, self.n_fft)
        self.frame_rule = FrameRule(self.hop_samples, settings.front_end, is_odd=self.n_fft % 2 == 1)
        # The window lies in the middle of the transform's points; what lies outside of it is never read. The last frame
        # may begin, by its middle, where the utterance ends.
        self._before = self.n_fft // 2 - (self.n_fft - self.window_samples) // 2
        self._after = self.window_samples - self._before
        # Kept as bits: a model that is turned to fp16 takes its floating buffers along, and these must stay exact.
        window = _window(settings.window, self.window_samples)
        self.register_buffer("window_bits", window.view(torch.int64), persistent=False)
        # (bin, mel)
        self.register_buffer("filter_bits", torch.from_numpy(filters.T.copy()).view(torch.int64), persistent=False)

    @overload
    def num_frames(self, samples: int) -> int: ...
    @overload
    def num_frames(self, samples: Tensor) -> Tensor: ...
    def num_frames(self, samples: int | Tensor) -> int | Tensor:
        """Return the number of frames of `samples`."""
        return self.frame_rule(samples)

    # Compiled, the FFT would fall back to this same code with a warning about complex numbers, and every new width of a
    # batch would be compiled anew.
    @not_compiled
    @torch.no_grad()
    def forward(self, audio: Tensor, lengths: Tensor, keys: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(batch, samples) int16 or floating, int64 lengths -> (batch, mel, frame) float32, int64 lengths in frames.

        `keys` (batch,) give each sample its own dither in training; without them the device's generator does.
        """
        if audio.shape[1] == 0:
            audio = F.pad(audio, (0, 1))
        signal = audio.to(torch.float64)
        if audio.dtype == torch.int16:
            signal.mul_(2.0**-15)
        elif signal is audio:
            signal = audio.clone()
        if self.training and self.settings.dither > 0:
            if keys is None:
                keys = torch.randint(2**62, (len(audio),), device=audio.device)
            signal.add_(normal(keys, KeyStream.DITHER, audio.shape[1]), alpha=self.settings.dither)
        window, filters = self.window_bits.view(torch.float64), self.filter_bits.view(torch.float64)
        energies = self._log_energies(
            self._with_edges(signal, lengths), self.num_frames(audio.shape[1]), window, filters
        )
        frames = self.num_frames(lengths)
        return self._normalized(energies, frames), frames

    @torch.no_grad()
    def log_energies(self, samples: Tensor) -> Tensor:
        """(samples) int16 -> (frame, mel) float64 on the CPU, before it is normalized: for whoever knows mean and
        deviation of more than these samples."""
        signal = samples.to("cpu", torch.float64)[None] * 2.0**-15
        number = self.num_frames(len(samples))
        if not number:
            return torch.zeros(0, self.settings.num_mels, dtype=torch.float64, device="cpu")
        edged = self._with_edges(signal, torch.tensor([len(samples)], device="cpu"))
        window, filters = (bits.cpu().view(torch.float64) for bits in (self.window_bits, self.filter_bits))
        return self._log_energies(edged, number, window, filters)[0]

    @property
    def edge_frames(self) -> int:
        """Frames at the end of a signal that look beyond it."""
        return -(-self._after // self.hop_samples) + 1

    def computed(self, features: Tensor) -> Tensor:
        """(batch, frame, mel) that `forward` would have given, padded as it pads: (batch, mel, frame)."""
        missing = -features.shape[1] % max(self.settings.pad_to, 1)
        return F.pad(features, (0, 0, 0, missing)).transpose(1, 2).contiguous()

    def _with_edges(self, signal: Tensor, lengths: Tensor) -> Tensor:
        """Pre-emphasis, then each utterance reflected at its own beginning and end, or with zeros around it."""
        before, after, samples = self._before, self._after, signal.shape[1]
        edged = signal.new_zeros(len(signal), before + samples + after)
        middle = edged[:, before : before + samples]
        middle[:, 0] = signal[:, 0]
        torch.sub(signal[:, 1:], signal[:, :-1], alpha=self.settings.preemphasis, out=middle[:, 1:])
        if self.settings.front_end == "nemo-2.5":
            middle.mul_(torch.arange(samples, device=signal.device) < lengths[:, None])
            return edged
        positions = torch.arange(-before, 0, device=signal.device)
        head = middle.gather(1, _reflected(positions, lengths[:, None]))
        positions = lengths[:, None] + torch.arange(after, device=signal.device)
        tail = middle.gather(1, _reflected(positions, lengths[:, None]))
        edged[:, :before] = head
        return edged.scatter_(1, before + positions, tail)

    def _log_energies(self, edged: Tensor, num_frames: int, window: Tensor, filters: Tensor) -> Tensor:
        """(batch, samples) -> (batch, frame, mel), some frames of all utterances at a time."""
        frames = edged.unfold(1, self.window_samples, self.hop_samples)  # `num_frames`, or one more
        energies = edged.new_empty(len(edged), num_frames, self.settings.num_mels)
        step = max(1, FRAMES_AT_ONCE[edged.device.type] // max(len(edged), 1))
        for start in range(0, num_frames, step):
            some = frames[:, start : min(start + step, num_frames)]
            windowed = some.new_zeros(*some.shape[:2], self.n_fft)
            torch.mul(some, window, out=windowed[:, :, : self.window_samples])
            spectrum = torch.fft.rfft(windowed)
            power = spectrum.real.square().addcmul_(spectrum.imag, spectrum.imag)
            if self.settings.mag_power != 2.0:
                power = power.pow_(self.settings.mag_power / 2)
            energies[:, start : start + step] = power @ filters
        if self.settings.log_guard_type == "clamp":
            return energies.clamp_(min=self.settings.log_guard).log_()
        return energies.add_(self.settings.log_guard).log_()

    def _normalized(self, energies: Tensor, frames: Tensor) -> Tensor:
        """(batch, frame, mel) -> (batch, mel, frame) float32, 0 behind an utterance's end."""
        batch, num_frames, mels = energies.shape
        count = frames[:, None, None]
        valid = torch.arange(num_frames, device=energies.device)[:, None] < count
        if self.settings.normalize != "none":
            together = self.settings.normalize == "all_features"
            over, values = ((1, 2), count * mels) if together else ((1,), count)
            energies.mul_(valid)
            mean = energies.sum(over, keepdim=True) / values.clamp(min=1)
            energies.sub_(mean).mul_(valid)
            variance = energies.square().sum(over, keepdim=True) / (values - 1).clamp(min=1)
            energies.div_(variance.sqrt_().add_(STD_GUARD))
        else:
            energies.mul_(valid)
        multiple = max(self.settings.pad_to, 1)
        features = energies.new_zeros(batch, mels, -(-num_frames // multiple) * multiple, dtype=torch.float32)
        features[:, :, :num_frames] = energies.transpose(1, 2)
        return features


def mel_filters(sample_rate: int, n_fft: int, num_mels: int, low_hz: float, high_hz: float) -> NDArray[np.float64]:
    """Slaney's triangles, each of area 1 over Hz: (mel, bin).

    Their corners are evenly spaced in mels, which are linear up to 1000 Hz (15 mels) and logarithmic above, 27 mels for
    a factor of 6.4 (M. Slaney, Auditory Toolbox, 1998).
    """
    corners = _hz(np.linspace(_mels(low_hz), _mels(high_hz), num_mels + 2))
    left, centre, right = corners[:-2, None], corners[1:-1, None], corners[2:, None]
    bins = np.arange(n_fft // 2 + 1) * (sample_rate / n_fft)
    triangles = np.minimum((bins - left) / (centre - left), (right - bins) / (right - centre))
    filters: NDArray[np.float64] = np.maximum(triangles, 0.0) * (2.0 / (right - left))
    return filters


def _mels(hz: float) -> float:
    return hz * 3 / 200 if hz < 1000 else 15 + 27 * math.log(hz / 1000) / math.log(6.4)


def _hz(mels: NDArray[np.float64]) -> NDArray[np.float64]:
    hz: NDArray[np.float64] = np.where(mels < 15, mels * 200 / 3, 1000 * 6.4 ** ((mels - 15) / 27))
    return hz


def _reflected(positions: Tensor, lengths: Tensor) -> Tensor:
    """Return the position that one outside of an utterance reads, the edges being mirrors that are not repeated
    themselves."""
    period = (2 * lengths - 2).clamp(min=1)
    inside = positions.remainder(period)
    return torch.minimum(inside, period - inside)


def _window(name: str, samples: int) -> Tensor:
    if name == "ones":
        return torch.ones(samples, dtype=torch.float64, device="cpu")
    make = {
        "hann": torch.hann_window,
        "hamming": torch.hamming_window,
        "blackman": torch.blackman_window,
        "bartlett": torch.bartlett_window,
    }[name]
    return make(samples, periodic=False, dtype=torch.float64)


def _samples(seconds: float, sample_rate: int) -> int:
    """Return the whole samples in a time; what the product lacks by rounding must not lose one."""
    return math.floor(seconds * sample_rate + 1e-6)


def _check(settings: FeatureSettings, sample_rate: int, window: int, hop: int, n_fft: int) -> None:
    if hop < 1 or window < 1:
        name = "stride_s" if hop < 1 else "window_s"
        reason = f"`{name}` {getattr(settings, name):g} is shorter than a sample"
        raise FrontEndMisfit(sample_rate, reason, f"set `{name}` to at least {1 / sample_rate:g}")
    if n_fft < window:
        reason = f"`n_fft` {n_fft} is less than the {counted(window, 'sample')} of `window_s` {settings.window_s:g}"
        raise FrontEndMisfit(sample_rate, reason, f"set `n_fft` to {2 ** math.ceil(math.log2(window))} or leave it out")
    highest = settings.high_hz or sample_rate / 2
    if highest > sample_rate / 2 or settings.low_hz >= highest:
        band = f"{settings.low_hz:g} to {highest:g} Hz"
        reason = f"the filters' band {band} is not within 0 to {sample_rate / 2:g} Hz"
        raise FrontEndMisfit(sample_rate, reason, "change `low_hz` and `high_hz`, or leave them out")


def _check_filters(filters: NDArray[np.float64], sample_rate: int, n_fft: int) -> None:
    empty = np.flatnonzero(filters.sum(1) == 0)
    if len(empty):
        reason = f"{len(empty)} of {len(filters)} mel filters lie between two of the {n_fft} points of the transform"
        raise FrontEndMisfit(sample_rate, reason, "set fewer `num_mels`, or a larger `n_fft`")
