"""`paceline manifest split`: groups stay together, and the same seed gives the same parts."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from paceline.cli.main import main
from paceline.core.errors import InvalidSetting
from paceline.recipes.speech.manifest.split import BadParts, assign, parse_parts
from tests.recipes.speech.commands.test_manifest import Shown, lines, manifest


def corpus(folder: Path, number: int) -> Path:
    entries = [
        {"audio_filepath": f"{place}.wav", "duration": 1.0, "text": str(place), "speaker": f"s{place % 10}"}
        for place in range(number)
    ]
    return manifest(folder / "all.json", *entries)


def test_split_is_the_same_for_the_same_seed(tmp_path: Path, capsys: Shown) -> None:
    path = corpus(tmp_path, 200)
    words = ["manifest", "split", str(path), "--parts", "train=0.8,val=0.15,test=0.05"]
    assert main([*words, "--seed", "3"]) == 0
    parts = {name: lines(tmp_path / f"all-{name}.json") for name in ("train", "val", "test")}
    assert {name: len(part) for name, part in parts.items()} == {"train": 160, "val": 30, "test": 10}
    assert f"{tmp_path}/all-val.json: 30 utterances, 0.01 h, 30 audio files" in capsys.readouterr().out
    together = [line["text"] for part in parts.values() for line in part]
    assert sorted(together, key=int) == [str(number) for number in range(200)]
    assert [line["text"] for line in parts["val"]] == sorted((line["text"] for line in parts["val"]), key=int)

    assert main([*words, "--seed", "3"]) == 2  # they exist
    raw = path.read_text().splitlines(keepends=True)
    path.write_text("".join(reversed(raw)))
    assert main([*words, "--seed", "3", "--force"]) == 0
    assert {line["text"] for line in lines(tmp_path / "all-val.json")} == {line["text"] for line in parts["val"]}
    assert main([*words, "--seed", "4", "--force"]) == 0
    assert {line["text"] for line in lines(tmp_path / "all-val.json")} != {line["text"] for line in parts["val"]}


def test_split_keeps_groups_together(tmp_path: Path, capsys: Shown) -> None:
    path = corpus(tmp_path, 200)
    assert main(["manifest", "split", str(path), "--by", "speaker", "--out", str(tmp_path / "new")]) == 0
    shown = capsys.readouterr().out
    assert "all-train.json: 180 utterances, 0.05 h, 9 values of speaker" in shown
    assert "all-val.json: 20 utterances, 0.01 h, 1 value of speaker" in shown
    train, val = (lines(tmp_path / "new" / f"all-{name}.json") for name in ("train", "val"))
    assert not {line["speaker"] for line in train} & {line["speaker"] for line in val}
    assert train[0]["audio_filepath"] == str(tmp_path / train[0]["audio_filepath"].rpartition("/")[2])
    assert main(["manifest", "split", str(path), "--by", "room"]) == 2
    assert f'{path}:1 has no "room", nor do 199 more lines' in capsys.readouterr().err


def test_parts_of_one_recording_stay_together(tmp_path: Path) -> None:
    entries = [
        {"audio_filepath": f"{place // 10}.wav", "duration": 1, "offset": place % 10, "text": "a"}
        for place in range(100)
    ]
    assert main(["manifest", "split", str(manifest(tmp_path / "all.json", *entries)), "--parts", "a=0.5,b=0.5"]) == 0
    files = [{line["audio_filepath"] for line in lines(tmp_path / f"all-{part}.json")} for part in "ab"]
    assert not files[0] & files[1]
    assert [len(each) for each in files] == [5, 5]


def test_assign_leaves_no_part_empty() -> None:
    sizes = {f"g{number}": 1.0 for number in range(5)}
    chosen = assign(sizes, {"train": 0.99, "val": 0.01}, 0, "group")
    assert Counter(chosen.values()) == {"train": 4, "val": 1}
    some = assign({f"g{number}": 1.0 for number in range(1000)}, {"a": 0.3, "b": 0.2}, 7, "group")
    assert Counter(some.values()) == {"a": 300, "b": 200, None: 500}
    with pytest.raises(InvalidSetting, match="2 parts of 1 group: one would be empty"):
        assign({"g": 1.0}, {"a": 0.5, "b": 0.5}, 0, "group")
    for text in (
        "",
        "train",
        "train=0",
        "train=1.5",
        "train=x",
        "a=0.5,a=0.5",
        "a=0.6,b=0.6",
        "a/b=0.5",
        "=1",
        "a=nan",
    ):
        with pytest.raises(BadParts):
            parse_parts(text)
    assert parse_parts("a=0.1, b=0.9") == {"a": 0.1, "b": 0.9}
