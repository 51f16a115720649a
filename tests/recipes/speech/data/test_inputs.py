"""What is named to be transcribed: files, folders and manifests, in their order; all that cannot be used at once."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import soundfile

from paceline.core.errors import NotFound
from paceline.recipes.speech.data.inputs import InputsUnreadable, open_inputs
from paceline.recipes.speech.data.padding import collate
from paceline.recipes.speech.data.utterances import Utterances
from paceline.recipes.speech.manifest.read import NotAManifest
from tests.recipes.speech import tiny


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny.speech(tmp_path, "dev", 3, seed=1)
    (tmp_path / "many" / "inner").mkdir(parents=True)
    for name in ("b.wav", "a.flac", "inner/c.ogg"):
        soundfile.write(tmp_path / "many" / name, np.zeros(4000, np.int16), tiny.RATE)
    (tmp_path / "many" / "notes.txt").write_text("no audio")
    return tmp_path


def opened(*words: object, skip_bad: bool = False, check_audio: bool = True) -> tuple[Utterances, list[str]]:
    said: list[str] = []
    data = open_inputs(
        [str(word) for word in words], tiny.RATE, skip_bad=skip_bad, check_audio=check_audio, say=said.append
    )
    return data, said


def test_files_folders_and_manifests_come_in_their_order(folder: Path) -> None:
    one = folder / "dev" / "2.flac"
    data, said = opened(one, folder / "many", folder / "dev.json", one)
    many = [folder / "many" / name for name in ("a.flac", "b.wav", "inner/c.ogg")]
    assert data.names == [
        str(path) for path in [one, *many, *(folder / "dev" / f"{row}.flac" for row in range(3)), one]
    ]
    assert said == []
    for index, name in enumerate(data.names):
        samples = soundfile.read(name, dtype="int16")[0] if name.endswith("flac") else None
        utterance = data[index]
        assert len(utterance.text) == 0
        assert samples is None or np.array_equal(utterance.audio, samples)


def test_a_part_of_a_file_is_only_that_part(folder: Path) -> None:
    part = {"audio_filepath": "dev/0.flac", "offset": 0.1, "duration": 0.2, "text": ""}
    data, _ = opened(tiny.manifest(folder / "parts.json", [part]))
    whole = soundfile.read(folder / "dev" / "0.flac", dtype="int16")[0]
    assert np.array_equal(data[0].audio, whole[800:2400])


def test_everything_that_cannot_be_used_is_said_at_once(folder: Path) -> None:
    (folder / "many" / "empty.wav").touch()
    line = tiny.lines_of(folder / "dev.json")[0]
    mixed = tiny.manifest(folder / "mixed.json", [line, "{", {**line, "audio_filepath": "gone.flac"}])
    words = (folder / "absent.flac", folder / "many", mixed, folder / "many" / "notes.txt")
    with pytest.raises(InputsUnreadable) as caught:
        opened(*words)
    message = str(caught.value)
    assert message.startswith("5 recordings cannot be used\n")
    for what in (
        "absent.flac: there is no such file",
        "empty.wav: is empty",
        "mixed.json:2: is not JSON",
        "mixed.json:3: ",
        "notes.txt: is not audio",
    ):
        assert what in message
    assert "--bad-data skip" in caught.value.hint

    data, said = opened(*words, skip_bad=True)
    assert [Path(name).name for name in data.names] == ["a.flac", "b.wav", "c.ogg", "0.flac"]
    assert len(said) == 5
    assert all(line.startswith("skipped ") for line in said)


def test_nothing_left_is_an_error_whatever_is_skipped(folder: Path) -> None:
    with pytest.raises(InputsUnreadable, match="1 recording cannot be used") as caught:
        opened(folder / "absent.flac", skip_bad=True)
    assert "--bad-data" not in caught.value.hint
    with pytest.raises(InputsUnreadable, match="only.json:1"):
        opened(tiny.manifest(folder / "only.json", ["{"]), skip_bad=True)


def test_words_that_lead_nowhere(folder: Path) -> None:
    (folder / "nothing").mkdir()
    with pytest.raises(NotFound, match="there is no audio in this folder"):
        opened(folder / "nothing")
    with pytest.raises(NotAManifest, match="there is no such file"):
        opened(folder / "absent.json")


def test_audio_of_a_manifest_need_not_be_looked_at(folder: Path) -> None:
    gone = {"audio_filepath": "gone.flac", "duration": 1.0, "text": ""}
    data, _ = opened(tiny.manifest(folder / "gone.json", [gone]), check_audio=False)
    assert len(data) == 1


@pytest.mark.parametrize("trim", [False, True])
def test_the_silence_that_was_cut_off_is_known(tmp_path: Path, trim: bool) -> None:
    """Times of words count from the beginning of the file, as of long ones."""
    sound = (np.random.default_rng(0).standard_normal(tiny.RATE) * 3000).astype(np.int16)
    soundfile.write(tmp_path / "a.flac", np.concatenate([np.zeros(2 * tiny.RATE, np.int16), sound]), tiny.RATE)
    soundfile.write(tmp_path / "b.flac", sound, tiny.RATE)
    words = [str(tmp_path / f"{name}.flac") for name in "ab"]
    data = open_inputs(words, tiny.RATE, skip_bad=False, check_audio=True, say=print, trim=trim)
    begins = collate([data[0], data[1]])["begins"]
    assert begins[1] == 0.0
    assert 1.8 < begins[0] <= 2.0 if trim else begins[0] == 0.0
    assert len(data[0].audio) + begins[0] * tiny.RATE == 3 * tiny.RATE
