"""`paceline pack --info`, `--verify` and `--extract`."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest

from paceline.cli.main import main
from paceline.data.packed.reader import open_packed
from tests.cli.pack.test_options import Shown, folder, said
from tests.recipes.speech import tiny

__all__ = ["folder"]


def test_one_file_that_cannot_be_read_does_not_hide_the_others(capsys: Shown) -> None:
    said(capsys, "train.json", "train.h5")
    Path("bad.h5").write_text("no")
    for action, sign in (("--verify", "read: sound"), ("--info", "sample rate")):
        capsys.readouterr()
        assert main(["pack", action, "train.h5", "bad.h5", "none.h5", "train.h5"]) == 2
        printed = capsys.readouterr()
        assert printed.out.count(sign) == 2
        assert "bad.h5: is not HDF5" in printed.err
        assert "none.h5: there is no such file" in printed.err


def test_all_that_was_left_out_is_named(folder: Path, capsys: Shown) -> None:
    (folder / "bad.wav").write_text("no")
    bad: list[Any] = ["{", {"audio_filepath": "bad.wav", "duration": 1.0, "text": "a"}]
    tiny.manifest(folder / "all.json", [*bad, *tiny.lines_of(folder / "train.json")])
    said(capsys, "all.json", "a.h5", "--bad-data", "skip")
    told = said(capsys, "--info", "a.h5")
    assert "left out when it was packed: 2" in told
    assert "    all.json:1: is not JSON" in told
    assert "    all.json:2: bad.wav: is not audio" in told


def files(folder: str) -> set[str]:
    return {str(path.relative_to(folder)) for path in Path(folder).rglob("*") if path.is_file()}


def test_force_leaves_nothing_of_an_earlier_extraction(capsys: Shown) -> None:
    """And takes nothing that was not of it."""
    said(capsys, "train.json", "train.h5")
    said(capsys, "--extract", "train.h5", "x")
    Path("x/notes.txt").write_text("mine")
    out = said(capsys, "--extract", "train.h5", "x", "--end-seq", "1", "--force")
    assert "x: 1 other file was there, and stays" in out
    wavs = {line["audio_filepath"] for line in tiny.lines_of(Path("x/manifest.json"))}
    assert wavs == {"train/0.wav", "train/1.wav"}
    assert files("x") == {*wavs, "manifest.json", "notes.txt", ".paceline-extracted"}
    said(capsys, "own.py:Own", "rows.h5")
    said(capsys, "--extract", "rows.h5", "x", "--force", "--end-seq", "0")
    assert files("x") == {"seq-0.npz", "manifest.json", "notes.txt", ".paceline-extracted"}
    assert not Path("x/train").exists()


def test_extraction_onto_recordings_keeps_them(folder: Path, capsys: Shown) -> None:
    said(capsys, "train.json", "train.h5")
    Path("train/manifest.json").write_text(Path("train.json").read_text().replace("train/", ""))
    before = files("train")
    said(capsys, "--extract", "train.h5", "train", "--force")
    assert before < files("train")


def test_a_full_disk_during_extraction(capsys: Shown, monkeypatch: pytest.MonkeyPatch) -> None:
    said(capsys, "train.json", "train.h5")
    real = Path.write_bytes

    def full(self: Path, data: Any) -> int:
        if self.name == "2.wav":
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(self, data)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", full)
        error = said(capsys, "--extract", "train.h5", "x", code=2)
    assert "x cannot be written: No space left on device" in error
    assert "kB more are needed there, and " in error
    assert "type the same command" in error
    said(capsys, "--extract", "train.h5", "x")
    assert len(tiny.lines_of(Path("x/manifest.json"))) == 4


def test_info(folder: Path, capsys: Shown) -> None:
    said(capsys, "train.json", "train.h5", "--layout", "returnn")
    lines = said(capsys, "--info", "train.h5").splitlines()
    assert lines[0] == "train.h5: 4 rows, layout returnn"
    assert lines[1] == "  sample rate: 8000 Hz"
    assert lines[3].startswith("  audio: audio, int16, ")
    assert lines[4].startswith("  text: text, uint8, 3 to 4 steps")
    assert lines[5] == "  tags: train/0.flac ... train/3.flac"


def test_verify(folder: Path, capsys: Shown) -> None:
    said(capsys, "train.json", "train.h5")
    assert said(capsys, "--verify", "train.h5").endswith("kB read: sound\n")
    raw = bytearray(Path("train.h5").read_bytes())
    raw[raw.index(open_packed(Path("train.h5")).stream("audio").view(3).tobytes())] ^= 1
    Path("train.h5").write_bytes(raw)
    out = said(capsys, "--verify", "train.h5", code=1)
    assert "of stream 'audio': the bytes are not those that were written" in out
    assert "1 block is damaged: pack it again" in out
    assert main(["manifest", "stats", "train.h5", "--check"]) == 1
