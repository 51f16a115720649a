"""Conformers trained through the whole of speech recognition: one answer on any number of ranks, with characters and
subwords, after a resume, from packed files, with recomputed activations; and they learn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import paceline.asr
from paceline.cli.main import main
from paceline.config.problems import SettingsInvalid
from paceline.recipes.speech.settings import AsrSettings
from paceline.world.link import Link
from tests.ranks import run_ranks
from tests.recipes.speech import tiny

TIMEOUT_S = 240
SMALL = {"d_model": 16, "n_layers": 3, "n_heads": 2, "conv_kernel_size": 5, "subsampling_factor": 2}
NETWORK: dict[str, Any] = {
    **{name: value for name, value in tiny.NETWORK.items() if name != "blocks"},
    "conformer": {**SMALL, "dropout_att": 0.1, "stochastic_depth_drop_prob": 0.2},
}
FAST = {"subsampling": "dw_striding", "subsampling_conv_channels": 8, "self_attention_model": "rel_pos_local_attn"}
KINDS: dict[str, dict[str, Any]] = {
    "characters": {
        "network": {**NETWORK, "conformer": {**NETWORK["conformer"], **FAST, "att_context_size": [4, 4]}},
        "cr_ctc_weight": 0.2,
    },
    "subwords": {"network": NETWORK, "vocabulary": 10, "interctc_layers": (0,)},
}
TRAINED: dict[str, Any] = {"optimizer": "adamw", "lr": 0.01, "epochs": 2, "val_every_epochs": 2, "level": 0}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("speech")
    tiny.speech(folder, "train", 26, seed=1)  # batches of 8 leave 2: fewer than grains and ranks
    tiny.speech(folder, "dev", 6, seed=2)
    return folder


def train(link: Link, data: Path, out: Path, changes: dict[str, Any]) -> dict[str, list[float]]:
    config = tiny.settings(data, out=out / str(link.world.size), **{**TRAINED, **changes})
    model = tiny.train(config, link).stepper.model
    return {name: parameter.detach().flatten().tolist() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("kind", KINDS)
def test_losses_and_weights_are_the_same_bits_on_any_number_of_ranks(kind: str, tmp_path: Path, data: Path) -> None:
    """With dropout, masks, layers left out, batch norm of speech frames, InterCTC or two views."""
    found = {size: run_ranks(size, train, data, tmp_path, KINDS[kind], timeout_s=TIMEOUT_S) for size in (1, 2, 4)}
    expected = tiny.losses_of(tmp_path / "1")
    assert len(expected) == 8
    assert expected[-1] < expected[0] / 2
    for size in (2, 4):
        assert tiny.losses_of(tmp_path / str(size)) == expected
        assert all(weights == found[1][0] for weights in found[size])


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_goes_on_within_an_epoch_from_manifests_and_packed_files(kind: str, tmp_path: Path, data: Path) -> None:
    packed = tmp_path / "train.h5"
    assert main(["pack", str(data / "train.json"), str(packed)]) == 0
    changes = {**TRAINED, **KINDS[kind], "ema": 0.5, "save_every_steps": 1, "keep_last": 99}
    whole = tiny.train(tiny.settings(data, out=tmp_path / "whole", **changes))
    middle = tmp_path / "whole" / "checkpoints" / "step-00000003"
    changes |= {"train_manifest": (packed,)}
    again = tiny.train(tiny.settings(data, out=tmp_path / "packed", **changes))
    resumed = tiny.train(tiny.settings(data, out=tmp_path / "on", **changes, resume=middle, allow_change=True))
    expected = tiny.losses_of(tmp_path / "whole")
    assert tiny.losses_of(tmp_path / "packed") == expected
    assert tiny.losses_of(tmp_path / "on") == expected[3:]
    for other in (again, resumed):
        for name, tensor in whole.stepper.model.state_dict().items():
            assert torch.equal(tensor, other.stepper.model.state_dict()[name]), name


def test_recomputed_activations_change_no_number(tmp_path: Path, data: Path) -> None:
    for name, patterns in (("kept", ()), ("again", ("encoder.layers.*",))):
        changes = {**TRAINED, **KINDS["subwords"], "epochs": 1, "checkpoint_activations": patterns}
        tiny.train(tiny.settings(data, out=tmp_path / name, **changes))
    assert tiny.losses_of(tmp_path / "again") == tiny.losses_of(tmp_path / "kept")


def test_it_learns_and_is_exported(tmp_path: Path, data: Path) -> None:
    """Its training data, in 160 steps; its export and its archive for NeMo hear what the run hears."""
    still = dict.fromkeys(("dropout", "dropout_pre_encoder", "dropout_emb", "dropout_att"), 0.0)
    network = {**NETWORK, "spec_augment": {}, "conformer": {**SMALL, **still, "n_layers": 2, "d_model": 32}}
    changes = {"network": network, "optimizer": "adamw", "lr": 0.01, "vocabulary": 10, "epochs": 40, "grains": 1}
    run = tmp_path / "run"
    tiny.train(tiny.settings(data, out=run, **changes, val_every_epochs=40, val_manifest=(str(data / "train.json"),)))
    assert tiny.validations_of(run)[-1]["train/cer"] < 0.1
    files = [data / line["audio_filepath"] for line in tiny.lines_of(data / "dev.json")]
    heard = paceline.asr.load(run).transcribe(files)
    for target in ("exported", "model.nemo"):
        assert main(["export", str(run), str(tmp_path / target)]) == 0
        assert paceline.asr.load(tmp_path / target).transcribe(files) == heard
    assert all(heard)


def test_the_networks_file_advises_how_to_train_it_and_says_so(
    tmp_path: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    advised = AsrSettings(network="fastconformer-s", train_manifest=("a.json",), epochs=1)
    assert (advised.optimizer, advised.lr, advised.betas) == ("adamw", 0.001, (0.9, 0.98))
    own = AsrSettings(network="fastconformer-s", train_manifest=("a.json",), epochs=1, lr=0.5, warmup_steps=7)
    assert (own.optimizer, own.lr, own.warmup_ratio) == ("adamw", 0.5, None)
    other = AsrSettings(network="fastconformer-s", train_manifest=("a.json",), epochs=1, optimizer="novograd")
    assert (other.lr, other.betas) == (0.01, (0.95, 0.5))
    assert AsrSettings(train_manifest=("a.json",), epochs=1).optimizer == "novograd"
    (tmp_path / "net.yaml").write_text(yaml.safe_dump({**NETWORK, "recipe": {"optimizer": "adamw", "lr": 0.002}}))
    plain = {name: getattr(tiny.settings(data), name) for name in ("train_manifest", "val_manifest")}
    shown = {"loggers": (), "progress": "none", "device": "cpu", "workers": 0, "epochs": 1}
    tiny.train(AsrSettings(**plain, **shown, network=str(tmp_path / "net.yaml"), out=tmp_path / "run"))
    said = "the network's file trains with lr 0.002, optimizer adamw; what you set yourself wins"
    assert said in capsys.readouterr().out
    (tmp_path / "net.yaml").write_text(yaml.safe_dump({**NETWORK, "recipe": {"lrr": 0.002}}))
    with pytest.raises(SettingsInvalid, match="lrr: there is no such setting"):
        AsrSettings(**plain, epochs=1, network=str(tmp_path / "net.yaml"))
