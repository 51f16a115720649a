"""Long and live audio: windows read what the whole recording says, in constant memory, from files and from pipes."""

from __future__ import annotations

import io
import json
import os
import struct
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from numpy.typing import NDArray

import paceline.asr
from paceline.cli.main import main
from paceline.core.errors import InvalidData, InvalidSetting, WrongType
from paceline.recipes.speech.audio.read import read_audio
from paceline.recipes.speech.audio.trim import Loudness, bounds
from paceline.recipes.speech.network.config import read_network
from paceline.recipes.speech.network.model import AcousticModel
from paceline.recipes.speech.recognizer import Recognizer
from paceline.recipes.speech.sound.features import FeatureSettings, LogMel
from paceline.recipes.speech.streaming.sound import NotPcm, pipe_blocks
from paceline.recipes.speech.streaming.use import Windows, file_statistics, infer_live, transcribe_long
from paceline.recipes.speech.streaming.windows import Reading, Statistics
from paceline.recipes.speech.text.pieces import Pieces
from tests.commands import run_command
from tests.recipes.speech import tiny

RATE = tiny.RATE


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has learned its letters, and a long recording: many utterances in one file."""
    made = tmp_path_factory.mktemp("speech")
    tiny.speech(made, "train", 48, seed=1)
    tiny.train(tiny.settings(made, out=made / "run", **tiny.LEARN))
    random = np.random.default_rng(5)
    texts = ["".join(random.choice(tiny.LABELS[1:], 4)) for _ in range(30)]
    soundfile.write(made / "long.flac", np.concatenate([tiny.sound(text, random) for text in texts]), RATE)
    return made


@pytest.fixture(scope="module")
def recognizer(folder: Path) -> Recognizer:
    return paceline.asr.load(folder / "run", device="cpu")


def samples_of(folder: Path) -> NDArray[np.int16]:
    return soundfile.read(folder / "long.flac", dtype="int16")[0]


def edits(one: str, other: str) -> int:
    row = list(range(len(other) + 1))
    for number, letter in enumerate(one, 1):
        last, row[0] = row[0], number
        for at, against in enumerate(other, 1):
            last, row[at] = row[at], min(row[at] + 1, row[at - 1] + 1, last + (letter != against))
    return row[-1]


# -- statistics and features ---------------------------------------------------------------------------------------


def test_statistics_joined_are_those_of_all() -> None:
    values = np.random.default_rng(0).normal(3, 2, (1000, 5))
    joined = Statistics()
    for part in np.split(values, [1, 30, 400]):
        joined.add(part)
    mean, deviation = joined.values("per_feature")
    np.testing.assert_allclose(mean, values.mean(0))
    np.testing.assert_allclose(deviation, values.std(0, ddof=1) + 1e-5)
    mean, deviation = joined.values("all_features")
    np.testing.assert_allclose(mean, values.mean())
    np.testing.assert_allclose(deviation, values.std(ddof=1) + 1e-5)
    fading = Statistics(most=100)
    fading.add(values)
    fading.add(values + 10)
    assert fading.mean is not None
    assert (fading.mean > values.mean(0) + 8).all()


@pytest.mark.parametrize("front_end", ["nemo-0.11", "nemo-1.0", "nemo-2.5"])
def test_a_files_statistics_are_those_of_its_features(front_end: Any, recognizer: Recognizer) -> None:
    samples = (
        np.random.default_rng(1).standard_normal(RATE * 100 + 77) * np.linspace(100, 3000, RATE * 100 + 77)
    ).astype(np.int16)
    network = recognizer.network.model_copy(update={"features": FeatureSettings(num_mels=12, front_end=front_end)})
    model = AcousticModel(network).eval()
    found = file_statistics(model, np.array_split(samples, 50))
    energies = model.features.log_energies(torch.from_numpy(samples)).numpy()
    assert found.count == len(energies) == model.features.num_frames(len(samples))
    np.testing.assert_allclose(found.values("per_feature")[0], energies.mean(0), rtol=1e-9)
    np.testing.assert_allclose(found.values("per_feature")[1], energies.std(0, ddof=1) + 1e-5, rtol=1e-9)


def test_energies_are_those_that_are_normalized() -> None:
    front = LogMel(FeatureSettings(normalize="none", pad_to=0), 16000).eval()
    samples = torch.from_numpy((np.random.default_rng(0).standard_normal(5000) * 2000).astype(np.int16))
    whole, _ = front(samples[None], torch.tensor([5000]))
    torch.testing.assert_close(front.log_energies(samples).T.float(), whole[0], rtol=0, atol=0)


# -- text ----------------------------------------------------------------------------------------------------------


def test_words_and_times_follow_from_frames() -> None:
    labels = Pieces((" ", "a", "b"))
    reading = Reading(labels)
    blank, space, a, b = 3, 0, 1, 2
    reading.read([blank, a, a, b, blank, b], 0)
    reading.read([b, space, blank, a, blank], 6)
    assert [(labels.decode(ids), start, end) for ids, start, end in reading.words] == [("abb", 1, 7), ("a", 9, 10)]
    reading = Reading(labels, pause=3)
    reading.read([a, blank, blank, b, blank, blank, blank, b], 0)
    assert reading.text(reading.words) == "ab b"  # a pause ends a word, too
    pieces = Pieces(("▁go", "ing", "▁on"))
    reading = Reading(pieces)
    reading.read([0, 3, 1, 2, 2], 0)
    assert reading.text(reading.words) == "going on"


def test_windows_read_what_the_whole_recording_says(folder: Path, recognizer: Recognizer) -> None:
    whole = recognizer.transcribe(folder / "long.flac")[0]
    assert len(whole) > 60
    found = recognizer.transcribe_long(folder / "long.flac", window_s=2.0, overlap_s=0.5)
    assert found.text == whole
    starts = [word.start_s for word in found.words]
    assert starts == sorted(starts)
    assert found.words[-1].end_s <= len(samples_of(folder)) / RATE
    assert [word.text for word in found.words] == whole.split()


@pytest.mark.parametrize("size", [1, 100, 4000, 100_000])
def test_a_stream_does_not_depend_on_how_it_is_fed(size: int, folder: Path, recognizer: Recognizer) -> None:
    samples = samples_of(folder)[: RATE * 8 if size > 1 else RATE // 2]
    wanted = recognizer.stream(chunk_s=0.5, lookahead_s=0.5, overlap_s=1.0)
    wanted.feed(samples)
    text = wanted.finish()
    listener = recognizer.stream(chunk_s=0.5, lookahead_s=0.5, overlap_s=1.0)
    seen = [""]
    for start in range(0, len(samples), size):
        told = listener.feed(samples[start : start + size])
        assert listener.final.startswith(seen[-1])  # what is final stays
        assert told == f"{listener.final} {listener.partial}".strip()
        seen.append(listener.final)
    assert listener.finish() == text


def test_a_stream_hears_nearly_what_the_whole_says(folder: Path, recognizer: Recognizer) -> None:
    whole = recognizer.transcribe(folder / "long.flac")[0]
    listener = recognizer.stream(chunk_s=0.5, lookahead_s=0.5, overlap_s=2.0)
    listener.feed(samples_of(folder))
    assert edits(listener.finish(), whole) <= 0.1 * len(whole)
    assert listener.latency_s == pytest.approx(1.0, abs=0.05)


def test_nothing_and_little(recognizer: Recognizer) -> None:
    for number in (0, 1, 100):
        listener = recognizer.stream()
        listener.feed(np.zeros(number, np.int16))
        assert listener.finish() == ""


def test_streams_take_what_whole_recordings_are_given_as(folder: Path, recognizer: Recognizer) -> None:
    samples = samples_of(folder)[: 4 * RATE]
    texts = set()
    for audio in (samples, samples / 32768, torch.from_numpy(samples)):
        listener = recognizer.stream()
        listener.feed(audio)
        texts.add(listener.finish())
        assert recognizer.transcribe(audio) == recognizer.transcribe([samples])
    assert len(texts) == 1
    for wrong in (samples[None], samples.astype(np.int32), samples * np.nan, [1, 2], None):
        with pytest.raises((WrongType, InvalidData)):
            recognizer.stream().feed(wrong)  # type: ignore[arg-type]
        with pytest.raises((WrongType, InvalidData)):
            recognizer.transcribe(wrong)  # type: ignore[arg-type]
    for lengths in ({"chunk_s": 0.0}, {"overlap_s": -1.0}, {"lookahead_s": float("nan")}, {"pause_s": float("inf")}):
        with pytest.raises(InvalidSetting, match=next(iter(lengths))):
            recognizer.stream(**lengths)
    with pytest.raises(InvalidSetting, match="window_s"):
        recognizer.transcribe_long(folder / "long.flac", window_s=-1.0)
    with pytest.raises(InvalidSetting, match="norm"):
        recognizer.stream(norm="file")  # type: ignore[arg-type]


@pytest.mark.parametrize("factor", [4, 8])
def test_a_conformer_streams_as_well(factor: int) -> None:
    """Frames of a window are frames of the whole: with all of the audio in one window, the text is the same."""
    conformer = {"d_model": 16, "n_layers": 2, "n_heads": 2, "subsampling_factor": factor}
    network = read_network({"conformer": conformer, "labels": [" ", "a", "b"], "features": {"num_mels": 16}})
    torch.manual_seed(0)
    recognizer = Recognizer(AcousticModel(network), network)
    samples = (np.random.default_rng(0).standard_normal(16000 * 3) * 3000).astype(np.int16)
    one = recognizer.stream(chunk_s=10.0)
    one.feed(samples)
    assert one.finish() == recognizer.transcribe(samples)[0]
    listener = recognizer.stream(chunk_s=0.4, lookahead_s=0.4)
    listener.feed(samples)
    listener.finish()
    assert listener.unit == factor * 160
    assert listener.heard_s == pytest.approx(3.0, abs=0.1)


def test_memory_does_not_grow_with_the_recording(tmp_path: Path, recognizer: Recognizer) -> None:
    used = []
    for minutes in (2, 8):
        with soundfile.SoundFile(tmp_path / "x.wav", "w", RATE, 1, "PCM_16") as file:
            for _ in range(minutes):
                file.write((np.random.default_rng(0).standard_normal(60 * RATE) * 1000).astype(np.int16))
        tracemalloc.start()
        transcribe_long(recognizer.model, recognizer.labels, tmp_path / "x.wav", Windows(10.0, 1.0))
        used.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert used[1] < 1.3 * used[0] + 1_000_000


def test_silence_of_long_files_is_trimmed_as_of_others(folder: Path, recognizer: Recognizer, tmp_path: Path) -> None:
    """Also of a stream that is heard piece by piece: exactly where the whole recording is cut."""
    random = np.random.default_rng(0)
    for number in (0, 1, 511, 512, 2048, 2049, 30_001):
        samples = (random.standard_normal(number) * 3000).astype(np.int16)
        samples[: number // 3] = samples[number - number // 4 :] = 0
        heard = Loudness()
        for part in np.array_split(samples, 7):
            heard.add(part)
        assert heard.bounds() == bounds(samples)
    network = recognizer.network.model_copy(update={"trim_silence": "all"})
    trimming = Recognizer(recognizer.model, network)
    silence = np.zeros(3 * RATE, np.int16)
    sound = (samples_of(folder) // 4)[: 10 * RATE]
    sound[:4] = 20000  # loud, so that silence is told from it
    soundfile.write(tmp_path / "x.flac", np.concatenate([silence, sound, silence]), RATE)
    whole = trimming.transcribe(tmp_path / "x.flac")[0]
    long = trimming.transcribe_long(tmp_path / "x.flac", window_s=2.0, overlap_s=0.5)
    assert long.text == whole
    assert long.text != recognizer.transcribe_long(tmp_path / "x.flac", window_s=2.0, overlap_s=0.5).text
    assert 2.8 < long.words[0].start_s < long.words[-1].end_s < 13.2  # in the file
    ((short,),) = trimming.hypotheses(tmp_path / "x.flac")
    samples = read_audio(tmp_path / "x.flac", sample_rate=RATE)
    first, end = bounds(samples)
    ((cut,),) = recognizer.hypotheses(samples[first:end])
    begin = first / RATE
    assert begin > 2.8
    assert [(word.text, word.start, word.end) for word in short.words] == [
        (word.text, pytest.approx(word.start + begin), pytest.approx(word.end + begin)) for word in cut.words
    ]


# -- pipes ---------------------------------------------------------------------------------------------------------


def wav(samples: NDArray[Any], rate: int, channels: int = 1, bits: int = 16, length: int = 0xFFFFFFFF) -> bytes:
    """A header as a program writes it that does not know the length yet."""
    form = struct.pack("<HHIIHH", 1, channels, rate, rate * 2 * channels, 2 * channels, bits)
    data = b"data" + struct.pack("<I", length) + samples.tobytes()
    return b"RIFF\xff\xff\xff\xffWAVEfmt " + struct.pack("<I", 16) + form + data


def test_what_follows_the_samples_of_a_wav_is_not_heard() -> None:
    samples = (np.random.default_rng(0).standard_normal(5001) * 3000).astype(np.int16)
    chunks = b"LIST\x05\0\0\0INFO?\0" + b"id3 \x04\0\0\0\x01\x02\x03\x04"
    known = wav(samples, RATE, length=samples.nbytes)

    def heard(raw: bytes, rate: int | None = None) -> NDArray[np.int16]:
        return np.concatenate(list(pipe_blocks(io.BytesIO(raw), RATE, rate)))

    for raw in (known, known + chunks, known + chunks[:-3], known + b"LIST\xff\xff\xff\xff?"):
        np.testing.assert_array_equal(heard(raw), samples)
    for length in (0, 0x7FFFF000, 0xFFFFFFFF):  # the header does not know: to the end
        np.testing.assert_array_equal(heard(wav(samples, RATE, length=length)), samples)
    np.testing.assert_array_equal(heard(known[:-100]), samples[:-50])
    np.testing.assert_array_equal(heard(known + chunks + known), np.tile(samples, 2))
    odd = np.frombuffer(samples.tobytes()[:-1], np.uint8)
    np.testing.assert_array_equal(heard(wav(odd, RATE, length=len(odd)) + b"\0" + chunks), samples[:-1])
    junk = known[:12] + b"JUNK" + struct.pack("<I", 1 << 20) + bytes(1 << 20) + known[12:]
    np.testing.assert_array_equal(heard(junk), samples)
    np.testing.assert_array_equal(heard(known, RATE), samples)
    with pytest.raises(NotPcm, match="is a WAV of 8000 Hz, and `--rate` says 16000"):
        heard(known, 16000)


def test_pipes_of_samples_and_of_wavs() -> None:
    samples = (np.random.default_rng(0).standard_normal(5000) * 3000).astype(np.int16)
    for raw in (samples.tobytes(), samples.tobytes() + b"\0", wav(samples, RATE)):
        heard = np.concatenate(list(pipe_blocks(io.BytesIO(raw), RATE, None)))
        np.testing.assert_array_equal(heard, samples)
    stereo = np.stack([samples, samples], 1)
    np.testing.assert_array_equal(
        np.concatenate(list(pipe_blocks(io.BytesIO(wav(stereo, RATE, 2)), RATE, None))), samples
    )
    twice = np.concatenate(list(pipe_blocks(io.BytesIO(samples.tobytes()), 16000, 8000)))
    assert len(twice) == pytest.approx(10000, abs=20)
    mp3, mp4 = b"\xff\xfb\x90\x64" + bytes(100), b"\0\0\0\x20ftypM4A " + bytes(100)
    for wrong in (b"", b"fLaC" + bytes(100), mp3, mp4, wav(samples, RATE, bits=24), wav(samples, RATE)[:30]):
        with pytest.raises(NotPcm):
            list(pipe_blocks(io.BytesIO(wrong), RATE, None))


def test_lines_of_json_and_an_interruption(folder: Path, recognizer: Recognizer) -> None:
    class Interrupted(io.BytesIO):
        def read1(self, size: int | None = -1, /) -> bytes:
            data = super().read1(4000)
            if not data:
                raise KeyboardInterrupt
            return data

    samples = samples_of(folder)[: 6 * RATE]
    out = io.StringIO()
    text = infer_live(recognizer.stream(), Interrupted(samples.tobytes()), out, rate=None, as_json=True, screen=False)
    lines = [json.loads(line) for line in out.getvalue().splitlines()]
    assert lines[-1] == {"text": text}
    words = [word["word"] for line in lines[:-1] for word in line["final"]]
    assert " ".join(words) == text
    assert any(line["partial"] for line in lines[:-1])
    for screen in (True, False):
        out = io.StringIO()
        infer_live(recognizer.stream(), io.BytesIO(samples.tobytes()), out, rate=None, as_json=False, screen=screen)
        assert text.split()[-1] in out.getvalue()


def test_commands(folder: Path, recognizer: Recognizer, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run, long = str(folder / "run"), str(folder / "long.flac")
    words = ["infer", run, long, "--device", "cpu", "--long-s", "5", "--window-s", "4", "--overlap-s", "1"]
    assert main(words) == 0
    whole = recognizer.transcribe(long)[0]
    assert capfd.readouterr().out == f"{long}\t{whole}\n"
    assert main([*words, "--json", "--out", str(tmp_path / "out.jsonl")]) == 0
    line = json.loads((tmp_path / "out.jsonl").read_text())
    assert (line["prediction"], len(line["words"])) == (whole, len(whole.split()))
    capfd.readouterr()
    assert main([*words, "--decoder", "beam"]) == 2
    said = capfd.readouterr().err
    assert "--decoder greedy" in said
    assert "--long-s" in said
    two = run_command([*words, "--procs", "2"])
    assert (two.code, two.out) == (2, "")
    assert two.err.count("one rank does alone; there are 2") == 1
    assert "leave out `--procs`" in two.err
    assert main([*words, "--out", "/dev/full"]) == 2
    assert capfd.readouterr().err.endswith(
        "error: /dev/full cannot be written: No space left on device\n"
        "  what was predicted so far is in it: make room, or choose another `--out`\n"
    )
    raw = samples_of(folder)[: 5 * RATE].tobytes()
    command = [sys.executable, "-m", "paceline", "infer", run, "-", "--device", "cpu"]
    told = subprocess.run(
        command, input=raw, capture_output=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert told.returncode == 0, told.stderr.decode()
    listener = recognizer.stream()
    listener.feed(np.frombuffer(raw, np.int16))
    assert told.stdout.decode().strip() == listener.finish()
