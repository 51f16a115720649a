"""From two files to a translated sentence: train, eval, infer, export and pack as they are typed."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import paceline
from paceline.cli.main import main
from paceline.observe.journal import read
from paceline.recipes.translation.text.vocabulary import FILE
from paceline.recipes.translation.translator import load
from paceline.train.apply import read_weights
from tests.recipes.translation import toy


def typed(settings: dict[str, Any]) -> list[str]:
    """Return settings as words."""
    words = []
    for name, value in settings.items():
        listed = value if isinstance(value, list | tuple) else [value]
        words += [f"--{name.replace('_', '-')}", ",".join(map(str, listed))] if listed else []
    return words


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of eight checkpoints."""
    folder = tmp_path_factory.mktemp("translation")
    settings = toy.settings(folder, epochs=2, save_every_steps=1, keep_last=8, workers=0, out=folder / "run")
    assert main(["train", "translation", *typed(settings)]) == 0
    return folder / "run"


@pytest.fixture(scope="module")
def lines(run: Path) -> Path:
    path = run.parent / "lines.txt"
    path.write_text("one two three\n\nfour five\n", encoding="utf-8")
    return path


def test_eval_and_infer(run: Path, lines: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (last,) = [record for record in read(run / "metrics.jsonl", "validation") if record["step"] == 7]
    assert main(["eval", str(run), "--checkpoint", "last", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["metrics"]
    assert found == {name: value for name, value in last.items() if name.startswith("val/")}
    other = toy.write(run.parent, "other", 9, seed=5)
    named = [
        "--val-source",
        f"test={other[0]}",
        "--val-target",
        str(other[1]),
        "--beam",
        "3",
        "--bleu-lowercase",
    ]
    assert main(["eval", str(run), *named, "--json"]) == 0
    assert set(json.loads(capsys.readouterr().out)["metrics"]) == {
        f"test/{metric}" for metric in ("bleu", "chrf", "loss", "nll")
    }
    assert main(["infer", str(run), str(lines)]) == 0
    written = capsys.readouterr().out.splitlines()
    assert len(written) == 3
    assert written[1] == ""
    assert written == load(run).translate(lines.read_text().splitlines(), beam=1, output_ratio=1.0)
    assert main(["infer", str(run), str(lines), "--beam", "4", "--out", str(run.parent / "out.txt")]) == 0
    beamed = load(run).translate(lines.read_text().splitlines(), beam=4, output_ratio=1.0)
    assert (run.parent / "out.txt").read_text().splitlines() == beamed


def test_standard_input(run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"two one\nsix\n")))
    assert main(["infer", str(run), "-"]) == 0
    assert capsys.readouterr().out.splitlines() == load(run).translate(["two one", "six"], beam=1, output_ratio=1.0)


def test_options_that_do_not_go_together(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", str(run), "--val-source", "a.en,b.en"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: --val-source a.en,b.en: --val-source and --val-target need as many files each")
    assert "`paceline eval --help` lists all options" in said
    assert main(["eval", str(run), "--val-source", "a.en"]) == 2  # not with the run's own translations
    assert "--val-source and --val-target need as many files each" in capsys.readouterr().err


def test_export_is_the_model(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(run), str(tmp_path / "model"), "--checkpoint", "last"]) == 0
    assert sorted(path.name for path in (tmp_path / "model").iterdir()) == [
        "export.json",
        "model.safetensors",
        FILE,
    ]
    sentences = ["one two", "eight seven six"]
    assert load(tmp_path / "model").translate(sentences) == load(run, checkpoint="last").translate(sentences)
    model = paceline.load(run, checkpoint="last")
    exported = load(tmp_path / "model").model.state_dict()
    assert all(torch.equal(tensor, exported[name]) for name, tensor in model.state_dict().items())


def test_mean_of_checkpoints(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = sorted((run / "checkpoints").glob("step-*"))[-3:]
    weights = [read_weights(path) for path in paths]
    model = paceline.load(run, checkpoint="last", average=3)
    for name, tensor in model.state_dict().items():
        mean = torch.stack([each[name].double() for each in weights]).mean(0).float()
        assert torch.equal(tensor, mean), name
    assert main(["eval", str(run), "--checkpoint", "last", "--average", "3"]) == 0
    assert main(["eval", str(run), "--checkpoint", "last", "--average", "30"]) == 2
    assert "--keep-last 30" in capsys.readouterr().err


def test_a_checkpoint_by_its_name(run: Path) -> None:
    first, *_, last = (path.name for path in sorted((run / "checkpoints").glob("step-*")))
    for name in (first, last):
        assert torch.equal(
            load(run, checkpoint=name).model.state_dict()["embedding.weight"],
            read_weights(run / "checkpoints" / name)["embedding.weight"],
        )


def test_a_tokenizer_that_is_not_installed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Told before training, which would come to its first validation only after an epoch."""
    monkeypatch.setitem(sys.modules, "MeCab", None)
    monkeypatch.delitem(sys.modules, "sacrebleu.tokenizers.tokenizer_ja_mecab", raising=False)
    settings = toy.settings(tmp_path, epochs=1, workers=0, out=tmp_path / "run", bleu_tokenize="ja-mecab")
    assert main(["train", "translation", *typed(settings)]) == 2
    said = capsys.readouterr()
    assert "error: `bleu_tokenize` ja-mecab needs packages that are not installed" in said.err
    assert "pip install 'sacrebleu[ja]'" in said.err
    assert "train epoch" not in said.out + said.err


def test_packed_text_trains_the_same(run: Path, tmp_path: Path) -> None:
    train, val = run.parent / "train", run.parent / "val"
    for each in (train, val):
        assert main(["pack", f"{each}.en", f"{each}.de", str(tmp_path / f"{each.name}.h5")]) == 0
    changes = {"train_source": [], "train_target": [], "val_source": [], "val_target": []}
    packed = {"train_pairs": [tmp_path / "train.h5"], "val_pairs": [tmp_path / "val.h5"]}
    settings = toy.settings(tmp_path / "more", epochs=2, workers=0, out=tmp_path / "run") | changes | packed
    assert main(["train", "translation", *typed(settings)]) == 0
    assert read(tmp_path / "run" / "metrics.jsonl") == read(run / "metrics.jsonl")


def test_several_files_of_each_language_are_packed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Before, they were read as manifests of speech."""
    for name, text in {"a.en": "1\n2\n", "a.de": "eins\nzwei\n", "b.en": "3\n", "b.de": "drei\n"}.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    names = [str(tmp_path / name) for name in ("a.en", "a.de", "b.en", "b.de")]
    assert main(["pack", *names, str(tmp_path / "x.h5")]) == 0
    packed = paceline.PackedDataset(tmp_path / "x.h5")
    assert [tuple(packed[row].values()) for row in range(3)] == [("1", "eins"), ("2", "zwei"), ("3", "drei")]
    assert main(["pack", *names[:3], str(tmp_path / "y.h5")]) == 2
    assert "not as many of each (2 .en, 1 .de)" in capsys.readouterr().err


def test_pairs_of_json_are_packed_as_text(tmp_path: Path) -> None:
    pairs = [{"source": "eins", "target": "one"}, {"translation": {"source": "zwei", "target": "two"}}]
    (tmp_path / "a.jsonl").write_text("".join(f"{json.dumps(pair)}\n" for pair in pairs), encoding="utf-8")
    assert main(["pack", str(tmp_path / "a.jsonl"), str(tmp_path / "a.h5")]) == 0
    packed = paceline.PackedDataset(tmp_path / "a.h5")
    assert [packed[row] for row in range(2)] == [pairs[0], pairs[1]["translation"]]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "set --train-source and --train-target, or --train-pairs: what to train on"),
        (["--train-source", "a.en"], "need as many files each"),
        (["--train-pairs", "none.tsv"], "none.tsv: there is no such file"),
        (["--train-pairs", "none.tsv", "--heads", "3"], "--heads 3 do not divide --width 256"),
    ],
)
def test_mistakes(words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = ["--out", str(tmp_path / "run"), "--epochs", "1", "--device", "cpu"]
    assert main(["train", "translation", *words, *out]) == 2
    assert message in capsys.readouterr().err
