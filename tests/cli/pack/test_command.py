"""`paceline pack` as it is typed."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch

from paceline.cli.main import main
from paceline.data.packed.dataset import PackedDataset
from paceline.data.packed.reader import open_packed
from tests.recipes.speech import tiny

Shown = pytest.CaptureFixture[str]
TASK = """
import torch
import paceline

class Settings(paceline.TrainConfig):
    number: int = 9

class Own(paceline.Task):
    Settings = Settings

    def train_data(self):
        return [(torch.full((row + 1, 2), row), torch.tensor(row % 3)) for row in range(self.settings.number)]

    def val_data(self):
        return {"dev": [{"x": torch.tensor([1.5])}]}

def squares():
    return [torch.tensor([row * row]) for row in range(5)]

CUBES = [{"cube": row ** 3} for row in range(4)]

class Endless(paceline.Task):
    def train_data(self):
        return iter(())
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    tiny.speech(tmp_path, "train", 12, seed=1)
    (tmp_path / "own.py").write_text(TASK)
    return tmp_path


def lines_of(path: str) -> list[dict[str, Any]]:
    return tiny.lines_of(Path(path))


def shown(capsys: Shown, *words: str, code: int = 0) -> str:
    capsys.readouterr()
    found = main(["pack", *words])
    printed = capsys.readouterr()
    assert found == code, printed.err
    assert "paceline/" not in printed.err, "no frames of ours"
    return printed.err if code == 2 else printed.out


def test_a_manifest_there_and_back(folder: Path, capsys: Shown) -> None:
    out = shown(capsys, "train.json", "train.h5", "--shard-size", "50kB")
    assert out.splitlines()[-1].startswith("train.h5: 12 rows, 115.0 kB in ")
    assert out.endswith("shards, written and compared\n")
    assert shown(capsys, "--extract", "train.h5", "wavs") == "wavs/manifest.json: 12 rows\n"
    for before, after in zip(tiny.lines_of(Path("train.json")), tiny.lines_of(Path("wavs/manifest.json")), strict=True):
        assert (before["text"], before["duration"]) == (after["text"], after["duration"])
        assert after["audio_filepath"] == before["audio_filepath"].replace(".flac", ".wav")
        samples, rate = soundfile.read(Path("wavs") / after["audio_filepath"], dtype="int16")
        np.testing.assert_array_equal(samples, soundfile.read(before["audio_filepath"], dtype="int16")[0])
        assert rate == tiny.RATE
    assert main(["manifest", "stats", "wavs/manifest.json", "--check"]) == 0
    assert main(["manifest", "stats", "train.h5", "--check"]) == 0
    assert "is not an empty folder" in shown(capsys, "--extract", "train.h5", "wavs", code=2)


@pytest.mark.parametrize("layout", ["paceline", "returnn"])
def test_other_keys_of_a_manifest_are_kept(folder: Path, capsys: Shown, layout: str) -> None:
    """Through packing, packing again beside lines without them, and extraction: a split by speaker can follow."""
    lines = [
        {**line, "speaker": f"é{row % 4}", "more": {"of": [row]}} for row, line in enumerate(lines_of("train.json"))
    ]
    tiny.manifest(folder / "named.json", lines)
    tiny.speech(folder, "plain", 2, seed=3)
    shown(capsys, "named.json", "a.h5", "--shard-size", "50kB", "--layout", layout)
    shown(capsys, "plain.json", "a.h5", "b.h5", "--start-seq", "1")
    shown(capsys, "--extract", "b.h5", "wavs")
    found = lines_of("wavs/manifest.json")
    assert [(line.get("speaker"), line.get("more")) for line in found] == [
        (None, None),
        *((line["speaker"], line["more"]) for line in lines),
    ]
    shown(capsys, "--extract", "a.h5", "all")
    assert main(["manifest", "split", "all/manifest.json", "--by", "speaker", "--parts", "train=0.5,val=0.5"]) == 0
    parts = [{line["speaker"] for line in lines_of(f"all/manifest-{part}.json")} for part in ("train", "val")]
    assert parts[0] | parts[1] == {"é0", "é1", "é2", "é3"}
    assert not parts[0] & parts[1]


def test_other_keys_that_are_damaged_are_found_out(folder: Path, capsys: Shown) -> None:
    lines = [{**line, "speaker": "anna"} for line in lines_of("train.json")]
    tiny.manifest(folder / "named.json", lines)
    shown(capsys, "named.json", "a.h5")
    Path("a.h5").write_bytes(Path("a.h5").read_bytes().replace(b'"anna"', b'"anne"', 1))
    assert "its index is not the one that was written" in shown(capsys, "--info", "a.h5", code=2)


def test_a_shard_that_is_missing(folder: Path, capsys: Shown) -> None:
    shown(capsys, "train.json", "train.h5", "--shard-size", "50kB")
    first, second = sorted(folder.glob("train-*.h5"))
    second.unlink()
    error = shown(capsys, "--info", "train.h5", code=2)
    assert f"{second.name}: there is no such file, and it is shard 2 of 2 of train.h5" in error
    assert "put it back beside train.h5" in error
    assert first.name not in error, "another shard is not what was meant"


def test_rows_and_streams(folder: Path, capsys: Shown) -> None:
    """`--end-seq` names the last row, as in RETURNN's hdf_dump."""
    shown(capsys, "train.json", "a.h5", "--start-seq", "3", "--end-seq", "5", "--streams", "text")
    data = PackedDataset("a.h5")
    assert [data[row] for row in range(len(data))] == [
        {"text": line["text"]} for line in tiny.lines_of(Path("train.json"))[3:6]
    ]
    shown(capsys, "train.json", "b.h5", "--streams", "audio")
    assert PackedDataset("b.h5")[0].keys() == {"audio"}
    error = shown(capsys, "train.json", "c.h5", "--start-seq", "12", code=2)
    assert "rows are counted from 0 to 11" in error


def test_packed_files_and_manifests_together(folder: Path, capsys: Shown) -> None:
    tiny.speech(folder, "more", 3, seed=2)
    shown(capsys, "train.json", "train.h5", "--layout", "returnn")
    shown(capsys, "train.h5,more.json", "all.h5")
    shown(capsys, "train.json", "more.json", "expected.h5")
    found, expected = PackedDataset("all.h5"), PackedDataset("expected.h5")
    assert len(found) == 15
    for row in range(15):
        assert torch.equal(found[row]["audio"], expected[row]["audio"])
        assert found[row]["text"] == expected[row]["text"]


def test_a_task(folder: Path, capsys: Shown) -> None:
    shown(capsys, "own.py:Own", "own.h5", "--processes", "2")
    data = PackedDataset("own.h5")
    assert len(data) == 9
    assert [tuple(data[row][0].shape) for row in range(9)] == [(row + 1, 2) for row in range(9)]
    assert [data[row][1].item() for row in range(9)] == [row % 3 for row in range(9)]
    shown(capsys, "own.py:Own", "dev.h5", "--part", "dev")
    assert PackedDataset("dev.h5")[0]["x"].tolist() == [1.5]
    Path("own.yaml").write_text("number: 4\n")  # how long to train does not matter here
    shown(capsys, "own.py:Own", "four.h5", "--task-config", "own.yaml")
    assert len(PackedDataset("four.h5")) == 4
    shown(capsys, "--extract", "four.h5", "arrays")
    lines = [json.loads(line) for line in Path("arrays/manifest.json").read_text().splitlines()]
    assert [line["tag"] for line in lines] == ["seq-0", "seq-1", "seq-2", "seq-3"]
    with np.load(Path("arrays") / lines[2]["file"]) as arrays:
        np.testing.assert_array_equal(arrays["0"], np.full((3, 2), 2))


def test_a_data_set(folder: Path, capsys: Shown) -> None:
    shown(capsys, "own.py:squares", "squares.h5")
    assert [value.item() for value in PackedDataset("squares.h5")] == [0, 1, 4, 9, 16]
    shown(capsys, "own.py:CUBES", "cubes.h5", "--end-seq", "2")
    assert list(PackedDataset("cubes.h5")) == [{"cube": 0}, {"cube": 1}, {"cube": 8}]


def test_onto_itself(folder: Path, capsys: Shown) -> None:
    shown(capsys, "train.json", "train.h5", "--shard-size", "50kB")
    before = [PackedDataset("train.h5")[row] for row in range(12)]
    shown(capsys, "train.h5", "train.h5", "--force", "--shard-size", "25kB", "--processes", "1")
    data = PackedDataset("train.h5")
    assert len(data) == 12
    for row, sample in enumerate(before):
        assert torch.equal(data[row]["audio"], sample["audio"])
    assert len(list(folder.glob("train-*.h5"))) == len(open_packed(Path("train.h5")).files) > 3


def test_a_file_of_another_name_stays(folder: Path, capsys: Shown) -> None:
    tiny.speech(folder, "more", 3, seed=2)
    shown(capsys, "more.json", "train-00000.h5")
    before = Path("train-00000.h5").read_bytes()
    shown(capsys, "train.json", "train.h5", "--shard-size", "50kB")
    assert Path("train-00000.h5").read_bytes() == before


def test_a_mended_file_begins_anew(folder: Path, capsys: Shown) -> None:
    """Rows of the code before and after are never in one file, not even where the samples that are looked at agree."""
    code = """
class Rows:
    def __len__(self):
        return 1000

    def __getitem__(self, row):
        if row == 700:
            {at_700}
        return {{"x": row + (10_000 if {others} else 0)}}

def rows():
    return Rows()
"""
    Path("rows.py").write_text(code.format(at_700="raise ValueError('broken')", others="False"))
    assert "sample 700 cannot be read" in shown(capsys, "rows.py:rows", "rows.h5", "--processes", "1", code=2)
    assert list(Path("rows.h5.parts").glob("*.npz"))
    Path("rows.py").write_text(code.format(at_700="pass  # mended", others="row % 10 == 5"))
    capsys.readouterr()
    assert "of different data, code or options" in shown(capsys, "rows.py:rows", "rows.h5", code=2)
    shown(capsys, "rows.py:rows", "rows.h5", "--force")
    expected = [row + (10_000 if row % 10 == 5 else 0) for row in range(1000)]
    assert [sample["x"] for sample in PackedDataset("rows.h5")] == expected


@pytest.mark.parametrize(
    ("words", "what", "hint"),
    [
        ([], "nothing to pack is named", "paceline pack train.json train.h5"),
        (["train.json"], "no file to write is named", "name the file to write last"),
        (["train.json", "train.npz"], "train.npz: is no name of a packed file", ".h5"),
        (["trian.json", "a.h5"], "trian.json: there is no such file", "did you mean train.json?"),
        (["train.json", "own.py:Own", "a.h5"], "own.py:Own is a task", "by itself"),
        (["own.py:Own", "a.h5", "--part", "tset"], "has no data 'tset'", "there are: train, dev"),
        (["own.py:Onw", "a.h5"], "own.py has no 'Onw'", "did you mean own.py:Own?"),
        (["own.py:Endless", "a.h5"], "can only be iterated", "__getitem__"),
        (["asr", "a.h5"], "is packed from its manifests", "train.json"),
        (["train.json", "a.h5", "--streams", "txt"], "there is no stream 'txt'", "there are: audio, text"),
        (["train.json", "a.h5", "--shard-size", "big"], "is no size", ""),
        (["--info", "--verify", "a.h5"], "more than one of", "one of them"),
        (["--extract", "a.h5"], "a packed file and a folder must be named", "--extract train.h5 FOLDER"),
        (["--info", "train.json"], "train.json: is not HDF5", "a manifest's name ends in .json"),
        (["train.json", "missing/deep/a.h5", "--layuot", "returnn"], "layuot", "layout"),
    ],
)
def test_mistakes(folder: Path, capsys: Shown, words: list[str], what: str, hint: str) -> None:
    error = shown(capsys, *words, code=2)
    assert what in error
    assert hint in error


def test_split_says_what_to_do_instead(folder: Path, capsys: Shown) -> None:
    shown(capsys, "train.json", "train.h5")
    assert main(["manifest", "split", "train.h5"]) == 2
    assert "--extract" in capsys.readouterr().err
