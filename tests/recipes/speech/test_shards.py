"""Training from shards: the losses of loose files, bit for bit, on any number of ranks and after a resume in the middle
of a shard."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import numpy as np
import pytest

from paceline.cli.main import main
from paceline.data.packed.reader import open_packed
from paceline.world.link import Link
from tests.ranks import ranks
from tests.recipes.speech import tiny

NUMBER = 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(tmp_path_factory.mktemp("speech"))


def made(folder: Path) -> Path:
    """`train.json` of loose files, the same as NeMo's tarred manifest (`tarred/`) and as WebDataset shards (`web/`)."""
    lines = tiny.lines_of(tiny.speech(folder, "train", NUMBER, seed=1))
    (folder / "tarred").mkdir()
    (folder / "web").mkdir()
    tarred = [
        {**line, "audio_filepath": f"{number}.flac", "shard_id": number // 8} for number, line in enumerate(lines)
    ]
    tiny.manifest(folder / "tarred" / "train.json", tarred)
    for shard in range(3):
        with tarfile.open(folder / "tarred" / f"audio_{shard}.tar", "w") as tar:
            for number in range(8 * shard, 8 * shard + 8):
                tar.add(folder / "train" / f"{number}.flac", f"{number}.flac")
        with tarfile.open(folder / "web" / f"s-{shard}.tar", "w") as tar:
            for number in range(8 * shard, 8 * shard + 8):
                tar.add(folder / "train" / f"{number}.flac", f"{number:03d}.flac")
                text = folder / "web" / "text"
                text.write_text(lines[number]["text"])
                tar.add(text, f"{number:03d}.txt")
    return folder


SOURCES = ("tarred/train.json", "tarred/train.json@audio_{0..2}.tar", "web/s-{0..2}.tar")


@ranks(1, 2)
def test_losses_are_those_of_loose_files(link: Link, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    if link.is_first:
        made(folder)
    link.barrier()
    tiny.train(tiny.settings(folder, out=tmp_path / "plain", epochs=2), link)
    wanted = tiny.losses_of(tmp_path / "plain")
    assert len(wanted) == 6
    for number, word in enumerate(SOURCES if link.world.size == 1 else SOURCES[1:2]):
        out = tmp_path / f"run{number}"
        tiny.train(tiny.settings(folder, train_manifest=(folder / word,), out=out, epochs=2), link)
        assert tiny.losses_of(out) == wanted


def test_a_run_goes_on_in_the_middle_of_a_shard(folder: Path, tmp_path: Path) -> None:
    data = {"train_manifest": (folder / "web/s-{0..2}.tar",), "epochs": 2, "schedule": "constant", "warmup_ratio": None}
    tiny.train(tiny.settings(folder, out=tmp_path / "whole", **data))
    tiny.train(tiny.settings(folder, out=tmp_path / "run", **data, steps=1))
    tiny.train(tiny.settings(folder, out=tmp_path / "run", **data, resume="auto"))
    assert tiny.losses_of(tmp_path / "run") == tiny.losses_of(tmp_path / "whole")


def test_commands_take_shards(folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    pattern = str(folder / "web" / "s-{0..2}.tar")
    assert main(["manifest", "scan", pattern, "--out", str(tmp_path / "all.json")]) == 0
    lines = tiny.lines_of(tmp_path / "all.json")
    assert [line["text"] for line in lines] == [line["text"] for line in tiny.lines_of(folder / "train.json")]
    assert lines[0]["audio_filepath"] == str(folder / "web" / "s-0.tar" / "000.flac")
    assert main(["manifest", "stats", pattern, "--check"]) == 0
    for name, word in (
        ("a.h5", str(folder / "train.json")),
        ("b.h5", f"{folder}/tarred/train.json@audio_{{0..2}}.tar"),
    ):
        assert main(["pack", word, str(tmp_path / name)]) == 0
    one, other = open_packed(tmp_path / "a.h5"), open_packed(tmp_path / "b.h5")
    for row in range(NUMBER):
        np.testing.assert_array_equal(one.stream("audio").view(row), other.stream("audio").view(row))
    tiny.train(tiny.settings(folder, out=tmp_path / "run"))
    capfd.readouterr()
    assert main(["infer", str(tmp_path / "run"), pattern, "--json", "--device", "cpu"]) == 0
    assert len([json.loads(line) for line in capfd.readouterr().out.splitlines() if line.startswith("{")]) == NUMBER


def test_lines_of_shards_that_move_name_their_members(folder: Path, tmp_path: Path) -> None:
    """`scan` and `split` write lines that are read without the pattern, and from another folder."""
    for number, word in enumerate(SOURCES):
        out = tmp_path / str(number)
        assert main(["manifest", "scan", str(folder / word), "--out", str(out / "scan.json")]) == 0
        assert main(["manifest", "split", str(folder / word), "--parts", "all=1", "--out", str(out)]) == 0
        for path in (out / "scan.json", out / ("s-0-all.json" if "web" in word else "train-all.json")):
            assert main(["manifest", "stats", str(path), "--check"]) == 0
            texts = [line["text"] for line in tiny.lines_of(path)]
            assert texts == [line["text"] for line in tiny.lines_of(folder / "train.json")]
    beside = [folder / "tarred" / "train-all.json", folder / "tarred" / "train.json"]
    assert main(["manifest", "split", str(beside[1]), "--parts", "all=1"]) == 0
    assert tiny.lines_of(beside[0]) == tiny.lines_of(beside[1])  # as NeMo has them


def test_a_mistake_is_told_with_exit_code_2(folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = ["train", "asr", "--train-manifest", f"{folder}/tarred/train.json@audio_{{0..1}}.tar", "--epochs", "1"]
    assert main([*words, "--device", "cpu", "--network", "small", "--out", str(tmp_path / "run")]) == 2
    assert "names shards 0 to 1, and line 17 is of shard 2" in capfd.readouterr().err
