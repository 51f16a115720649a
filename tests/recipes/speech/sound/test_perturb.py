"""Perturbations against closed formulas: frequencies, decibels, places."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from paceline.core.errors import NotFound, PacelineError, Unreadable
from paceline.recipes.speech.manifest.bad_line import BadManifest
from paceline.recipes.speech.manifest.read import NotAManifest
from paceline.recipes.speech.sound.clips import find_clips
from paceline.recipes.speech.sound.perturb import PerturbSettings, check_clips, max_stretch, perturb

soundfile = pytest.importorskip("soundfile")
soxr = pytest.importorskip("soxr")
RATE = 16000
ALL = {
    "speed_range": (0.85, 1.15),
    "shift_ms": (-5, 5),
    "gain_db": (-10, 10),
    "white_noise_db": (-60, -46),
}


def run(audio: NDArray[np.int16], seed: int = 0, rate: int = RATE, **settings: Any) -> NDArray[np.int16]:
    return perturb(audio, rate, PerturbSettings(**settings), np.random.default_rng(seed))


def sine(hertz: float, seconds: float = 1.0, loudness: float = 8000, rate: int = RATE) -> NDArray[np.int16]:
    return np.rint(loudness * np.sin(2 * np.pi * hertz * np.arange(round(seconds * rate)) / rate)).astype(np.int16)


def noise(samples: int, seed: int = 0, loudness: float = 2000) -> NDArray[np.int16]:
    return (np.random.default_rng(seed).standard_normal(samples) * loudness).astype(np.int16)


def pitch(audio: NDArray[np.int16], rate: int = RATE) -> float:
    """The strongest frequency, between bins by a parabola through the logarithms."""
    power = np.log(np.abs(np.fft.rfft(audio * np.hanning(len(audio)))) + 1e-9)
    top = int(power.argmax())
    low, mid, high = power[top - 1 : top + 2]
    return (top + 0.5 * (low - high) / (low - 2 * mid + high)) * rate / len(audio)


def rms(audio: NDArray[Any]) -> float:
    return float(np.sqrt((audio.astype(np.float64) ** 2).mean()))


def decibels(ratio: float) -> float:
    return 20 * float(np.log10(ratio))


@pytest.fixture
def clips(tmp_path: Path) -> Path:
    """A long noise, a short one at another rate in stereo, in a folder with one below it."""
    (tmp_path / "deep").mkdir()
    soundfile.write(tmp_path / "long.flac", noise(5 * RATE, seed=1), RATE)
    soundfile.write(tmp_path / "deep/short.WAV", noise(8000, seed=2).reshape(-1, 2), 8000, format="WAV")
    (tmp_path / "notes.txt").write_text("no audio")
    return tmp_path


# -- one at a time -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("speed", [0.85, 0.9, 1.0, 1.1, 1.15, 2.0])
def test_speed_moves_pitch_and_length(speed: float) -> None:
    played = run(sine(440.0), speed_factors=(speed,))
    assert len(played) == round(RATE / speed)
    assert pitch(played) == pytest.approx(440.0 * speed, abs=0.5)
    inner = slice(len(played) // 10, -len(played) // 10)
    assert rms(played[inner]) == pytest.approx(8000 / 2**0.5, rel=0.01)


def test_speeds_of_a_range_fill_it() -> None:
    lengths = np.array([len(run(sine(440.0, 0.2), seed, speed_range=(0.85, 1.15))) for seed in range(300)])
    speeds = 3200 / lengths
    assert speeds.min() == pytest.approx(0.85, abs=0.01)
    assert speeds.max() == pytest.approx(1.15, abs=0.01)
    assert speeds.mean() == pytest.approx(1.0, abs=4 * 0.3 / 12**0.5 / 300**0.5)


def test_factors_are_all_used_and_1_changes_nothing() -> None:
    audio = noise(3000)
    played = [run(audio, seed, speed_factors=(0.9, 1.0, 1.1)) for seed in range(60)]
    lengths = [len(one) for one in played]
    assert {lengths.count(n) > 8 for n in (2727, 3000, 3333)} == {True}
    assert sum(lengths.count(n) for n in (2727, 3000, 3333)) == 60
    assert all(np.array_equal(one, audio) for one in played if len(one) == 3000)


def test_gain_is_in_decibels() -> None:
    audio = noise(RATE)
    for gain in (-10.0, 3.0, 10.0):
        assert decibels(rms(run(audio, gain_db=(gain, gain))) / rms(audio)) == pytest.approx(gain, abs=0.01)
    gains = [decibels(rms(run(audio, seed, gain_db=(-10, 10))) / rms(audio)) for seed in range(200)]
    assert -10.01 < min(gains) < -9
    assert 9 < max(gains) < 10.01


def test_too_loud_is_cut_and_does_not_wrap() -> None:
    audio = np.array([-32768, -20000, -1, 0, 1, 20000, 32767], dtype=np.int16)
    assert run(audio, gain_db=(40, 40)).tolist() == [-32768, -32768, -100, 0, 100, 32767, 32767]
    square = np.tile(np.repeat(np.array([32767, -32768], dtype=np.int16), 20), 40)
    rings = soxr.resample(square.astype(np.float64), RATE * 0.9, RATE)
    assert rings.max() > 34000
    np.testing.assert_allclose(run(square, speed_factors=(0.9,)), rings.clip(-32768, 32767), rtol=0, atol=1.0)


@pytest.mark.parametrize(("milliseconds", "samples"), [(5, 80), (-5, -80), (0.0625, 1), (0, 0)])
def test_shift_is_exact_and_fills_with_zeros(milliseconds: float, samples: int) -> None:
    audio = noise(1000)
    shifted = run(audio, shift_ms=(milliseconds, milliseconds))
    padded = np.concatenate([np.zeros(1000, np.int16), audio, np.zeros(1000, np.int16)])
    assert np.array_equal(shifted, padded[1000 - samples : 2000 - samples])


def test_a_shift_beyond_the_utterance_leaves_it() -> None:
    assert np.array_equal(run(noise(80), shift_ms=(5, 5)), noise(80))


def test_white_noise_has_its_level() -> None:
    for level in (-46.0, -30.0):
        added = run(np.zeros(4 * RATE, np.int16), white_noise_db=(level, level))
        # Rounding adds 1/12 of a step squared.
        measured = np.sqrt(rms(added) ** 2 - 1 / 12)
        assert decibels(measured / 32768) == pytest.approx(level, abs=0.1)
        flat = np.abs(np.fft.rfft(added.astype(np.float64))) ** 2
        quarters = [part.mean() / flat.mean() for part in np.array_split(flat, 4)]
        assert quarters == pytest.approx([1, 1, 1, 1], abs=0.05)


@pytest.mark.parametrize("snr", [0.0, 10.0, 20.0])
@pytest.mark.parametrize("seconds", [0.3, 2.0, 7.0])
def test_noise_has_its_ratio(clips: Path, snr: float, seconds: float) -> None:
    audio = sine(300.0, seconds, loudness=4000)
    for seed in range(4):
        noisy = run(audio, seed, noise_from=clips, noise_snr_db=(snr, snr))
        added = noisy.astype(np.int64) - audio
        assert decibels(rms(audio) / rms(added)) == pytest.approx(snr, abs=0.02)


def test_noise_is_cut_at_any_place(clips: Path) -> None:
    """The 1600 samples that were added stand somewhere in the file, elsewhere for another key."""
    source = noise(5 * RATE, seed=1).astype(np.float64)
    audio = sine(300.0, 0.1, loudness=4000)
    manifest = clips / "long.json"
    manifest.write_text(json.dumps({"audio_filepath": "long.flac"}))
    places = []
    for seed in range(8):
        added = run(audio, seed, noise_from=manifest, noise_snr_db=(10, 10)).astype(np.int64) - audio
        likeness = np.correlate(source, added, mode="valid")
        best = int(likeness.argmax())
        found = source[best : best + 1600]
        assert np.corrcoef(found, added)[0, 1] > 0.9999
        places.append(best)
    assert len(set(places)) == 8
    assert max(places) - min(places) > RATE


def test_a_short_noise_is_repeated_from_any_place(tmp_path: Path) -> None:
    soundfile.write(tmp_path / "ramp.wav", np.arange(1, 1001, dtype=np.int16), RATE)
    audio = np.tile(np.array([1000, -1000], np.int16), 1500)
    starts = set()
    for seed in range(5):
        settings = PerturbSettings(noise_from=tmp_path, noise_snr_db=(0, 0))
        added = perturb(audio, RATE, settings, np.random.default_rng(seed)).astype(np.int64) - audio
        period = added[:1000]
        assert np.array_equal(added, np.tile(period, 3))
        start = int(period.argmin())
        assert np.all(np.diff(np.roll(period, -start)) > 0)
        starts.add(start)
    assert len(starts) == 5


def test_a_room_is_a_convolution_as_loud_as_before(tmp_path: Path) -> None:
    response = np.zeros(4000)
    response[[50, 450, 1250]] = [-0.5, 0.25, 0.1]  # the direct sound comes 50 samples late, upside down
    soundfile.write(tmp_path / "room.wav", response, RATE, subtype="FLOAT")
    audio = noise(8000)
    heard = run(audio, impulse_from=tmp_path)
    wanted = np.convolve(audio.astype(np.float64), [1.0, *[0] * 399, -0.5, *[0] * 799, -0.2])[:8000]
    wanted *= rms(audio) / rms(wanted)
    np.testing.assert_allclose(heard, wanted, rtol=0, atol=1.0)
    assert decibels(rms(heard) / rms(audio)) == pytest.approx(0, abs=0.01)


# -- all together ------------------------------------------------------------------------------------------------


def test_a_key_gives_the_same_again_and_another_something_else(clips: Path) -> None:
    audio = noise(6000)
    for name, value in {**ALL, "noise_from": clips, "impulse_from": clips}.items():
        first = run(audio, 1, **{name: value})
        assert np.array_equal(run(audio, 1, **{name: value}), first), name
        assert not np.array_equal(run(audio, 2, **{name: value})[:5000], first[:5000]), name
    everything = {**ALL, "noise_from": clips, "impulse_from": clips}
    assert np.array_equal(run(audio, 1, **everything), run(audio, 1, **everything))


def test_probabilities() -> None:
    audio = noise(500)
    for prob in (0.0, 0.3, 1.0):
        changed = sum(
            not np.array_equal(run(audio, seed, gain_db=(6, 6), gain_prob=prob), audio) for seed in range(400)
        )
        assert changed == pytest.approx(400 * prob, abs=4 * (400 * prob * (1 - prob)) ** 0.5)


def test_nothing_is_on_by_default_and_the_input_is_left_alone() -> None:
    audio = noise(5000)
    kept = audio.copy()
    assert run(audio) is audio
    run(audio, **ALL)
    assert np.array_equal(audio, kept)


@pytest.mark.parametrize("samples", [0, 1, 2, 3, 79, 160])
@pytest.mark.parametrize("loudness", [0, 2000])
def test_silence_and_scraps_survive(clips: Path, samples: int, loudness: float) -> None:
    for seed in range(5):
        audio = noise(samples, seed, loudness)
        changed = run(audio, seed, **ALL, noise_from=clips, impulse_from=clips)
        assert changed.dtype == np.int16
        assert len(changed) <= np.ceil(samples / 0.85)
        assert len(changed) >= min(samples, 1)
        assert np.array_equal(run(audio * 0, seed, noise_from=clips, impulse_from=clips), audio * 0)


def test_stretch_is_the_slowest_speed() -> None:
    assert max_stretch(PerturbSettings()) == 1.0
    assert max_stretch(PerturbSettings(speed_range=(0.8, 1.2))) == 1.25
    assert max_stretch(PerturbSettings(speed_range=(1.1, 1.2))) == 1.0
    assert max_stretch(PerturbSettings(speed_factors=(1.0, 0.5, 1.1))) == 2.0
    assert max_stretch(PerturbSettings(speed_factors=(0.5,), speed_prob=0.0)) == 1.0
    for seed in range(50):
        assert len(run(noise(999), seed, speed_range=(0.8, 1.2))) <= round(999 * 1.25)


# -- where clips come from, and mistakes -------------------------------------------------------------------------


def test_clips_of_a_folder_and_of_a_manifest(clips: Path) -> None:
    found = find_clips(clips)
    assert [(clip.path.name, clip.offset_s, clip.seconds) for clip in found] == [
        ("short.WAV", 0.0, 0.5),
        ("long.flac", 0.0, 5.0),
    ]
    lines = [
        {"audio_filepath": "long.flac", "offset": 1, "duration": 2.5, "text": "-"},
        {"audio_filename": str(clips / "long.flac"), "offset": 4.5, "duration": 9},
        {"audio_filepath": "deep/short.WAV"},
    ]
    manifest = clips / "noise.json"
    manifest.write_text("\n".join(map(json.dumps, lines)))
    assert [tuple(clip[1:3]) for clip in find_clips(manifest)] == [(1.0, 2.5), (4.5, 0.5), (0.0, 0.5)]


def test_bad_clips_are_all_said_before_training(clips: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    empty = tmp_path_factory.mktemp("empty")
    with pytest.raises(NotFound, match="holds no audio"):
        check_clips(PerturbSettings(noise_from=empty))
    with pytest.raises(NotAManifest, match="there is no such file"):
        check_clips(PerturbSettings(impulse_from=empty / "none.json"))
    (empty / "a.wav").write_bytes(b"")
    (empty / "b.wav").write_bytes(b"RIFFnonsense" * 9)
    with pytest.raises(Unreadable, match="2 files cannot be mixed in") as error:
        check_clips(PerturbSettings(noise_from=empty))
    assert "a.wav: is empty" in str(error.value)
    assert "b.wav: " in str(error.value)
    assert str(pickle.loads(pickle.dumps(error.value))) == str(error.value)
    manifest = clips / "bad.json"
    manifest.write_text('{"audio_filepath": "long.flac", "offset": 5}\n')
    with pytest.raises(Unreadable, match="1 file cannot be mixed in\n.*has nothing at 5 s"):
        check_clips(PerturbSettings(noise_from=manifest))
    manifest = clips / "worse.json"
    manifest.write_text('{"audio_filepath": "long.flac", "offset": "x"}\n{"text": 1}\nnot json\n')
    with pytest.raises(BadManifest, match="3 bad lines") as bad:
        check_clips(PerturbSettings(noise_from=manifest))
    assert f'{manifest}:1: "offset" is no number of seconds' in str(bad.value)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"speed_range": (0.9, 1.1), "speed_factors": (0.9,)}, "set speed_range or speed_factors, not both"),
        ({"speed_range": (1.1, 0.9)}, "from 1.1 to 0.9: the lower one comes first"),
        ({"speed_range": (0.0, 1.0)}, "value 1 must be at least 0.25"),
        ({"gain_db": (float("nan"), 3)}, "value 1 must be at most 200"),
        ({"noise_prob": 1.5}, "must be at most 1"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(PacelineError, match=said):
        PerturbSettings(**settings)
