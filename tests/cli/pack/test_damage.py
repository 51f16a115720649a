"""Packed data that was damaged after it was packed: a copy of it never passes for sound."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import yaml

from paceline.cli.main import main
from paceline.data.packed import layout
from paceline.data.packed.dataset import PackedDataset
from paceline.data.packed.reader import open_packed
from tests.recipes.speech import tiny

Shown = pytest.CaptureFixture[str]
NUMBER, HIT = 12, 7
"""Rows in the file, and the one of which bytes are overwritten, counted from 0."""
DATA = """
import torch

def rows():
    return [{"x": torch.full((50,), row), "name": f"row {row}"} for row in range(12)]
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """`train.h5` and `rows.h5`, with blocks of two or three rows."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(layout, "BLOCK_BYTES", 15_000)
    tiny.speech(tmp_path, "train", NUMBER, seed=1)
    assert main(["pack", "train.json", "train.h5"]) == 0
    monkeypatch.setattr(layout, "BLOCK_BYTES", 700)
    (tmp_path / "data.py").write_text(DATA)
    assert main(["pack", "data.py:rows", "rows.h5"]) == 0
    return tmp_path


def damage(path: str, stream: str, row: int = HIT) -> set[int]:
    """Overwrite some of a row; the rows of its block, of which nobody can say which one it is."""
    found = open_packed(Path(path)).stream(stream)
    [(file, place, _)] = found.parts()
    assert place.offset is not None
    assert place.blocks is not None
    raw = bytearray(file.read_bytes())
    at = place.offset + int(place.starts[row]) * place.step_bytes
    raw[at] ^= 255
    file.write_bytes(raw)
    block = int(np.searchsorted(place.blocks, row, side="right")) - 1
    return set(range(int(place.blocks[block]), int(place.blocks[block + 1])))


def said(capsys: Shown, *words: str, code: int = 0) -> str:
    capsys.readouterr()
    found = main(["pack", *words])
    printed = capsys.readouterr()
    assert found == code, printed
    return printed.err if code == 2 else printed.out


def names(rows: set[int]) -> str:
    return f"rows {min(rows) + 1} to {max(rows) + 1}"


@pytest.mark.parametrize("stream", ["audio", "text"])
@pytest.mark.parametrize("words", [["train.h5"], ["more.json", "train.h5"]])
def test_it_is_not_packed_again(folder: Path, capsys: Shown, stream: str, words: list[str]) -> None:
    tiny.speech(folder, "more", 3, seed=2)
    sound = [PackedDataset("train.h5")[row] for row in range(NUMBER)]
    hit = damage("train.h5", stream)
    error = said(capsys, *words, "copy.h5", code=2)
    rows = "rows 1 to 12" if stream == "text" else names(hit)
    assert f"train.h5: {rows} of stream {stream!r}: the bytes are not those that were written" in error
    assert "--bad-data skip" in error
    assert not Path("copy.h5").exists()
    if stream == "text":
        return  # all of it is one block
    out = said(capsys, *words, "copy.h5", "--bad-data", "skip")
    assert [f"skipped train.h5:{row + 1}: {rows}" in out for row in range(NUMBER)] == [
        row in hit for row in range(NUMBER)
    ]
    said(capsys, "--verify", "copy.h5")
    kept, copy = [row for row in range(NUMBER) if row not in hit], PackedDataset("copy.h5")
    first = len(copy) - len(kept)
    assert [copy[first + at]["text"] for at in range(len(kept))] == [sound[row]["text"] for row in kept]
    for at, row in enumerate(kept):
        np.testing.assert_array_equal(copy[first + at]["audio"], sound[row]["audio"])


def test_streams_that_are_not_wanted_may_be_damaged(capsys: Shown) -> None:
    damage("train.h5", "text")
    said(capsys, "train.h5", "copy.h5", "--streams", "audio")
    assert len(PackedDataset("copy.h5")) == NUMBER


@pytest.mark.parametrize("row", [0, HIT, NUMBER - 1])
def test_samples(capsys: Shown, row: int) -> None:
    """Also the first and the last, which are looked at before anything is packed."""
    sound: list[Any] = [PackedDataset("rows.h5")[each]["x"].tolist() for each in range(NUMBER)]
    hit = damage("rows.h5", "x", row)
    error = said(capsys, "rows.h5", "copy.h5", code=2)
    assert "rows.h5: row" in error
    assert "of stream 'x': the bytes are not those that were written" in error
    assert "--bad-data skip" in error
    out = said(capsys, "rows.h5", "copy.h5", "--bad-data", "skip")
    assert out.count("skipped sample ") == len(hit)
    kept = [sound[each] for each in range(NUMBER) if each not in hit]
    assert [sample["x"].tolist() for sample in PackedDataset("copy.h5")] == kept
    assert f"left out when it was packed: {len(hit)}" in said(capsys, "--info", "copy.h5")


def test_extraction(capsys: Shown) -> None:
    hit = damage("train.h5", "audio")
    error = said(capsys, "--extract", "train.h5", "wavs", code=2)
    assert f"train.h5: {names(hit)} of stream 'audio'" in error
    assert not Path("wavs/manifest.json").exists()
    out = said(capsys, "--extract", "train.h5", "wavs", "--bad-data", "skip")
    assert out.count("skipped train/") == len(hit)
    lines = tiny.lines_of(Path("wavs/manifest.json"))
    assert [line["audio_filepath"] for line in lines] == [f"train/{row}.wav" for row in range(NUMBER) if row not in hit]
    for line in lines:
        samples, _ = soundfile.read(Path("wavs") / line["audio_filepath"], dtype="int16")
        expected, _ = soundfile.read(line["audio_filepath"].replace(".wav", ".flac"), dtype="int16")
        np.testing.assert_array_equal(samples, expected)


def test_nothing_sound_is_left(capsys: Shown) -> None:
    damage("train.h5", "text")
    assert "nothing to pack" in said(capsys, "train.h5", "copy.h5", "--bad-data", "skip", code=2)
    error = said(capsys, "--extract", "train.h5", "wavs", "--bad-data", "skip", code=2)
    assert "train.h5: every row is damaged" in error


def test_what_is_advised_works(capsys: Shown) -> None:
    """By `--verify`, and by a training that finds damaged rows."""
    damage("train.h5", "audio")
    advice = "paceline pack train.h5 sound.h5 --bad-data skip"
    assert advice in said(capsys, "--verify", "train.h5", code=1)
    Path("tiny.yaml").write_text(yaml.safe_dump(tiny.PLAIN))
    train = ["train", "asr", "--train-manifest", "train.h5", "--network", "tiny.yaml", "--epochs", "1"]
    assert main([*train, "--device", "cpu"]) == 2
    assert advice in capsys.readouterr().err
    assert main(advice.split()[1:]) == 0
    said(capsys, "--verify", "sound.h5")
