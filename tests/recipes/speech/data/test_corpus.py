"""Manifests opened for training: names of sets, what is bad in any of them, what is said of texts, a long manifest."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import soundfile

from paceline.config.mode import Purpose
from paceline.config.named_sets import NamedTwice, absolute_set, name_sets
from paceline.data.plan import BatchRule, Plan
from paceline.recipes.speech.data.corpus import BAD_DATA, BadLines, Corpus, Opening, Part, parts_of
from paceline.recipes.speech.data.utterances import Utterances
from paceline.recipes.speech.manifest.bad_line import BadManifest
from paceline.recipes.speech.manifest.columns import Manifest
from paceline.recipes.speech.settings import AsrSettings
from paceline.recipes.speech.text.labels import Labels
from paceline.world.link import Link
from tests.ranks import ranks, run_ranks
from tests.recipes.speech import tiny


def labels_of(config: AsrSettings) -> Callable[[Manifest | None], Labels]:
    return lambda training: Labels(config.network.labels)


# -- which sets --------------------------------------------------------------------------------------------------------


def test_sets_are_named_by_their_files_and_apart() -> None:
    assert name_sets(["a/dev.json", "b/test.json"]) == {"dev": (Path("a/dev.json"),), "test": (Path("b/test.json"),)}
    assert list(name_sets(["a/dev.json", "b/dev.json", "c/test.json"])) == ["a-dev", "b-dev", "test"]
    one, other = (Path("a/dev.json"),), (Path("b/dev.json"),)
    assert name_sets(["clean=a/dev.json", "b/dev.json"]) == {"clean": one, "dev": other}
    with pytest.raises(NamedTwice, match="two validation sets are called 'dev'") as caught:
        name_sets(["a/dev.json", "dev=b/other.json"])
    assert "first=FILE" in caught.value.hint


def test_a_file_whose_name_has_an_equals_sign_is_that_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("snr=5.json").touch()
    assert name_sets(["snr=5.json"]) == {"snr=5": (Path("snr=5.json"),)}
    assert absolute_set("snr=5.json") == str(tmp_path / "snr=5.json")
    assert name_sets([absolute_set("snr=5.json")]) == {"snr=5": (tmp_path / "snr=5.json",)}


def test_a_set_may_be_of_several_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert name_sets(["dev=a.json+b.jsonl+c.json"]) == {"dev": (Path("a.json"), Path("b.jsonl"), Path("c.json"))}
    assert name_sets(["dev=c++/a.json"]) == {"dev": (Path("c++/a.json"),)}
    monkeypatch.chdir(tmp_path)
    assert absolute_set("dev=a.json+/b.json") == f"dev={tmp_path}/a.json+/b.json"
    tiny.speech(tmp_path, "train", 3, seed=1)
    tiny.speech(tmp_path, "dev", 2, seed=2)
    tiny.speech(tmp_path, "more", 4, seed=3)
    trained = tiny.train(tiny.settings(tmp_path, val_manifest=("both=dev.json+more.json",), global_batch=3))
    assert trained.validation.sizes == {"both": 6}


def test_files_are_kept_in_full_and_named_as_they_lie(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a run goes on from another folder; who is in theirs reads the name that they typed."""
    tiny.speech(tmp_path, "train", 3, seed=1)
    tiny.manifest(tmp_path / "dev.json", ["{"])
    monkeypatch.chdir(tmp_path)
    relative = {"train_manifest": ("train.json",), "val_manifest": ("d=dev.json",), "noise_from": "noise"}
    config = tiny.settings(tmp_path, **relative, impulse_from="rooms/small")
    assert config.train_manifest == (tmp_path / "train.json",)
    assert config.val_manifest == (f"d={tmp_path / 'dev.json'}",)
    assert (config.noise_from, config.impulse_from) == (tmp_path / "noise", tmp_path / "rooms" / "small")
    with pytest.raises(BadManifest, match=r"^dev.json:1: is not JSON"):
        open_all(tmp_path, **relative)
    (tmp_path / "train" / "1.flac").unlink()
    with pytest.raises(BadManifest, match=r"\n  train.json:2: train/1.flac: there is no such file\n"):
        open_all(tmp_path, **relative)
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    assert tiny.settings(tmp_path, **config.model_dump()) == config


def test_each_purpose_opens_what_it_uses(tmp_path: Path) -> None:
    tiny.speech(tmp_path, "train", 2, seed=1)
    tiny.speech(tmp_path, "dev", 2, seed=2)
    opened = {
        purpose: [(part.name, part.is_training) for part in parts_of(tiny.settings(tmp_path), purpose)]
        for purpose in get_args(Purpose)
    }
    training, validation = ("train", True), ("dev", False)
    assert opened == {
        "train": [training, validation],
        "eval": [validation],
        "infer": [validation],
    }
    assert [part.name for part in parts_of(tiny.settings(tmp_path, validation=False), "train")] == ["train"]


# -- what is bad -------------------------------------------------------------------------------------------------------


def alone(value: Any) -> list[Any]:
    return [value]


def open_all(
    folder: Path,
    *,
    share: tuple[int, int] = (0, 1),
    gather: Callable[[Any], list[Any]] = alone,
    **changes: Any,
) -> tuple[Mapping[Part, Corpus], BadLines, list[str]]:
    said: list[str] = []
    config = tiny.settings(folder, **changes)
    corpora = Opening(config, share, gather, said.append, labels_of(config)).open(parts_of(config, "train"))
    return corpora.by_part, corpora.bad, said


@pytest.fixture
def bad(tmp_path: Path) -> Path:
    """Sound lines and one of each kind of bad ones, in the training set and in a validation set."""
    tiny.speech(tmp_path, "train", 4, seed=1)
    tiny.speech(tmp_path, "dev", 3, seed=2)
    (tmp_path / "train" / "empty.flac").touch()
    whole = (tmp_path / "train" / "0.flac").read_bytes()
    (tmp_path / "train" / "half.flac").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "train" / "text.flac").write_text("no audio")
    lines = tiny.lines_of(tmp_path / "train.json")
    first = lines[0]
    tiny.manifest(
        tmp_path / "train.json",
        [
            lines[0],  # 1
            '{"audio_filepath": "train/0.flac", ',
            {"audio_filepath": "train/0.flac", "text": "a"},
            lines[1],
            {**first, "audio_filepath": "train/absent.flac"},  # 5
            {**first, "audio_filepath": "train/empty.flac"},
            {**first, "audio_filepath": "train/half.flac"},
            {**first, "audio_filepath": "train/text.flac"},
            {**first, "duration": 9.5},
            lines[2],  # 10
            lines[3],
        ],
    )
    dev = tiny.lines_of(tmp_path / "dev.json")
    tiny.manifest(tmp_path / "dev.json", [dev[0], "[]", {**dev[1], "duration": 0.01}, dev[2]])
    return tmp_path


EXPECTED = [
    ("train.json", 2, "is not JSON: the line ends within"),
    ("train.json", 3, '"duration" is missing'),
    ("train.json", 5, "absent.flac: there is no such file"),
    ("train.json", 6, "empty.flac: is empty"),
    ("train.json", 7, "half.flac: is truncated"),
    ("train.json", 8, "text.flac: is not audio"),
    ("train.json", 9, '"duration" is 9.5, but'),
    ("dev.json", 2, "is a list, not a JSON object"),
    ("dev.json", 3, '"duration" is 0.01, but'),
]


def assert_expected(bad: Any) -> None:
    assert [(line.path.name, line.line) for line in bad] == [entry[:2] for entry in EXPECTED]
    for line, (*_, what) in zip(bad, EXPECTED, strict=True):
        assert what in line.what, line


def test_all_that_is_bad_anywhere_is_in_one_report(bad: Path) -> None:
    with pytest.raises(BadManifest) as caught:
        open_all(bad)
    assert_expected(caught.value.bad)
    message = str(caught.value)
    assert message.startswith(f"9 bad lines in {bad / 'train.json'}, {bad / 'dev.json'}\n")
    for name, line, what in EXPECTED:
        assert any(f"{name}:{line}: " in each and what in each for each in message.splitlines())
    assert "--bad-data skip" in caught.value.hint


def test_what_is_skipped_is_counted_listed_and_gone(bad: Path) -> None:
    corpora, lines, said = open_all(bad, bad_data="skip")
    assert_expected(lines.listed)
    assert lines.total == 9
    sizes = {part.name: len(corpus.manifest) for part, corpus in corpora.items()}
    assert sizes == {"train": 4, "dev": 2}
    for corpus in corpora.values():
        assert len(corpus.texts) == len(corpus.manifest)
        assert all(corpus.manifest.audio(row).stem in "0123" for row in range(len(corpus.manifest)))
    text = "\n".join(said)
    assert re.search(r"train: 9 utterances, \d+\.\d s, skipped 2 bad lines", text)
    assert "train: skipped 5 with bad audio" in text
    assert "dev: skipped 1 with bad audio" in text
    assert text.count("absent.flac") == 2  # its place and how the line begins


@ranks(1, 2)
def test_ranks_agree_on_what_is_bad(link: Link, bad: Path) -> None:
    share = (link.world.rank, link.world.size)
    with pytest.raises(BadManifest) as caught:
        open_all(bad, share=share, gather=link.gather_objects)
    assert_expected(caught.value.bad)
    corpora, lines, _ = open_all(bad, share=share, gather=link.gather_objects, bad_data="skip")
    assert_expected(lines.listed)
    rows = {part.name: corpus.manifest.durations.tolist() for part, corpus in corpora.items()}
    assert link.gather_objects(rows) == [rows] * link.world.size


def test_one_file_may_be_trained_on_and_validated_on(tmp_path: Path) -> None:
    """Even with the name of the training set, and with lines that only training drops before a bad one."""
    tiny.speech(tmp_path, "train", 3, seed=1)
    lines = tiny.lines_of(tmp_path / "train.json")
    long = tmp_path / "train" / "long.flac"
    soundfile.write(long, np.zeros(5 * tiny.RATE, np.int16), tiny.RATE)
    late = {"audio_filepath": "train/long.flac", "duration": 5.0, "text": "a"}
    absent = {**lines[1], "audio_filepath": "train/absent.flac"}
    tiny.manifest(tmp_path / "train.json", [late, lines[0], absent, lines[2]])
    corpora, lines, _ = open_all(
        tmp_path, val_manifest=(str(tmp_path / "train.json"),), max_seconds=4.0, bad_data="skip"
    )
    files = {
        part.is_training: [corpus.manifest.audio(row).stem for row in range(len(corpus.manifest))]
        for part, corpus in corpora.items()
    }
    assert files == {True: ["0", "2"], False: ["long", "0", "2"]}
    assert lines.total == 2

    trained = tiny.train(
        tiny.settings(
            tmp_path, val_manifest=(str(tmp_path / "train.json"),), max_seconds=4.0, bad_data="skip", global_batch=4
        )
    )
    assert trained.validation.sizes == {"train": 3}


@pytest.mark.parametrize("name", ["train", "dev"])
def test_a_set_of_which_nothing_is_left_stops_the_run_whatever_is_skipped(bad: Path, name: str) -> None:
    absent = {"audio_filepath": "absent.flac", "duration": 1.0, "text": "a"}
    for lines in (["{", "[]"], [absent, absent], ["{", absent]):
        tiny.manifest(bad / f"{name}.json", lines)
        with pytest.raises(BadManifest, match=f"2 bad lines in .*{name}.json") as caught:
            open_all(bad, bad_data="skip")
        assert "without them nothing is left" in caught.value.hint
        assert "--bad-data" not in caught.value.hint


def train_without_bad(link: Link, folder: Path) -> None:
    out = folder / f"run-{link.world.size}"
    tiny.train(tiny.settings(folder, out=out, bad_data="skip", global_batch=4, precision="fp64"), link)


def test_the_run_lists_what_it_left_out_and_goes_on_alike(bad: Path) -> None:
    for size in (1, 2):
        run_ranks(size, train_without_bad, bad)
        listed = (bad / f"run-{size}" / BAD_DATA).read_text().splitlines()
        assert len(listed) == 9
        for line, (name, number, what) in zip(listed, EXPECTED, strict=True):
            assert line.startswith(f"{bad / name}:{number}: ")
            assert what in line
    losses = tiny.losses_of(bad / "run-1")
    assert len(losses) == 1
    assert tiny.losses_of(bad / "run-2") == pytest.approx(losses, rel=1e-12)


def test_a_run_without_bad_data_lists_none(tmp_path: Path) -> None:
    tiny.speech(tmp_path, "train", 2, seed=1)
    tiny.train(tiny.settings(tmp_path, out=tmp_path / "run", bad_data="skip", global_batch=2))
    assert not (tmp_path / "run" / BAD_DATA).exists()


def test_a_run_that_stops_for_bad_data_leaves_nothing_behind(bad: Path, tmp_path: Path) -> None:
    with pytest.raises(BadManifest):
        tiny.train(tiny.settings(bad, out=tmp_path / "run"))
    assert not (tmp_path / "run").exists()


# -- what is said ------------------------------------------------------------------------------------------------------


def test_characters_outside_the_labels_and_utterances_too_short_are_told(tmp_path: Path) -> None:
    tiny.speech(tmp_path, "train", 3, seed=1)
    lines = tiny.lines_of(tmp_path / "train.json")
    lines[0]["text"] = "A, b!"  # case and punctuation cost nothing
    lines[1]["text"] = "a zz"
    frames = -(-round(lines[2]["duration"] * tiny.RATE) // 160)
    lines[2]["text"] = "a" * frames  # each repeat needs a blank between
    tiny.manifest(tmp_path / "train.json", lines)
    _, _, said = open_all(tmp_path, max_lost_words=1.0)
    assert said[1:] == [
        "train: normalised 2 of 3 texts; dropped characters outside the labels: z 2; 20.00% of the words lost letters",
        "train: 1 too short for their transcripts add nothing to the loss",
    ]
    lines[2]["text"] = "abc"[: min(3, frames)] * (frames // 3)  # no repeats: it just fits
    tiny.manifest(tmp_path / "train.json", lines)
    _, _, said = open_all(tmp_path, max_lost_words=1.0)
    assert len(said) == 2


def test_hours_kept_and_dropped_are_told(tmp_path: Path) -> None:
    tiny.speech(tmp_path, "train", 6, seed=1)
    seconds = sorted(line["duration"] for line in tiny.lines_of(tmp_path / "train.json"))
    limits = {"min_seconds": seconds[1], "max_seconds": seconds[4]}
    _, _, said = open_all(tmp_path, **limits)
    assert said == [
        f"train: 4 utterances, {sum(seconds[1:5]):.1f} s, "
        f"dropped 1 ({seconds[0]:.1f} s) shorter than {seconds[1]:g} s, "
        f"dropped 1 ({seconds[5]:.1f} s) longer than {seconds[4]:g} s"
    ]


# -- a long manifest ---------------------------------------------------------------------------------------------------


def test_a_long_manifest_has_no_object_per_line(tmp_path: Path) -> None:
    """What a worker would be sent is little more than the bytes of paths and texts."""
    number = 100_000
    line = '{"audio_filepath": "some/where/%06d.flac", "duration": %.2f, "text": "abc abc"}'
    tiny.manifest(tmp_path / "train.json", [line % (row, 1 + row % 1500 / 100) for row in range(number)])
    config = tiny.settings(tmp_path, check_audio=False)
    opening = Opening(config, (0, 1), alone, lambda text: None, labels_of(config))
    (corpus,) = opening.open(parts_of(config, "train")).by_part.values()
    data = Utterances(corpus.manifest, corpus.texts, tiny.RATE, config)
    assert len(data) == number
    pickled = pickle.dumps(data, protocol=pickle.HIGHEST_PROTOCOL)
    # Path 22 bytes, text 7, ids 7; where these begin 3 x 8; duration, longest, offset 3 x 8; line and file 2 x 4.
    assert len(pickled) < 100 * number
    plan = Plan(number, rule=BatchRule(64), grains=2, seed=0, lengths=data.lengths, order="bucket")
    assert plan.num_samples == number
    assert len(plan.batch(plan.num_steps // 2)) == 64
