"""A trained model in any program: what it hears is what `paceline infer` prints, whatever it is given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch

import paceline.asr
import paceline.recipes.speech.recognizer as recognizer_module
from paceline.core.errors import InvalidData, InvalidSetting, PacelineError, WrongType
from paceline.recipes.speech.data.inputs import InputsUnreadable
from paceline.recipes.speech.exchange.export import write_export
from paceline.recipes.speech.recognizer import NotSpeech, Recognizer, _batches
from paceline.train import apply
from paceline.train.loop import train
from tests.recipes.speech import tiny
from tests.train.small import SmallTask, alone, opened


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("speech")
    tiny.speech(made, "train", 48, seed=1)
    tiny.speech(made, "dev", 9, seed=2)
    tiny.train(tiny.settings(made, out=made / "run", ema=0.5, **tiny.LEARN))
    return made


@pytest.fixture(scope="module")
def recognizer(folder: Path) -> Recognizer:
    return paceline.asr.load(folder / "run", device="cpu")


def paths(folder: Path) -> list[Path]:
    return [folder / "dev" / f"{row}.flac" for row in range(9)]


def test_it_hears_what_inference_predicts(folder: Path, recognizer: Recognizer) -> None:
    config = tiny.settings(folder, **tiny.LEARN)
    predicted = list(apply.predict_run(tiny.task(), config, alone(), folder / "run"))
    heard = recognizer.transcribe(paths(folder))
    assert heard == [str(text) for _, text in predicted]
    assert len(set(heard)) > 1
    assert recognizer.transcribe([str(path) for path in paths(folder)][::-1]) == heard[::-1]


def test_arrays_are_heard_as_their_files(folder: Path, recognizer: Recognizer) -> None:
    heard = recognizer.transcribe(paths(folder))
    whole = [soundfile.read(path, dtype="int16")[0] for path in paths(folder)]
    assert recognizer.transcribe(whole) == heard
    floats = [samples.astype(np.float32) / 32768 for samples in whole]
    assert recognizer.transcribe(floats) == heard
    assert recognizer.transcribe(floats[3].astype(np.float64)) == heard[3:4]
    locked = whole[0].copy()
    locked.flags.writeable = False
    assert recognizer.transcribe([locked, np.repeat(whole[1], 2)[::2]]) == heard[:2]
    assert recognizer.transcribe(paths(folder)[0]) == heard[:1]
    assert recognizer.transcribe([]) == []
    assert recognizer.transcribe(np.zeros(0, np.int16)) == [""]


def test_floats_are_scaled_exactly(recognizer: Recognizer) -> None:
    """Full scale in half precision too, where 32768 times it is no number."""
    for dtype in (np.float16, np.float32, np.float64):
        scaled = recognizer._samples(np.array([-1.0, -0.5, 0.0, 0.25, 1.0, 2.0], dtype))[0]
        assert scaled.tolist() == [-32768, -16384, 0, 8192, 32767, 32767]


@pytest.mark.parametrize(
    "array",
    [
        np.zeros((2, 100), np.int16),
        np.zeros(100, np.int32),
        np.zeros(100, bool),
        np.array(["a"]),
        np.array([0.0, np.nan]),
    ],
)
def test_other_arrays_are_refused(recognizer: Recognizer, array: Any) -> None:
    with pytest.raises((WrongType, InvalidData)) as caught:
        recognizer.transcribe([array])
    assert str(array.dtype) in str(caught.value)


def test_all_that_cannot_be_read_is_said_before_anything_is_transcribed(
    folder: Path, tmp_path: Path, recognizer: Recognizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "empty.wav").touch()
    monkeypatch.setattr(recognizer.model, "forward", None)
    with pytest.raises(InputsUnreadable) as caught:
        recognizer.transcribe([folder / "dev" / "0.flac", tmp_path / "empty.wav", str(tmp_path / "gone.flac")])
    assert str(caught.value).startswith("2 recordings cannot be used\n")
    assert "empty.wav: is empty" in str(caught.value)
    assert "gone.flac: there is no such file" in str(caught.value)
    assert "--bad-data" not in caught.value.hint


def test_no_more_than_a_batch_is_in_memory(
    folder: Path, recognizer: Recognizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    transcribe = recognizer._listen
    monkeypatch.setattr(recognizer_module, "BATCH_SECONDS", 0.01)  # each recording is a batch of its own
    read = recognizer_module.read_audio
    monkeypatch.setattr(recognizer_module, "read_audio", lambda *a, **b: order.append("read") or read(*a, **b))
    monkeypatch.setattr(recognizer, "_listen", lambda audio: order.append("heard") or transcribe(audio))
    recognizer.transcribe(paths(folder))
    assert order == ["read", "heard"] * 9


@pytest.mark.parametrize(
    ("given", "what", "hint"),
    [
        ({"decoder": "beem"}, "`decoder` is 'beem'", "greedy, beam"),
        ({"decoder": "beam", "beam_width": 0}, "`beam_width` is 0", "1 or more"),
        ({"device": "gpu"}, "`device` is 'gpu'", "auto, cpu, cuda"),
        ({"device": "cuda"}, "`device` is 'cuda', but torch finds no GPU", "cpu"),
    ],
)
def test_choices_that_cannot_be(
    folder: Path, monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], what: str, hint: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InvalidSetting) as caught:
        paceline.asr.load(folder / "run", **given)
    assert str(caught.value).startswith(what)
    assert hint in caught.value.hint


@pytest.mark.parametrize(
    ("given", "hint"),
    [({"chunk_s": 0}, "above 0"), ({"lookahead_s": -1.0}, "at least 0"), ({"norm": "file"}, "running, window")],
)
def test_streams_that_would_stand_still(recognizer: Recognizer, given: dict[str, Any], hint: str) -> None:
    ((name, value),) = given.items()
    with pytest.raises(InvalidSetting, match=f"`{name}` is {value!r}") as caught:
        recognizer.stream(**given)
    assert hint in caught.value.hint


def test_beam(folder: Path) -> None:
    found = paceline.asr.load(folder / "run", device="cpu", decoder="beam", beam_width=8).transcribe(paths(folder))
    config = tiny.settings(folder, **tiny.LEARN, decoder="beam", beam_width=8)
    predicted = list(apply.predict_run(tiny.task(), config, alone(), folder / "run"))
    assert found == [str(text) for _, text in predicted]


def test_an_exported_folder_hears_the_same(folder: Path, tmp_path: Path, recognizer: Recognizer) -> None:
    weights = recognizer.model.state_dict()
    write_export(tmp_path / "model", recognizer.network, weights, {})
    again = paceline.asr.load(tmp_path / "model", device="cpu")
    assert again.transcribe(paths(folder)) == recognizer.transcribe(paths(folder))
    assert all(torch.equal(tensor, weights[name]) for name, tensor in again.model.state_dict().items())


def test_a_run_of_another_task_and_no_run_are_refused(tmp_path: Path) -> None:
    train(opened(SmallTask(), tmp_path / "small", epochs=1))
    with pytest.raises(NotSpeech, match="is a run of the task SmallTask"):
        paceline.asr.load(tmp_path / "small")
    with pytest.raises(PacelineError, match="there is no such folder"):
        paceline.asr.load(tmp_path / "absent")
    with pytest.raises(PacelineError, match="there is no such file"):
        paceline.asr.load(tmp_path / "absent.nemo")


def test_batches_hold_each_recording_once_and_little_padding() -> None:
    lengths = np.random.default_rng(1).integers(1, 400, 100).tolist()
    batches = _batches(lengths, 1000)
    assert sorted(place for batch in batches for place in batch) == list(range(100))
    for batch in batches:
        assert len(batch) == 1 or max(lengths[place] for place in batch) * len(batch) <= 1000
