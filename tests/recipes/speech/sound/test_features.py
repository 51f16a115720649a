"""The front end against a plain numpy one in float64, one utterance at a time, and against librosa's published mels."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

from paceline.core.errors import PacelineError
from paceline.recipes.speech.sound import features as module
from paceline.recipes.speech.sound.features import FeatureSettings, FrontEnd, FrontEndMisfit, LogMel, mel_filters

DATA = Path(__file__).parents[5] / "shared" / "data"
NETWORKS_OWN = FeatureSettings(n_fft=512)
"""As the shipped networks have it."""
# What librosa's documentation prints for mel_frequencies(n_mels=40): Slaney's mels between 0 and 11025 Hz.
LIBROSA_HZ = """
    0 85.317 170.635 255.952 341.269 426.586 511.904 597.221 682.538 767.855 853.173 938.49 1024.856 1119.114 1222.042
    1334.436 1457.167 1591.187 1737.532 1897.337 2071.84 2262.393 2470.47 2697.686 2945.799 3216.731 3512.582 3835.643
    4188.417 4573.636 4994.285 5453.621 5955.205 6502.92 7101.009 7754.107 8467.272 9246.028 10096.408 11025
"""


def reference(audio: NDArray[Any], settings: FeatureSettings, sample_rate: int = 16000) -> NDArray[np.float64]:
    """(mel, frame) of one utterance, as NeMo defines it, step by step in float64."""
    x = audio.astype(np.float64) / (32768 if audio.dtype == np.int16 else 1)
    window_samples, hop = round(settings.window_s * sample_rate), round(settings.stride_s * sample_rate)
    n_fft = settings.n_fft or next(2**n for n in range(20) if 2**n >= window_samples)
    x = np.concatenate([x[:1], x[1:] - settings.preemphasis * x[:-1]])
    edges: Any = "constant" if settings.front_end == "nemo-2.5" else "reflect"
    x = np.pad(x, n_fft // 2, mode=edges)
    shapes = {
        "hann": np.hanning,
        "hamming": lambda n: 0.54 - 0.46 * np.cos(2 * np.pi * np.arange(n) / (n - 1)),
        "blackman": np.blackman,
        "bartlett": np.bartlett,
        "ones": np.ones,
    }
    left = (n_fft - window_samples) // 2
    window = np.pad(shapes[settings.window](window_samples), (left, n_fft - window_samples - left))
    whole = (len(audio) - n_fft % 2) // hop
    number = {"nemo-0.11": -(-len(audio) // hop), "nemo-1.0": whole + 1, "nemo-2.5": whole}[settings.front_end]
    frames = [x[i * hop : i * hop + n_fft] * window for i in range(number)]
    spectrum = np.abs(np.fft.rfft(np.array(frames), axis=1)) ** settings.mag_power
    high = settings.high_hz or sample_rate / 2
    energies = spectrum @ triangles(sample_rate, n_fft, settings.num_mels, settings.low_hz, high).T
    if settings.log_guard_type == "clamp":
        logs = np.log(np.maximum(energies, settings.log_guard))
    else:
        logs = np.log(energies + settings.log_guard)
    if settings.normalize == "none":
        return logs.T
    axis = 0 if settings.normalize == "per_feature" else None
    deviation = logs.std(axis, ddof=1) if (logs.size if axis is None else len(logs)) > 1 else 0.0
    return ((logs - logs.mean(axis)) / (deviation + 1e-5)).T


def triangles(sample_rate: int, n_fft: int, mels: int, low: float, high: float) -> NDArray[np.float64]:
    """Slaney's filters by interpolation between their corners."""
    step = np.log(6.4) / 27

    def to_mel(hz: float) -> float:
        return hz / (200 / 3) if hz < 1000 else 15 + np.log(hz / 1000) / step

    corners = [
        m * 200 / 3 if m < 15 else 1000 * np.exp(step * (m - 15))
        for m in np.linspace(to_mel(low), to_mel(high), mels + 2)
    ]
    bins = np.fft.rfftfreq(n_fft, 1 / sample_rate)
    rows = [np.interp(bins, corners[i : i + 3], [0, 2 / (corners[i + 2] - corners[i]), 0]) for i in range(mels)]
    return np.array(rows)


def noise(samples: int, seed: int = 0, loudness: float = 3000) -> NDArray[np.int16]:
    return (np.random.default_rng(seed).standard_normal(samples) * loudness).astype(np.int16)


def batch(utterances: list[NDArray[Any]], junk: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Padded with `junk`, which must never be heard."""
    width = max(len(one) for one in utterances)
    audio = np.full((len(utterances), width), junk, dtype=utterances[0].dtype)
    for row, one in enumerate(utterances):
        audio[row, : len(one)] = one
    return torch.from_numpy(audio), torch.tensor([len(one) for one in utterances])


def assert_as_reference(
    utterances: list[NDArray[Any]], settings: FeatureSettings = NETWORKS_OWN, sample_rate: int = 16000
) -> None:
    front_end = LogMel(settings, sample_rate).eval()
    features, lengths = front_end(*batch(utterances, junk=1))
    assert features.dtype == torch.float32
    assert lengths.dtype == torch.int64
    for row, one in enumerate(utterances):
        wanted = reference(one, settings, sample_rate)
        assert lengths[row] == wanted.shape[1] == front_end.num_frames(len(one))
        np.testing.assert_allclose(features[row, :, : wanted.shape[1]], wanted, rtol=0, atol=1e-4)
        assert not features[row, :, wanted.shape[1] :].any()


def speech(manifest: Path, number: int) -> list[NDArray[np.int16]]:
    soundfile = pytest.importorskip("soundfile")
    if not manifest.exists():
        pytest.skip(f"{manifest} is not on this machine")
    lines = manifest.read_text().splitlines()
    chosen = [json.loads(line)["audio_filepath"] for line in lines[:: len(lines) // number][:number]]
    return [soundfile.read(manifest.parent / path, dtype="int16")[0] for path in chosen]


# -- against the reference ---------------------------------------------------------------------------------------


def test_noise() -> None:
    assert_as_reference([noise(n, seed=n) for n in (16000, 15999, 16001, 8000, 4321)])


def test_speech_at_16_khz() -> None:
    assert_as_reference(speech(DATA / "librispeech/test.json", 12))


def test_speech_at_8_khz() -> None:
    assert_as_reference(speech(DATA / "fsdd/test.json", 60), FeatureSettings(), sample_rate=8000)


@pytest.mark.parametrize("samples", [1, 2, 3, 50, 159, 160, 161, 200, 255, 256, 257, 320, 480])
def test_utterances_shorter_than_their_edges(samples: int) -> None:
    """numpy reflects as often as needed, and repeats a single sample."""
    assert_as_reference([noise(samples), noise(1000)])


def test_silence_and_nothing() -> None:
    features, lengths = LogMel(NETWORKS_OWN, 16000).eval()(
        torch.zeros(3, 4000, dtype=torch.int16), torch.tensor([4000, 1, 0])
    )
    assert lengths.tolist() == [25, 1, 0]
    assert features.shape == (3, 64, 32)
    assert features.abs().max() < 1e-6
    features, lengths = LogMel(NETWORKS_OWN, 16000).eval()(torch.zeros(2, 0, dtype=torch.int16), torch.tensor([0, 0]))
    assert lengths.tolist() == [0, 0]
    assert not features.any()


def test_half_silent_and_full_scale() -> None:
    loud = np.tile(np.array([32767, -32768], dtype=np.int16), 4000)
    quiet = np.concatenate([np.zeros(6000, dtype=np.int16), noise(2000, loudness=1), np.zeros(3000, dtype=np.int16)])
    assert_as_reference([np.concatenate([loud, np.zeros(8000, dtype=np.int16), noise(5000)]), quiet])


@pytest.mark.parametrize(
    "settings",
    [
        FeatureSettings(),
        FeatureSettings(n_fft=400, window="hamming", preemphasis=0.0),
        FeatureSettings(window="blackman", mag_power=1.0, num_mels=40),
        FeatureSettings(window="bartlett", normalize="all_features", low_hz=100, high_hz=7000),
        FeatureSettings(window="ones", normalize="none", log_guard=1e-3, num_mels=20),
        FeatureSettings(window_s=321 / 16000, n_fft=1024, stride_s=0.0125),
        FeatureSettings(window_s=0.025, n_fft=513, pad_to=0),
        FeatureSettings(window_s=0.025, num_mels=80, pad_to=0, log_guard_type="clamp", log_guard=1e-5),
    ],
)
@pytest.mark.parametrize("front_end", get_args(FrontEnd))
def test_settings(settings: FeatureSettings, front_end: FrontEnd) -> None:
    settings = settings.model_copy(update={"front_end": front_end})
    lengths = (9000, 8000, 5003, 8001, 7999, 200)
    assert_as_reference([noise(number, seed=number) for number in lengths], settings)


@pytest.mark.parametrize("front_end", ["nemo-1.0", "nemo-2.5"])
def test_speech_of_newer_front_ends(front_end: Any) -> None:
    assert_as_reference(speech(DATA / "librispeech/test.json", 20), FeatureSettings(n_fft=512, front_end=front_end))


@pytest.mark.parametrize(
    ("front_end", "frames"),
    [
        ("nemo-0.11", [0, 1, 1, 1, 2, 2, 100]),
        ("nemo-1.0", [0, 1, 1, 2, 2, 3, 101]),
        ("nemo-2.5", [0, 0, 0, 1, 1, 2, 100]),
    ],
)
def test_each_front_end_counts_frames_alike_everywhere(front_end: Any, frames: list[int]) -> None:
    samples = [0, 1, 159, 160, 161, 320, 16000]
    heard = LogMel(FeatureSettings(n_fft=512, front_end=front_end), 16000).eval()
    assert [heard.num_frames(number) for number in samples] == frames
    assert heard.num_frames(torch.tensor(samples)).tolist() == frames
    assert heard.frame_rule(np.array(samples)).tolist() == frames
    assert heard(torch.ones(7, 16000), torch.tensor(samples))[1].tolist() == frames


def test_what_earlier_versions_did_not_know_is_not_stored_unless_chosen() -> None:
    assert {"front_end", "log_guard_type"}.isdisjoint(FeatureSettings().model_dump())
    chosen = FeatureSettings(front_end="nemo-2.5", log_guard_type="clamp")
    assert FeatureSettings.model_validate(chosen.model_dump()) == chosen
    assert chosen.model_dump()["front_end"] == "nemo-2.5"


def test_spectrum_is_that_of_torch_with_its_own_padding() -> None:
    """NeMo's call, in float64, on an utterance alone."""
    audio = torch.from_numpy(noise(5000)) / 32768.0
    plain = FeatureSettings(n_fft=512, preemphasis=0.0, normalize="none", pad_to=0)
    window = torch.hann_window(320, periodic=False, dtype=torch.float64)
    spectrum = torch.stft(audio.double(), 512, 160, 320, window, center=True, return_complex=True).abs().square()
    wanted = torch.log(torch.from_numpy(mel_filters(16000, 512, 64, 0, 8000)) @ spectrum + 2**-24)
    features, _ = LogMel(plain, 16000).eval()(audio[None], torch.tensor([5000]))
    torch.testing.assert_close(features[0].double(), wanted[:, :32], rtol=0, atol=2e-6)


def test_filters_are_librosas() -> None:
    corners = np.array(LIBROSA_HZ.split(), dtype=np.float64)
    filters = mel_filters(22050, 2048, 38, 0, 11025)
    bins = np.arange(1025) * 22050 / 2048
    for row, (left, centre, right) in enumerate(zip(corners, corners[1:], corners[2:], strict=False)):
        wanted = np.interp(bins, [left, centre, right], [0, 2 / (right - left), 0])
        np.testing.assert_allclose(filters[row], wanted, rtol=0, atol=1e-6)
    fine = mel_filters(16000, 2**18, 64, 0, 8000)
    np.testing.assert_allclose(fine.sum(1) * 16000 / 2**18, 1.0, rtol=1e-4)  # the area under each


# -- padding, dtypes, levels -------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", get_args(FrontEnd))
@pytest.mark.parametrize("normalize", ["per_feature", "all_features", "none"])
def test_padding_changes_nothing(normalize: Any, version: Any) -> None:
    front_end = LogMel(FeatureSettings(n_fft=512, normalize=normalize, front_end=version), 16000).eval()
    utterances = [noise(n, seed=n) for n in (24000, 1, 170, 9999, 16000, 321)]
    together, lengths = front_end(*batch(utterances, junk=-7777))
    for row, one in enumerate(utterances):
        alone, length = front_end(*batch([one]))
        assert length[0] == lengths[row]
        torch.testing.assert_close(together[row, :, : length[0]], alone[0, :, : length[0]], rtol=0, atol=1e-6)


def test_frames_are_counted_alike_everywhere() -> None:
    front_end = LogMel(NETWORKS_OWN, 16000).eval()
    samples = [0, 1, 159, 160, 161, 320, 16000, 267200]
    assert [front_end.num_frames(n) for n in samples] == [0, 1, 1, 1, 2, 2, 100, 1670]
    assert front_end.num_frames(torch.tensor(samples)).tolist() == [0, 1, 1, 1, 2, 2, 100, 1670]
    for pad_to, frames in ((0, 26), (1, 26), (16, 32), (10, 30)):
        padded, _ = LogMel(FeatureSettings(pad_to=pad_to), 16000).eval()(torch.ones(2, 4001), torch.tensor([4001, 1]))
        assert padded.shape == (2, 64, frames)


def test_blocks_of_frames_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    front_end = LogMel(NETWORKS_OWN, 16000).eval()
    audio, lengths = batch([noise(20000), noise(14000)])
    whole, _ = front_end(audio, lengths)
    monkeypatch.setitem(module.FRAMES_AT_ONCE, "cpu", 14)
    torch.testing.assert_close(front_end(audio, lengths)[0], whole, rtol=0, atol=1e-6)


def test_floats_are_full_scale_1_and_left_alone() -> None:
    front_end = LogMel(NETWORKS_OWN, 16000)
    audio, lengths = batch([noise(5000), noise(4000)])
    wanted, _ = front_end.eval()(audio, lengths)
    for dtype in (torch.float32, torch.float64):
        floats = audio.to(dtype) / 32768
        kept = floats.clone()
        assert torch.equal(front_end.eval()(floats, lengths)[0], wanted)
        front_end.train()(floats, lengths)
        assert torch.equal(floats, kept)


def test_level_and_cast_of_the_model_change_nothing() -> None:
    audio, lengths = batch([noise(5000), noise(4000)])
    model = nn.Sequential(nn.Linear(3, 3), LogMel(NETWORKS_OWN, 16000)).eval()
    front_end = model[1]
    wanted, _ = front_end(audio, lengths)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(front_end(audio, lengths)[0], wanted)
    assert list(model.half().state_dict()) == ["0.weight", "0.bias"]
    assert torch.equal(front_end(audio, lengths)[0], wanted)
    assert torch.equal(model.double().float()[1](audio, lengths)[0], wanted)


def test_compiling_around_it_changes_nothing() -> None:
    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.front_end = LogMel(NETWORKS_OWN, 16000)

        def forward(self, audio: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
            features, frames = self.front_end(audio, lengths * 1)
            return features.sum(2) / frames[:, None].clamp(min=1)

    model = Around().eval()
    compiled = torch.compile(model, backend="eager")
    for samples in (5000, 7000, 9000):
        audio, lengths = batch([noise(samples), noise(4000)])
        torch.testing.assert_close(compiled(audio, lengths), model(audio, lengths))


# -- dither ------------------------------------------------------------------------------------------------------


def test_dither_is_for_training_and_by_key() -> None:
    front_end = LogMel(FeatureSettings(n_fft=512, dither=1e-3), 16000)
    utterances = [noise(n, loudness=30) for n in (8000, 8000, 5000)]
    audio, lengths = batch(utterances)
    keys = torch.tensor([5, 6, 7])
    quiet, _ = front_end.eval()(audio, lengths, keys)
    front_end.train()
    dithered, _ = front_end(audio, lengths, keys)
    assert torch.equal(front_end(audio, lengths, keys)[0], dithered)
    assert (dithered - quiet)[0].abs().max() > 1e-2
    assert not torch.allclose(dithered[0], dithered[1], atol=1e-2)  # the same audio with another key
    alone, frames = front_end(*batch([utterances[2]]), keys[2:])
    torch.testing.assert_close(alone[0, :, : frames[0]], dithered[2, :, : frames[0]], rtol=0, atol=1e-6)
    assert torch.equal(front_end(audio, lengths, torch.tensor([5, 5, 7]))[0][1], dithered[0])


def test_dither_without_keys_follows_torchs_seed() -> None:
    front_end = LogMel(FeatureSettings(n_fft=512, dither=1e-3), 16000)
    audio, lengths = batch([noise(8000, loudness=30)])
    torch.manual_seed(1)
    first, _ = front_end(audio, lengths)
    second, _ = front_end(audio, lengths)
    torch.manual_seed(1)
    assert torch.equal(front_end(audio, lengths)[0], first)
    assert not torch.equal(first, second)
    front_end = LogMel(FeatureSettings(n_fft=512, dither=0.0), 16000)
    assert torch.equal(front_end(audio, lengths)[0], front_end.eval()(audio, lengths)[0])


def test_dither_has_its_strength() -> None:
    """Of noise alone, the energies are those of white noise of that deviation."""
    plain = {"preemphasis": 0.0, "normalize": "none", "n_fft": 512}
    silence, lengths = torch.zeros(4, 160000, dtype=torch.int16), torch.full((4,), 160000)
    dithered, _ = LogMel(FeatureSettings(dither=0.01, **plain), 16000)(silence, lengths, torch.arange(4))
    white = np.random.default_rng(0).standard_normal((4, 160000)) * 0.01
    wanted, _ = LogMel(FeatureSettings(**plain), 16000).eval()(torch.from_numpy(white), lengths)
    torch.testing.assert_close(dithered.mean((0, 2)), wanted.mean((0, 2)), rtol=0, atol=0.1)


@pytest.mark.parametrize(
    ("settings", "said", "hint"),
    [
        (FeatureSettings(n_fft=256), "`n_fft` 256 is less than the 320 samples of `window_s` 0.02", "512"),
        (FeatureSettings(high_hz=9000), "0 to 9000 Hz is not within 0 to 8000 Hz", "`high_hz`"),
        (FeatureSettings(low_hz=8000), "8000 to 8000 Hz is not within", "`low_hz`"),
        (FeatureSettings(stride_s=1e-5), "`stride_s` 1e-05 is shorter than a sample", "6.25e-05"),
        (FeatureSettings(window_s=1e-5), "`window_s` 1e-05 is shorter than a sample", "6.25e-05"),
        (FeatureSettings(num_mels=400), "of 400 mel filters lie between two of the 512 points", "fewer `num_mels`"),
    ],
)
def test_settings_that_cannot_work_are_said(settings: FeatureSettings, said: str, hint: str) -> None:
    with pytest.raises(FrontEndMisfit, match="no features at 16000 Hz") as error:
        LogMel(settings, 16000)
    assert said in str(error.value)
    assert hint in error.value.hint


def test_a_band_upside_down_is_refused() -> None:
    with pytest.raises(PacelineError, match="high_hz 100 is not above low_hz 200"):
        FeatureSettings(low_hz=200, high_hz=100)
