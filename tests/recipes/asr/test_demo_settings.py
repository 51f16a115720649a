"""The networks of the demo and of the digits' recipe leave room for what their corpora say."""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path

import pytest

from paceline.config.load import load
from paceline.recipes.asr.network import NetworkSettings, read_network
from paceline.recipes.asr.settings import AsrSettings
from paceline.recipes.asr.speak import SAMPLE_RATE, CorpusSettings, make_corpus

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
