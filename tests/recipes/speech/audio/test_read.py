"""Audio as it was written, at another rate as if recorded at it, and every way in which a file can fail."""

from __future__ import annotations

import os
import pickle
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from numpy.typing import NDArray

from paceline.recipes.speech.audio.check import check, measure
from paceline.recipes.speech.audio.file import AudioUnreadable, probe
from paceline.recipes.speech.audio.read import read_audio
from tests.recipes.speech.sounds import FORMATS, LOSSLESS, tone, write

RATE = 16000


@pytest.mark.parametrize("kind", LOSSLESS)
def test_16_bits_come_back_as_they_are(kind: str, tmp_path: Path) -> None:
    edges = np.array([-32768, 32767, 0, 1, -1] * 400, dtype=np.int16)
    path = write(tmp_path / f"a.{kind}", edges)
    assert np.array_equal(read_audio(path, sample_rate=RATE), edges)
    assert read_audio(path, sample_rate=RATE).dtype == np.int16


@pytest.mark.parametrize("kind", FORMATS)
def test_a_part_is_a_part_of_the_whole(kind: str, tmp_path: Path) -> None:
    path = write(tmp_path / f"a.{kind}", tone(2.0))
    whole = read_audio(path, sample_rate=RATE)
    part = read_audio(path, sample_rate=RATE, offset_s=0.5, duration_s=0.75)
    rest = read_audio(path, sample_rate=RATE, offset_s=1.5)
    assert (len(whole), len(part), len(rest)) == (32000, 12000, 8000)
    # A lossy decoder that begins in the middle lacks what came before; it agrees soon.
    first, limit = (0, 0) if kind in LOSSLESS else (4000, 40)
    assert np.abs(whole[8000:20000].astype(int) - part)[first:].max() <= limit
    assert np.abs(whole[24000:].astype(int) - rest)[first:].max() <= limit


@pytest.mark.parametrize("kind", ["ogg", "opus", "mp3"])
def test_lossy_formats_sound_the_same(kind: str, tmp_path: Path) -> None:
    sound = tone(1.5)
    read = read_audio(write(tmp_path / f"a.{kind}", sound), sample_rate=RATE)
    middle = slice(2000, 22000)
    error = (read.astype(float) - sound)[middle].std() / sound[middle].std()
    assert len(read) == len(sound)
    assert error < 0.05


@pytest.mark.parametrize("kind", ["ogg", "opus", "mp3"])
def test_what_is_too_loud_is_clipped(kind: str, tmp_path: Path) -> None:
    """A square wave at full scale overshoots when it is decoded; 16 bits that wrap around would be noise."""
    square = np.where(np.arange(RATE) % 100 < 50, 32767, -32768).astype(np.int16)
    path = write(tmp_path / f"a.{kind}", square)
    decoded, _ = soundfile.read(path, dtype="float64")
    assert np.abs(decoded).max() > 1.01
    error = read_audio(path, sample_rate=RATE) / 32768 - np.clip(decoded, -1, 1)
    assert np.abs(error).max() < 1e-4


@pytest.mark.parametrize("subtype", ["PCM_U8", "PCM_24", "PCM_32", "FLOAT", "DOUBLE", "ULAW", "ALAW"])
def test_other_encodings_are_scaled_and_rounded(subtype: str, tmp_path: Path) -> None:
    wave = np.sin(np.arange(4000) * 0.05) * 0.7
    path = write(tmp_path / "a.wav", wave, subtype=subtype)
    there, _ = soundfile.read(path, dtype="float64")
    assert np.abs(read_audio(path, sample_rate=RATE) - there * 32768).max() < 0.502


@pytest.mark.parametrize("subtype", ["PCM_16", "FLOAT"])
def test_channels_are_averaged(subtype: str, tmp_path: Path) -> None:
    channels = np.random.default_rng(0).integers(-32768, 32768, (3000, 3)).astype(np.int16)
    path = write(tmp_path / "a.wav", channels / 32768, subtype=subtype)
    assert probe(path) == (3000 / RATE, RATE, 3)
    right = np.rint(channels.astype(np.float32).mean(axis=1))
    assert np.abs(read_audio(path, sample_rate=RATE) - right).max() <= 1
    doubled = read_audio(path, sample_rate=2 * RATE)
    assert np.array_equal(doubled, read_audio(path, sample_rate=2 * RATE))
    assert len(doubled) == 6000


@pytest.mark.parametrize(
    ("there", "wanted"), [(8000, 16000), (44100, 16000), (48000, 16000), (16000, 8000), (22050, 16000)]
)
def test_resampled_as_if_recorded_at_that_rate(there: int, wanted: int, tmp_path: Path) -> None:
    def sine(rate: int) -> NDArray[np.float64]:
        return 0.5 * np.sin(2 * np.pi * 440 * np.arange(rate) / rate)

    read = read_audio(write(tmp_path / "a.wav", sine(there), there), sample_rate=wanted)
    assert len(read) == wanted
    middle = slice(wanted // 10, -wanted // 10)
    assert np.abs(read / 32768 - sine(wanted))[middle].max() < 1e-3
    silence = read_audio(write(tmp_path / "0.wav", np.zeros(there), there), sample_rate=wanted)
    assert not silence.any()  # no dither


def test_long_files_are_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sound = np.stack([tone(1.0), tone(1.0, hertz=300)], axis=1)
    path = write(tmp_path / "a.flac", sound)
    at_once = read_audio(path, sample_rate=RATE)
    monkeypatch.setattr("paceline.recipes.speech.audio.file.SAMPLES_AT_ONCE", 5000)
    assert np.array_equal(read_audio(path, sample_rate=RATE), at_once)
    assert np.array_equal(read_audio(path, sample_rate=RATE, offset_s=0.5, duration_s=0.4), at_once[8000:14400])


def test_a_flac_that_does_not_say_how_long_it_is(tmp_path: Path) -> None:
    """As programs write it that cannot go back to the header."""
    sound = tone(0.5)
    path = write(tmp_path / "a.flac", sound)
    raw = bytearray(path.read_bytes())
    raw[21] &= 0xF0
    raw[22:26] = bytes(4)
    path.write_bytes(raw)
    assert soundfile.info(path).frames > 2**60
    assert probe(path).seconds == 0.5
    assert np.array_equal(read_audio(path, sample_rate=RATE), sound)
    assert np.array_equal(read_audio(path, sample_rate=RATE, offset_s=0.25), sound[4000:])
    assert check(path, 0.5) is None


def cut(path: Path, share: float) -> Path:
    raw = path.read_bytes()
    path.write_bytes(raw[: int(len(raw) * share)])
    return path


def failure(path: Path, **part: Any) -> str:
    with pytest.raises(AudioUnreadable) as caught:
        read_audio(path, sample_rate=RATE, **part)
    assert caught.value.path == path
    assert str(caught.value) == f"{path}: {caught.value.why}"
    return caught.value.why


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("share", [0.9, 0.5, 0.1, 0.002])
def test_a_truncated_file_is_an_error(kind: str, share: float, tmp_path: Path) -> None:
    path = cut(write(tmp_path / f"a.{kind}", tone(3.0)), share)
    for why in (failure(path), failure(path, duration_s=3.0), check(path, 3.0)):
        assert why is not None
        assert "truncated" in why or share < 0.01, why
    with pytest.raises(AudioUnreadable):
        measure(path)


def page_crc(page: bytes) -> int:
    """Of an Ogg page with zeros in the place of its own: polynomial 0x04c11db7, nothing reflected, starting at 0."""
    crc = 0
    for byte in page:
        crc ^= byte << 24
        for _ in range(8):
            crc = (crc << 1) ^ (0x04C11DB7 if crc & 0x80000000 else 0)
            crc &= 0xFFFFFFFF
    return crc


def test_an_ogg_whose_last_page_is_not_marked_is_whole(tmp_path: Path) -> None:
    """As programs leave it that do not know, when they write a page, that it is the last. Opus is refused by libsndfile
    itself (1.2.2) without the mark."""
    path = write(tmp_path / "a.ogg", tone(2.0))
    expected = read_audio(path, sample_rate=RATE)
    raw = bytearray(path.read_bytes())
    page = raw.rfind(b"OggS")
    assert raw[page + 5] & 4
    raw[page + 5] &= ~4
    raw[page + 22 : page + 26] = bytes(4)
    raw[page + 22 : page + 26] = struct.pack("<I", page_crc(raw[page:]))
    path.write_bytes(raw)
    assert check(path, 2.0, whole=True) is None
    assert measure(path).seconds == pytest.approx(2.0, abs=0.1)
    assert len(read_audio(path, sample_rate=RATE)) == pytest.approx(len(expected), abs=0.1 * RATE)


def test_what_is_no_audio(tmp_path: Path) -> None:
    (tmp_path / "empty.wav").touch()
    (tmp_path / "text.wav").write_text("seven\n" * 100)
    (tmp_path / "folder.wav").mkdir()
    os.mkfifo(tmp_path / "pipe.wav")
    write(tmp_path / "silent.wav", np.zeros(0))
    (tmp_path / "loop.wav").symlink_to("loop.wav")
    reasons = {
        "missing.wav": "there is no such file",
        "empty.wav": "is empty",
        "text.wav": "is not audio of a known format",
        "folder.wav": "is a folder",
        "pipe.wav": "is not a file",
        "loop.wav": "cannot be opened: Too many levels of symbolic links",
        "text.wav/a.wav": "cannot be opened: Not a directory",
        "n" * 300: "cannot be opened: File name too long",
    }
    for name, why in reasons.items():
        assert failure(tmp_path / name) == why
        assert check(tmp_path / name, 1.0) == why
        with pytest.raises(AudioUnreadable, match=why):
            probe(tmp_path / name)
    assert check(tmp_path / "silent.wav", 1.0) == "holds no samples"
    assert "ends after 0.00 s" in failure(tmp_path / "silent.wav")


def test_headers_that_lie(tmp_path: Path) -> None:
    flac = write(tmp_path / "a.flac", tone(0.5))
    raw = bytearray(flac.read_bytes())
    raw[21] |= 0x0F
    raw[22:26] = b"\xff" * 4  # 2 ** 36 - 1 samples: 128 GB
    flac.write_bytes(raw)
    tracemalloc.start()
    assert "truncated" in failure(flac)
    assert tracemalloc.get_traced_memory()[1] < 100e6
    tracemalloc.stop()
    assert "truncated" in str(check(flac, 0.5))
    wav = write(tmp_path / "a.wav", tone(0.5))
    raw = bytearray(wav.read_bytes())
    raw[24:28] = struct.pack("<I", 3)
    wav.write_bytes(raw)
    assert failure(wav) == "is damaged: it claims a sample rate of 3 Hz"
    for value in (np.nan, np.inf, 20000.0):
        loud = write(tmp_path / "b.wav", np.full(4000, value, dtype=np.float32), subtype="FLOAT")
        assert "where 1 is full scale" in failure(loud)
    streamed = write(tmp_path / "c.wav", tone(0.5))
    raw = bytearray(streamed.read_bytes())
    raw[4:8] = raw[40:44] = b"\xff" * 4
    streamed.write_bytes(raw)
    assert np.array_equal(read_audio(streamed, sample_rate=RATE), tone(0.5))


def test_less_than_was_promised(tmp_path: Path) -> None:
    path = write(tmp_path / "a.wav", tone(2.0))
    assert len(read_audio(path, sample_rate=RATE, duration_s=2.05)) == 32000  # durations are rounded
    assert failure(path, duration_s=2.5) == "ends after 2.00 s, and 2.50 s are asked for"
    assert failure(path, offset_s=1.5, duration_s=1.0) == "ends after 2.00 s, and 2.50 s are asked for"
    assert failure(path, offset_s=5.0) == "ends after 2.00 s, and 5.00 s are asked for"
    assert failure(path, offset_s=2.0, duration_s=0.05) == "ends after 2.00 s, and 2.05 s are asked for"
    assert "too short" in failure(write(tmp_path / "b.wav", np.zeros(1), 48000))


def test_nothing_stays_open(tmp_path: Path) -> None:
    good = [write(tmp_path / f"a.{kind}", tone(0.5)) for kind in FORMATS]
    bad = [cut(write(tmp_path / f"b.{kind}", tone(0.5)), 0.3) for kind in FORMATS]
    read_audio(good[0], sample_rate=8000)
    before = os.listdir("/proc/self/fd")
    for path in [*good, *bad, tmp_path, tmp_path / "no.wav"]:
        check(path, 0.5)
        for rate in (RATE, 8000):
            try:
                read_audio(path, sample_rate=rate)
            except AudioUnreadable as unreadable:
                assert path not in good
                again = pickle.loads(pickle.dumps(unreadable))  # from a worker to the trainer
                assert (str(again), again.path, again.why) == (str(unreadable), path, unreadable.why)
            else:
                assert path not in bad
    assert os.listdir("/proc/self/fd") == before
