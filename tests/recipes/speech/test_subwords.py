"""Runs that write subwords: the same on any number of ranks, resumed, from packed data, exported and loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.cli.main import main
from paceline.core.errors import Conflict, InvalidData, NotFound
from paceline.recipes.speech.exchange.export import read_export
from paceline.recipes.speech.recognizer import load
from paceline.recipes.speech.text.labels import LabelsLackLetters
from paceline.recipes.speech.text.subwords.tokenizer import MODEL, learn_bpe, stored
from paceline.train.resume import SettingsChanged
from paceline.world.link import Link
from tests.ranks import run_ranks
from tests.recipes.speech import tiny

TIMEOUT_S = 300.0
BPE: dict[str, Any] = {"vocabulary": 9, "text_rules": "basic", "save_every_steps": 1, "keep_last": 99}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("speech")
    tiny.speech(folder, "train", 26, seed=1)
    tiny.speech(folder, "dev", 7, seed=2)
    return folder


@pytest.fixture(scope="module")
def whole(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 8 steps on one rank."""
    out = tmp_path_factory.mktemp("run") / "whole"
    tiny.train(tiny.settings(data, out=out, **BPE, epochs=2, val_every_epochs=2, precision="fp64", level=0))
    return out


def train(link: Link, data: Path, out: Path, changes: dict[str, Any]) -> None:
    again = {"epochs": 2, "val_every_epochs": 2, "precision": "fp64", "level": 0, **BPE}
    tiny.train(tiny.settings(data, out=out, **{**again, **changes}), link)


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.long)])
def test_ranks_and_a_resume_in_mid_epoch_change_nothing(tmp_path: Path, data: Path, whole: Path, size: int) -> None:
    run_ranks(size, train, data, tmp_path / "ranks", {}, timeout_s=TIMEOUT_S)
    middle = whole / "checkpoints" / "step-00000003"
    run_ranks(size, train, data, tmp_path / "on", {"resume": middle}, timeout_s=TIMEOUT_S)
    expected = tiny.losses_of(whole)
    assert len(expected) == 8
    assert tiny.losses_of(tmp_path / "ranks") == pytest.approx(expected, rel=1e-12, abs=0)
    assert tiny.losses_of(tmp_path / "on") == pytest.approx(expected[3:], rel=1e-12, abs=0)
    for run in ("ranks", "on"):
        assert stored(tmp_path / run) == stored(whole)
        (there,), (here,) = tiny.validations_of(tmp_path / run), tiny.validations_of(whole)
        assert there == pytest.approx(here, rel=1e-12)


def test_packed_data_serves_any_labels(tmp_path: Path, data: Path, whole: Path) -> None:
    for name in ("train", "dev"):
        assert main(["pack", str(data / f"{name}.json"), str(tmp_path / f"{name}.h5")]) == 0
    packed = {"train_manifest": (tmp_path / "train.h5",), "val_manifest": (f"dev={tmp_path / 'dev.h5'}",)}
    again = {"epochs": 2, "val_every_epochs": 2, "precision": "fp64", "level": 0}
    tiny.train(tiny.settings(data, out=tmp_path / "packed", **packed, **again, **BPE))
    assert tiny.losses_of(tmp_path / "packed") == tiny.losses_of(whole)
    tiny.train(tiny.settings(data, out=tmp_path / "letters", **packed, **again))
    assert stored(tmp_path / "letters") is None


def test_a_run_is_validated_used_and_exported_with_its_subwords(
    tmp_path: Path, data: Path, whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert len(stored(whole).pieces) == 9  # type: ignore[union-attr]
    assert main(["eval", str(whole), "--checkpoint", "last", "--json", "--decoder", "greedy"]) == 0
    metrics = json.loads(capsys.readouterr().out)["metrics"]
    assert metrics == pytest.approx(tiny.validations_of(whole)[-1], rel=1e-9)
    assert main(["infer", str(whole), str(data / "dev.json"), "--checkpoint", "last", "--decoder", "beam"]) == 0
    texts = [line.rpartition("\t")[2] for line in capsys.readouterr().out.splitlines()]
    assert len(texts) == 7
    assert set("".join(texts)) <= set(tiny.LABELS)

    assert main(["export", str(whole), str(tmp_path / "out"), "--checkpoint", "last"]) == 0
    assert (tmp_path / "out" / MODEL).read_bytes() == (whole / MODEL).read_bytes()
    network, _ = read_export(tmp_path / "out")
    assert network.labels == stored(whole).pieces  # type: ignore[union-attr]
    assert main(["export", str(whole), str(tmp_path / "out.nemo"), "--checkpoint", "last"]) == 0
    for name in ("out", "out.nemo"):
        capsys.readouterr()
        assert main(["eval", str(tmp_path / name), "--manifest", str(data / "dev.json"), "--json"]) == 0
        found = json.loads(capsys.readouterr().out)["metrics"]
        assert found == pytest.approx(metrics, rel=1e-4)
    audio = [data / "dev" / f"{number}.flac" for number in range(7)]
    for path in (whole, tmp_path / "out"):
        model = load(path, checkpoint="last", decoder="beam")
        assert model.labels.pieces[0] == "\u2581\u2047"
        heard = model.transcribe(audio)
        assert set("".join(heard)) <= set(tiny.LABELS)
    moved = tmp_path / "moved"
    whole.rename(moved)
    try:
        (moved / MODEL).rename(moved / "aside")
        with pytest.raises(NotFound):
            train_again(data, moved)
        assert main(["eval", str(moved)]) == 2
        (moved / "aside").rename(moved / MODEL)
    finally:
        moved.rename(whole)


def train_again(data: Path, out: Path, **changes: Any) -> None:
    again = {"epochs": 2, "val_every_epochs": 2, "precision": "fp64", "level": 0, "resume": "auto"}
    tiny.train(tiny.settings(data, out=out, **{**BPE, **again, **changes}))


def test_a_run_keeps_its_subwords(tmp_path: Path, data: Path, whole: Path) -> None:
    (tmp_path / "other.model").write_bytes(learn_bpe(["ab ba", "c", "abc"], 8).content)
    with pytest.raises(Conflict, match="different subwords"):
        train_again(data, whole, tokenizer=tmp_path / "other.model", vocabulary=None, allow_change=True)
    with pytest.raises(SettingsChanged, match="vocabulary"):
        train_again(data, whole, vocabulary=8, epochs=3)
    start = whole / "checkpoints" / "step-00000003"
    with pytest.raises(Conflict, match="is a model for other labels"):
        tiny.train(tiny.settings(data, tokenizer=tmp_path / "other.model", init_from=start))


def test_subwords_of_a_file(tmp_path: Path, data: Path, whole: Path) -> None:
    """Of a run, and of NeMo's folder: the same losses as where they were learned."""
    for number, path in enumerate((whole, whole / MODEL)):
        out = tmp_path / str(number)
        changes = {**BPE, "vocabulary": None, "tokenizer": path, "precision": "fp64", "level": 0, "validation": False}
        tiny.train(tiny.settings(data, out=out, epochs=2, **changes))
        assert tiny.losses_of(out) == tiny.losses_of(whole)
    network = {**tiny.NETWORK, "labels": list(stored(whole).pieces)}  # type: ignore[union-attr]
    with pytest.raises(NotFound, match="9 subwords"):
        tiny.train(tiny.settings(data, network=network))
    tiny.train(tiny.settings(data, network=network, tokenizer=whole, steps=1))
    other = {**tiny.NETWORK, "labels": ["<unk>", "\u2581a", "b"]}
    with pytest.raises(Conflict, match="is a model for other labels"):
        tiny.train(tiny.settings(data, network=other, tokenizer=whole, steps=1))


def test_text_that_the_subwords_cannot_write(tmp_path: Path, data: Path) -> None:
    (tmp_path / "ab.model").write_bytes(learn_bpe(["ab ba", "aab"], 6).content)
    with pytest.raises(
        LabelsLackLetters, match=r"% of the words lose letters that are not among the labels: c"
    ) as caught:
        tiny.train(tiny.settings(data, tokenizer=tmp_path / "ab.model"))
    assert "give another, or learn one instead of `--tokenizer`, with `--vocabulary 128 --labels" in caught.value.hint


def test_advice_for_letters_that_learned_subwords_lack(tmp_path: Path, data: Path) -> None:
    """`--labels` of the characters of the network and the lost ones where that helps; never what was typed already."""
    lines = tiny.lines_of(data / "train.json")
    for folder in ("train", "dev"):
        (tmp_path / folder).symlink_to(data / folder)
    tiny.manifest(tmp_path / "train.json", [{**line, "text": line["text"].replace("c", "b")} for line in lines])
    dev = tiny.manifest(tmp_path / "dev.json", [{**line, "text": "cab"} for line in tiny.lines_of(data / "dev.json")])
    with pytest.raises(LabelsLackLetters, match="lose letters that are not among the labels: c") as caught:
        tiny.train(tiny.settings(tmp_path, vocabulary=6, val_manifest=(str(dev),)))
    assert "none of those has them: train on transcripts that do" in caught.value.hint
    assert "--labels" not in caught.value.hint
    tiny.manifest(tmp_path / "train.json", [{**line, "text": line["text"] + "\u00f6"} for line in lines])
    more = {**tiny.NETWORK, "labels": [*" abcd"]}
    with pytest.raises(LabelsLackLetters) as caught:
        tiny.train(tiny.settings(tmp_path, vocabulary=6, val_manifest=(), network=more))
    assert '`--labels " abcd\u00f6"`' in caught.value.hint


def test_transcripts_that_are_longer_than_the_output(data: Path) -> None:
    """With 16-fold subsampling a letter of 110 ms has less than a frame."""
    slow = {**tiny.NETWORK, "blocks": [*({"filters": 8, "kernel": 3, "stride": 2} for _ in range(5))]}
    with pytest.raises(InvalidData, match="100.0% of the utterances .* a frame per 320 ms") as caught:
        tiny.train(tiny.settings(data, network=slow, val_manifest=()))
    assert "`--vocabulary 128`; `--max-too-short 1` continues" in caught.value.hint
    trained = tiny.train(tiny.settings(data, network=slow, val_manifest=(), max_too_short=1.0, steps=1))
    assert all(torch.isfinite(weight).all() for weight in trained.stepper.model.parameters())


def test_labels_bpe_is_short_for_a_vocabulary(data: Path) -> None:
    config = tiny.settings(data, labels="bpe")
    assert (config.labels, config.vocabulary) == (None, 128)
    assert tiny.settings(data, labels="bpe", vocabulary=64).vocabulary == 64
    with pytest.raises(ValueError, match="set one of them"):
        tiny.settings(data, vocabulary=8, tokenizer=data)
