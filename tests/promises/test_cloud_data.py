"""Manifests, audio and packed files at addresses are what they are in a folder, and are brought once."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from paceline import PackedDataset
from paceline.cli.main import main
from paceline.core.cloud.file_copy import bring
from paceline.recipes.speech.audio.read import read_audio
from paceline.recipes.speech.manifest.read import read_manifests
from tests.shelf import Shelf

soundfile = pytest.importorskip("soundfile")


@pytest.fixture
def shelf(tmp_path, monkeypatch):
    monkeypatch.setenv("SHELF", str(tmp_path / "shelf"))
    monkeypatch.setenv("PACELINE_COPIES", str(tmp_path / "copies"))
    Shelf.faults, Shelf.log, Shelf.kills_at = [], [], 0
    (tmp_path / "shelf").mkdir()
    return tmp_path / "shelf"


def write_clips(folder, number: int) -> list[np.ndarray]:
    clips = [(np.arange(4000, dtype=np.int16) * (place + 1)) % 999 for place in range(number)]
    lines = []
    for place, clip in enumerate(clips):
        soundfile.write(folder / f"clip{place}.wav", clip, 16000, subtype="PCM_16")
        lines.append({"audio_filepath": f"clip{place}.wav", "duration": 0.25, "text": f"word {place}"})
    (folder / "train.json").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return clips


def test_packed_samples_at_an_address(shelf, tmp_path, monkeypatch):
    samples = [torch.arange(place + 1, dtype=torch.float32, device="cpu") for place in range(5)]
    PackedDataset.write("shelf://data/numbers.h5", samples)
    assert (shelf / "data/numbers.h5").is_file()
    monkeypatch.setenv("PACELINE_COPIES", str(tmp_path / "another machine"))
    read = PackedDataset("shelf://data/numbers.h5")
    assert all(torch.equal(read[place], sample) for place, sample in enumerate(samples))
    PackedDataset.write("shelf://data/numbers.h5", samples[:2], force=True)
    monkeypatch.setenv("PACELINE_COPIES", str(tmp_path / "copies"))
    bring(tmp_path / "copies/shelf/data/numbers.h5")  # as a process that starts does
    assert len(PackedDataset("shelf://data/numbers.h5")) == 2  # not the copy of before


def test_a_manifest_at_an_address_and_its_audio(shelf, tmp_path):
    clips = write_clips(shelf, 3)
    manifest, _ = read_manifests(["shelf://train.json"])
    assert len(manifest) == 3
    assert not list((tmp_path / "copies").rglob("*.wav"))  # audio is brought when it is read
    path = tmp_path / "copies/shelf/clip1.wav"
    assert np.array_equal(read_audio(path, sample_rate=16000), clips[1])
    assert [file.name for file in (tmp_path / "copies").rglob("*.wav")] == ["clip1.wav"]
    write_clips(shelf, 2)
    assert len(read_manifests(["shelf://train.json"])[0]) == 2  # a manifest that has changed is brought anew


def test_packing_from_an_address_to_another(shelf, tmp_path, capsys):
    clips = write_clips(shelf, 3)
    assert main(["pack", "shelf://train.json", "shelf://packed/train.h5", "--processes", "1"]) == 0
    assert "shelf://packed/train.h5: 3 rows" in capsys.readouterr().out
    assert (shelf / "packed/train.h5").is_file()
    assert main(["pack", "--verify", "shelf://packed/train.h5"]) == 0
    packed = PackedDataset("shelf://packed/train.h5")
    assert np.array_equal(np.asarray(packed[1]["audio"]).ravel(), clips[1])


def test_copies_that_cannot_be_written_are_said(shelf, capsys, monkeypatch):
    monkeypatch.setenv("PACELINE_COPIES", "/dev/null/copies")
    assert main(["pack", "shelf://none.json", "shelf://packed/train.h5"]) == 2
    said = capsys.readouterr().err
    assert "/dev/null/copies cannot be written" in said
    assert "PACELINE_COPIES" in said


def test_a_file_that_is_not_there_is_said_by_its_address(shelf, capsys):
    assert main(["pack", "shelf://none.json", "shelf://packed/train.h5"]) == 2
    assert "shelf://none.json" in capsys.readouterr().err
