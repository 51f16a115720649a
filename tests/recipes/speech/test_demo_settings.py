"""The demo: its settings give way to the user's, what it says at the end; its network has room for what is said."""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from paceline.cli.main import main
from paceline.config.load import load
from paceline.config.train_command import POSITIONAL, train_options
from paceline.core.run_folder import METRICS
from paceline.recipes.speech.commands import demo
from paceline.recipes.speech.demo import speak
from paceline.recipes.speech.demo.speak import SAMPLE_RATE, CorpusSettings, make_corpus
from paceline.recipes.speech.network.config import NetworkSettings, read_network
from paceline.recipes.speech.settings import AsrSettings

ROOT = Path(__file__).parents[3]
FSDD = ROOT.parent / "shared" / "data" / "fsdd"


def least_room(network: NetworkSettings, manifests: Iterable[Path], fastest: float = 1.0) -> float:
    """The least frames per frame that CTC needs, a letter each and a blank between equal ones, of any utterance."""
    stride_s = network.features.stride_s
    for block in network.blocks:
        stride_s *= block.stride
    lines = [json.loads(line) for manifest in manifests for line in manifest.read_text().splitlines()]
    needed = [len(line["text"]) + sum(a == b for a, b in pairwise(line["text"])) for line in lines]
    return min(line["duration"] / fastest / stride_s / need for line, need in zip(lines, needed, strict=True))


def test_mistakes_are_said_before_anything_is_spoken(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--epoch", "3", "--runs-dir", str(tmp_path / "runs")]) == 2
    said = capsys.readouterr()
    assert "did you mean --epochs?" in said.err
    assert said.out == ""
    assert not (tmp_path / "runs").exists()


def test_the_demo_network_has_frames_for_all_letters(tmp_path: Path) -> None:
    network = read_network("small")
    corpus = make_corpus(tmp_path / "corpus", CorpusSettings(num_train=400, num_val_seen=20, num_val_unseen=50))
    assert network.sample_rate == SAMPLE_RATE
    assert least_room(network, [corpus.train, corpus.val_seen, corpus.val_unseen]) > 1.05


def test_the_digits_recipe_has_frames_and_labels_for_all_letters() -> None:
    if not FSDD.is_dir():
        pytest.skip(f"{FSDD} is not here")
    manifest, config = FSDD / "train.json", ROOT / "examples" / "asr" / "fsdd.yaml"
    settings = load(AsrSettings, ["--config", str(config), "--train-manifest", str(manifest)], prog="paceline train")
    letters = {letter for line in manifest.read_text().splitlines() for letter in json.loads(line)["text"]}
    assert set(settings.network.labels) == letters
    assert settings.network.sample_rate == 8000
    assert settings.speed_range is not None
    assert least_room(settings.network, [manifest], fastest=settings.speed_range[1]) > 1.05


# -- what is typed -----------------------------------------------------------------------------------------------------


def typed_by(monkeypatch: pytest.MonkeyPatch, *words: object) -> dict[str, Any]:
    """The settings that the demo trains with, without training and without a corpus."""
    seen: list[list[str]] = []
    monkeypatch.setattr(demo, "_speak", lambda folder: None)
    monkeypatch.setattr(demo.training, "run", lambda given: seen.append(given) or 1)
    assert demo.run([str(word) for word in words]) == 1
    options = load(train_options(AsrSettings), seen[0], prog="paceline train", positional=POSITIONAL)
    return options.model_dump()


def test_the_demos_settings_give_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    plain = typed_by(monkeypatch)
    assert (plain["epochs"], plain["global_batch"], plain["lr"]) == (4, 32, 0.02)
    assert plain["train_manifest"] == (tmp_path / "runs" / "demo-speech" / "train.json",)
    assert plain["out"].parent == Path("runs")
    (tmp_path / "demo.yaml").write_text(
        "epochs: 3\nnetwork: quartznet5x5\nruns_dir: elsewhere\nval-manifest: [a.json]\n"
    )
    filed = typed_by(monkeypatch, "--config", "demo.yaml", "--lr", 0.5)
    assert (filed["epochs"], filed["global_batch"], filed["lr"]) == (3, 32, 0.5)
    assert len(filed["network"]["blocks"]) > 5
    assert filed["train_manifest"] == (tmp_path / "elsewhere" / "demo-speech" / "train.json",)
    assert filed["val_manifest"] == (str(tmp_path / "a.json"),)
    assert filed["out"].parent == Path("elsewhere")
    assert typed_by(monkeypatch, "--exp-name", "mine")["out"] is None
    assert typed_by(monkeypatch, "--benchmark")["out"] is None
    assert typed_by(monkeypatch, "--config", "demo.yaml", "--epochs", 9)["epochs"] == 9


def test_own_words_leave_out_what_is_set() -> None:
    words = demo.own_words({"lr", "val_manifest"}, Path("c"), Path("o"), num_cores=16)
    assert words[: words.index("--procs")] == [
        *("--network", "small", "--epochs", "4", "--global-batch", "32", "--grains", "4", "--device", "cpu"),
    ]
    assert words[words.index("--procs") :] == ["--procs", "4", "--train-manifest", "c/train.json", "--out", "o"]
    assert demo.own_words({}, Path("c"), None, num_cores=2)[-1].startswith("unseen-voices=c/val-unseen.json,")
    on_gpu = demo.own_words({}, Path("c"), None, num_cores=16, on_gpu=True)
    assert on_gpu[on_gpu.index("--device") :][:4] == ["--device", "cuda", "--procs", "1"]


@pytest.mark.parametrize(
    ("given", "num_gpus", "expected"),
    [
        ({}, 0, False),
        ({}, 1, True),
        ({}, 8, True),
        ({"device": "cpu"}, 1, False),
        ({"device": "cuda"}, 1, True),
        ({"procs": "4"}, 1, False),  # four processes of the CPU, as typed
        ({"procs": 2}, 8, True),
        ({"procs": "auto"}, 8, True),
    ],
)
def test_a_gpu_is_used_where_there_is_one(given: dict[str, Any], num_gpus: int, expected: bool) -> None:
    assert demo.uses_gpu(given, num_gpus) is expected


# -- what is said at the end -------------------------------------------------------------------------------------------

EPOCH = {"kind": "epoch", "step": 1, "steps": 10, "seconds": [{"compute": 8.0, "data": 2.0}] * 2}
SAMPLES = [{"reference": "a b", "hypothesis": "a"}]


def closed(folder: Path, *records: dict[str, Any]) -> list[str]:
    (folder / METRICS).write_text("".join(json.dumps(record) + "\n" for record in records))
    return demo.closing(folder, folder / "corpus", 70.0)


def test_the_end_of_a_demo(tmp_path: Path) -> None:
    rates = {"unseen-voices/wer": 0.25, "unseen-voices/cer": 0.1, "seen-voices/wer": 0.125}
    record = {"kind": "validation", "step": 9, **rates, "samples": {"unseen-voices": SAMPLES, "seen-voices": []}}
    lines = closed(tmp_path, EPOCH, record, EPOCH)
    assert lines[0] == "word error rate: 25.0 % on voices never heard in training, 12.5 % on voices heard"
    assert lines[2:4] == ["  said   a b", "  heard  a"]
    assert "trained 2 epochs, 20 steps in 0:00:20 (80.0% computing time); everything took 0:01:10" in lines
    assert f"  paceline infer {tmp_path} FILE.flac" in lines


def test_the_end_of_a_demo_that_was_told_otherwise(tmp_path: Path) -> None:
    other = {"kind": "validation", "step": 9, "mine/wer": None, "yours/wer": 1.0, "mine/loss": 2.0}
    assert closed(tmp_path, EPOCH, other)[0] == "word error rate: unknown on mine, 100.0 % on yours"
    without = closed(tmp_path, EPOCH)  # --mode train
    assert without[0].startswith("trained 1 epoch, 10 steps")
    assert not any("paceline eval" in line for line in without)
    assert closed(tmp_path)[0] == "everything took 0:01:10"


def test_a_corpus_that_is_there_is_looked_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    few = CorpusSettings(num_train=4, num_val_seen=2, num_val_unseen=2)
    make_corpus(tmp_path / "corpus", few)
    monkeypatch.setattr(speak, "CorpusSettings", lambda: few)
    looked: list[Path] = []
    digest = speak._digest
    monkeypatch.setattr(speak, "_digest", lambda folder, settings: looked.append(folder) or digest(folder, settings))
    demo._speak(tmp_path / "corpus")
    assert len(looked) == 1
    assert "corpus: 8 utterances" in capsys.readouterr().out
