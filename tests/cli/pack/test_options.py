"""`paceline pack` told something that cannot be, or that would have no effect."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import soundfile
import yaml

from paceline.cli.main import main
from paceline.cli.pack.options import to_bytes
from paceline.data.packed.dataset import PackedDataset
from paceline.data.packed.reader import open_packed
from tests.recipes.speech import tiny

Shown = pytest.CaptureFixture[str]
OWN = """
import torch
import paceline

class Own(paceline.Task):
    def train_data(self):
        return [torch.tensor([row]) for row in range(9)]

def empty():
    return []

def nothing():
    return None

def stream():
    return iter([1, 2])

class Fails:
    def __len__(self):
        return 20

    def __getitem__(self, row):
        if row in (9, 10):
            return compute(row)
        return torch.tensor([row])

def compute(row):
    raise ValueError(f"no row like {row}")

NUMBER = 3
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    tiny.speech(tmp_path, "train", 4, seed=1)
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(tiny.NETWORK))
    return tmp_path


def said(capsys: Shown, *words: str, code: int = 0) -> str:
    capsys.readouterr()
    found = main(["pack", *words])
    printed = capsys.readouterr()
    assert found == code, printed
    assert "src/paceline" not in printed.err, "no frames of ours"
    return printed.err if code == 2 else printed.out


@pytest.mark.parametrize(
    ("words", "what", "hint"),
    [
        (["train.json", "a.h5", "--part", "dev"], "`--part` has no effect on manifests", "leave it out"),
        (["train.json", "a.h5", "--epoch", "2", "--seed", "1"], "`--epoch`, `--seed` have no effect", "leave them out"),
        (["train.json", "a.h5", "--network", "tiny.yaml"], "`--network` has no effect without `--features`", ""),
        (["own.py:Own", "a.h5", "--features"], "`--features` has no effect on the data of a task", ""),
        (["own.py:Own", "a.h5", "--sample-rate", "8000"], "`--sample-rate` has no effect", ""),
        (["own.py:Fails", "a.h5", "--part", "dev"], "`--part` has no effect on a data set that is no task", ""),
        (["rows.h5", "a.h5", "--sample-rate", "8000"], "`--sample-rate` has no effect on packed data that is not", ""),
        (["--extract", "train.h5", "x", "--streams", "audio"], "`--streams` has no effect with `--extract`", ""),
        (["--extract", "train.h5", "x", "--layout", "returnn"], "`--layout` has no effect with `--extract`", ""),
        (["--info", "train.h5", "--force"], "`--force` has no effect with `--info`", ""),
        (["--verify", "train.h5", "--bad-data", "skip"], "`--bad-data` has no effect with `--verify`", ""),
        (
            ["train.json", "a.h5", "--features", "--network", "tiny.yaml", "--sample-rate", "16000"],
            "`--sample-rate 16000`: the front end of tiny.yaml hears 8000 Hz",
            "leave it out, or name a network",
        ),
        (["--verify"], "no packed file is named", "paceline pack --verify train.h5"),
        (["--info"], "no packed file is named", "paceline pack --info train.h5"),
        (
            ["own.py", "a.h5"],
            "own.py: nothing in it is named",
            "there are: Own, empty, nothing, stream, Fails, compute",
        ),
        (["own.py:strem", "a.h5"], "own.py has no 'strem'", "did you mean own.py:stream? there are: Own, empty"),
        (["own.py:empty", "a.h5"], "own.py:empty: holds no rows", "at least one"),
        (["own.py:nothing", "a.h5"], "own.py:nothing: is None, and no data set", "__getitem__"),
        (["own.py:NUMBER", "a.h5"], "own.py:NUMBER: is of type int, and no data set", "__getitem__"),
        (["own.py:stream", "a.h5"], "error: own.py:stream: its data can only be iterated", "__getitem__"),
        (["mels.h5,train.json", "a.h5"], "mels.h5: holds no audio of a known sample rate, but features", "pack the"),
    ],
)
def test_mistakes(capsys: Shown, words: list[str], what: str, hint: str) -> None:
    said(capsys, "train.json", "train.h5")
    said(capsys, "train.json", "mels.h5", "--features", "--network", "tiny.yaml", "--sample-rate", "8000")
    said(capsys, "own.py:Own", "rows.h5")
    error = said(capsys, *words, code=2)
    assert what in error
    assert hint in error
    assert not list(Path().glob("a.h5*"))


def test_both_rates_are_named(folder: Path, capsys: Shown) -> None:
    for rate in (16000, 8000):
        soundfile.write(folder / f"{rate}.wav", np.zeros(rate, np.int16), rate)
    lines = [{"audio_filepath": f"{rate}.wav", "duration": 1.0, "text": "a"} for rate in (16000, 8000)]
    (folder / "two.json").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    error = said(capsys, "two.json", "a.h5", code=2)
    assert "`--sample-rate 8000` or `--sample-rate 16000`" in error


@pytest.mark.parametrize("row", [9, 10])
def test_a_sample_that_raises(capsys: Shown, row: int) -> None:
    """Named, with the frames of its own code and none of the machinery around it."""
    error = said(capsys, "own.py:Fails", "a.h5", "--start-seq", str(row), code=2)
    assert error.startswith(f"error: sample {row} cannot be read\n")
    assert f"ValueError: no row like {row}" in error
    assert error.count("own.py") == 2, "where it is asked for, and where it fails"
    assert error.count("File ") == 2
    out = said(capsys, "own.py:Fails", "a.h5", "--bad-data", "skip")
    assert "skipped sample 9: ValueError: no row like 9\nskipped sample 10: " in out
    rows = [value for value in range(20) if value not in (9, 10)]
    assert [value.item() for value in PackedDataset("a.h5")] == rows
    assert [open_packed(Path("a.h5")).tags[at] for at in range(18)] == [f"seq-{value}" for value in rows]


def test_a_sample_that_raises_in_another_process(capsys: Shown) -> None:
    error = said(capsys, "own.py:Fails", "a.h5", "--processes", "2", code=2)
    assert error.startswith("error: sample 9 cannot be read\n")
    assert "concurrent" not in error


def test_sizes() -> None:
    assert [to_bytes(size) for size in ("1kB", "1.5 MB", "2gb", "1TB")] == [1000, 1_500_000, 2 * 10**9, 10**12]
    for wrong in ("", "MB", "0MB", "-1GB", "5", "1.2.3MB"):
        with pytest.raises(ValueError, match="is no size"):
            to_bytes(wrong)
