"""Transducers trained through the whole of speech recognition: one answer on any number of ranks, after a resume, from
packed files; they learn, are used, exported, and refuse what they cannot do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import paceline.asr
from paceline.cli.main import main
from paceline.config.problems import SettingsInvalid
from paceline.recipes.speech.decoding.transducer import TransducersAreGreedy
from paceline.recipes.speech.settings import AsrSettings
from paceline.recipes.speech.streaming.use import StreamsAreForCtc
from paceline.world.link import Link
from tests.bf16 import needs_bf16
from tests.ranks import run_ranks
from tests.recipes.speech import tiny
from tests.recipes.speech.test_conformer import NETWORK as CONFORMER
from tests.recipes.speech.test_conformer import SMALL, TRAINED

TIMEOUT_S = 240
SIZES = {"pred_hidden": 12, "joint_hidden": 16}
KINDS: dict[str, dict[str, Any]] = {
    "characters": {"network": {**CONFORMER, "transducer": SIZES}, "fastemit": 0.01},
    "subwords": {
        "network": {**CONFORMER, "transducer": {**SIZES, "pred_rnn_layers": 2, "ctc": True}},
        "vocabulary": 10,
        "interctc_layers": (0,),
    },
    "blocks": {"network": {**tiny.NETWORK, "transducer": {**SIZES, "joint_activation": "tanh"}}},
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("speech")
    tiny.speech(folder, "train", 26, seed=1)
    tiny.speech(folder, "dev", 6, seed=2)
    return folder


def train(link: Link, data: Path, out: Path, changes: dict[str, Any]) -> dict[str, list[float]]:
    config = tiny.settings(data, out=out / str(link.world.size), **{**TRAINED, **changes})
    model = tiny.train(config, link).stepper.model
    return {name: parameter.detach().flatten().tolist() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("kind", ["characters", "subwords"])
def test_losses_and_weights_are_the_same_bits_on_any_number_of_ranks(kind: str, tmp_path: Path, data: Path) -> None:
    """With dropout, masks, layers left out; as a hybrid with InterCTC, too."""
    found = {size: run_ranks(size, train, data, tmp_path, KINDS[kind], timeout_s=TIMEOUT_S) for size in (1, 2, 4)}
    expected = tiny.losses_of(tmp_path / "1")
    assert len(expected) == 8
    assert expected[-1] < expected[0]
    for size in (2, 4):
        assert tiny.losses_of(tmp_path / str(size)) == expected
        assert all(weights == found[1][0] for weights in found[size])
        assert tiny.validations_of(tmp_path / str(size)) == tiny.validations_of(tmp_path / "1")


@pytest.mark.parametrize("kind", ["blocks", "subwords"])
def test_a_run_goes_on_within_an_epoch_from_manifests_and_packed_files(kind: str, tmp_path: Path, data: Path) -> None:
    packed = tmp_path / "train.h5"
    assert main(["pack", str(data / "train.json"), str(packed)]) == 0
    changes = {**TRAINED, **KINDS[kind], "ema": 0.5, "save_every_steps": 1, "keep_last": 99}
    whole = tiny.train(tiny.settings(data, out=tmp_path / "whole", **changes))
    middle = tmp_path / "whole" / "checkpoints" / "step-00000003"
    changes |= {"train_manifest": (packed,)}
    resumed = tiny.train(tiny.settings(data, out=tmp_path / "on", **changes, resume=middle, allow_change=True))
    assert tiny.losses_of(tmp_path / "on") == tiny.losses_of(tmp_path / "whole")[3:]
    for name, tensor in whole.stepper.model.state_dict().items():
        assert torch.equal(tensor, resumed.stepper.model.state_dict()[name]), name


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"level": 2}, id="bf16", marks=needs_bf16),
        pytest.param({"checkpoint_activations": ("encoder.layers.*", "decoder")}, id="recomputed"),
    ],
)
def test_losses_are_the_same_in_other_ways_to_them(changes: dict[str, Any], tmp_path: Path, data: Path) -> None:
    for name, more in (("plain", {}), ("other", changes)):
        tiny.train(tiny.settings(data, out=tmp_path / name, **{**TRAINED, **KINDS["subwords"], "epochs": 1, **more}))
    expected = tiny.losses_of(tmp_path / "plain")
    tolerance = 0.1 if "level" in changes else 0.0
    assert tiny.losses_of(tmp_path / "other") == pytest.approx(expected, rel=tolerance, abs=0.0)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Path:
    """A transducer that has learned its training data in 120 steps, behind 8-fold subsampling."""
    still = dict.fromkeys(("dropout", "dropout_pre_encoder", "dropout_emb", "dropout_att"), 0.0)
    conformer = {**SMALL, **still, "n_layers": 2, "d_model": 32, "subsampling_factor": 8}
    sizes = {"pred_hidden": 16, "joint_hidden": 32, "pred_dropout": 0.0, "joint_dropout": 0.0}
    network = {**CONFORMER, "spec_augment": {}, "conformer": conformer, "transducer": sizes}
    changes = {"network": network, "optimizer": "adamw", "lr": 0.01, "epochs": 30, "grains": 1}
    folder = tmp_path_factory.mktemp("run")
    tiny.train(
        tiny.settings(data, out=folder, **changes, val_every_epochs=15, val_manifest=(str(data / "train.json"),))
    )
    return folder


def test_it_learns_and_is_exported(run: Path, tmp_path: Path, data: Path) -> None:
    """Its export and its archive for NeMo hear what the run hears."""
    errors = [scores["train/cer"] for scores in tiny.validations_of(run)]
    assert errors[-1] < 0.1
    assert errors[-1] < errors[0]
    lines = tiny.lines_of(data / "train.json")[:6]
    files = [data / line["audio_filepath"] for line in lines]
    heard = paceline.asr.load(run).transcribe(files)
    assert (
        sum(text == line["text"] for text, line in zip(heard, lines, strict=True)) >= 4
    )  # another CPU rounds otherwise
    for target in ("exported", "model.nemo"):
        assert main(["export", str(run), str(tmp_path / target)]) == 0
        recognizer = paceline.asr.load(tmp_path / target)
        assert recognizer.network.transducer is not None
        assert recognizer.transcribe(files) == heard


def test_words_have_times(run: Path, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = tiny.lines_of(data / "train.json")[0]
    path, length = str(data / line["audio_filepath"]), line["duration"]
    recognizer = paceline.asr.load(run)
    (best,) = recognizer.hypotheses([path])[0]
    assert [word.text for word in best.words] == recognizer.transcribe([path])[0].split()
    times = [time for word in best.words for time in (word.start, word.end)]
    assert times == sorted(times)
    assert 0 <= times[0] < times[-1] <= length + 0.1
    assert best.score < 0
    capsys.readouterr()
    assert main(["infer", str(run), path, "--json"]) == 0
    (shown,) = (json.loads(row) for row in capsys.readouterr().out.splitlines())
    assert [word["word"] for word in shown["words"]] == [word.text for word in best.words]
    assert shown["words"][0]["start"] == best.words[0].start


def test_its_encoder_starts_another_run(run: Path, tmp_path: Path, data: Path) -> None:
    """With a decoder for CTC."""
    network = json.loads((run / "run.json").read_text())["settings"]["network"]
    changes = {"network": network, "head": "ctc", "epochs": 1, "optimizer": "adamw", "lr": 1e-9}
    checkpoint = max((run / "checkpoints").glob("step-*"))
    fitted = tiny.train(
        tiny.settings(data, out=tmp_path / "ctc", **changes, init_from=checkpoint, new_decoder=True, grains=1)
    )
    state = fitted.stepper.model.state_dict()
    assert "decoder.conv.weight" in state
    assert not [name for name in state if "joint" in name]


def test_a_head_is_put_on_a_network() -> None:
    plain = {"network": "fastconformer-s", "train_manifest": ("a.json",), "epochs": 1}
    assert AsrSettings(**plain).network.transducer is None
    network = AsrSettings(**plain, head="transducer").network
    assert network.transducer is not None
    assert (network.transducer.pred_hidden, network.transducer.ctc) == (320, False)
    again = AsrSettings(**{**plain, "network": network.model_dump(), "head": "hybrid"}).network
    assert again.transducer == network.transducer.model_copy(update={"ctc": True})
    assert AsrSettings(**{**plain, "network": again.model_dump(), "head": "ctc"}).network.transducer is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cr_ctc_weight": 0.2}, "cr_ctc_weight compares outputs of CTC"),
        ({"interctc_layers": (1,)}, "interctc_layers are read by CTC.*`--head hybrid`"),
        ({"fastemit": 0.1, "head": "ctc"}, "fastemit is for transducers"),
    ],
)
def test_what_has_no_meaning_is_refused_with_the_settings(changes: dict[str, Any], message: str) -> None:
    plain = {"network": "fastconformer-s", "head": "transducer", "train_manifest": ("a.json",), "epochs": 1}
    with pytest.raises(SettingsInvalid, match=message):
        AsrSettings(**{**plain, **changes})


def test_beams_and_streams_are_refused(run: Path, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(data / tiny.lines_of(data / "train.json")[0]["audio_filepath"])
    with pytest.raises(TransducersAreGreedy):
        paceline.asr.load(run, decoder="beam")
    recognizer = paceline.asr.load(run)
    with pytest.raises(StreamsAreForCtc, match="a transducer reads whole recordings"):
        recognizer.stream()
    with pytest.raises(StreamsAreForCtc):
        recognizer.transcribe_long(path)
    assert main(["eval", str(run), "--decoder", "beam"]) == 2
    assert "set `--decoder greedy`" in capsys.readouterr().err
    assert main(["infer", str(run), path, "--long-s", "0.1"]) == 2
    assert "set `--long-s` above the length" in capsys.readouterr().err
