"""An exported model is read back as it was, by us and by other programs; nothing else is overwritten."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import yaml
from safetensors import safe_open
from torch import Tensor, nn

from paceline.core.errors import AlreadyExists, Conflict, Failed, NotFound, Unreadable
from paceline.recipes.speech.exchange.export import (
    WeightsDiffer,
    as_yaml,
    check_labels,
    is_export,
    read_export,
    write_export,
)
from paceline.recipes.speech.network.config import NetworkInvalid, NetworkSettings, read_network, shipped_names
from paceline.recipes.speech.network.encoder import Decoder, Encoder

NETWORK = read_network(
    {
        "labels": [" ", "a", "é", "'", "y", "1", ":", "#"],
        "features": {"num_mels": 16, "high_hz": 7600},
        "spec_augment": {"time_masks": 2},
        "blocks": [
            {"filters": 8, "kernel": 5, "stride": 2, "separable": True},
            {"filters": 8, "kernel": 3, "repeat": 2, "residual": True, "dropout": 0.1},
        ],
    }
)
ABOUT = {"run": "runs/one\n# blocks: []", "wer": 0.12, "made by": "paceline 0.1.0"}


def weights_of(network: NetworkSettings) -> dict[str, Tensor]:
    torch.manual_seed(0)
    parts = {"encoder": Encoder(network), "decoder": Decoder(network.channels[-1], network.num_classes)}
    return nn.ModuleDict(parts).state_dict()


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    folder, weights = tmp_path / "deep" / "model", weights_of(NETWORK)
    write_export(folder, NETWORK, weights, ABOUT)
    network, found = read_export(folder)
    assert network == NETWORK
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], weights[name]) for name in weights)
    assert sorted(path.name for path in folder.iterdir()) == ["model.safetensors", "network.yaml"]
    assert [path.name for path in folder.parent.iterdir()] == ["model"]
    assert is_export(folder)
    assert read_network(folder) == NETWORK
    assert yaml.safe_load((folder / "network.yaml").read_text())["features"]["front_end"] == "nemo-0.11"


def test_other_programs_can_read_it(tmp_path: Path) -> None:
    weights = weights_of(NETWORK)
    write_export(tmp_path / "m", NETWORK, weights, ABOUT)
    with safe_open(str(tmp_path / "m" / "model.safetensors"), framework="np") as file:
        assert sorted(file.keys()) == sorted(weights)
        assert (file.get_tensor("decoder.conv.bias") == weights["decoder.conv.bias"].numpy()).all()
    plain = yaml.safe_load((tmp_path / "m" / "network.yaml").read_text(encoding="utf-8"))
    assert plain["labels"] == list(NETWORK.labels)
    assert plain["blocks"][0] == {"filters": 8, "kernel": 5, "stride": 2, "separable": True}
    assert plain["features"]["high_hz"] == 7600


@pytest.mark.parametrize("name", shipped_names())
def test_the_file_for_people_means_the_same_network(name: str) -> None:
    network = read_network(name)
    text = as_yaml(network, {"from": name})
    assert read_network(yaml.safe_load(text)) == network
    assert text.startswith(f"# from: {name}\n")
    assert text.count("\n- {filters: ") == len(network.blocks)


def test_about_stays_a_comment() -> None:
    text = as_yaml(NETWORK, ABOUT)
    assert all(line.startswith("# ") for line in text[: text.index("labels")].splitlines())
    assert read_network(yaml.safe_load(text)) == NETWORK


def test_views_and_shared_tensors_are_written_out(tmp_path: Path) -> None:
    weights = weights_of(NETWORK)
    name = "encoder.blocks.1.layers.0.conv.weight"
    weights[name] = weights[name].transpose(0, 1)
    weights["encoder.blocks.1.layers.1.conv.weight"] = weights[name]
    write_export(tmp_path / "m", NETWORK, weights, {})
    assert torch.equal(read_export(tmp_path / "m")[1][name], weights[name])


def test_an_export_is_replaced_anything_else_is_refused(tmp_path: Path) -> None:
    weights = weights_of(NETWORK)
    folder = tmp_path / "m"
    folder.mkdir()
    write_export(folder, NETWORK, weights, {})  # an empty folder is nobody's
    changed = {name: value + 1 for name, value in weights.items()}
    write_export(folder, NETWORK, changed, {})
    assert torch.equal(read_export(folder)[1]["decoder.conv.bias"], changed["decoder.conv.bias"])
    (folder / "network.yaml").unlink()
    with pytest.raises(AlreadyExists, match="it exists and is not an export"):
        write_export(folder, NETWORK, weights, {})
    (tmp_path / "file").write_text("mine")
    with pytest.raises(AlreadyExists, match="it exists and is not an export"):
        write_export(tmp_path / "file", NETWORK, weights, {})
    assert (tmp_path / "file").read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "m"]


def test_a_failing_disk_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = weights_of(NETWORK)
    write_export(tmp_path / "m", NETWORK, weights, {})
    real = os.rename

    def rename(old: Path, new: Path) -> None:
        if Path(old).name == "export":
            raise OSError(28, "No space left on device")
        real(old, new)

    monkeypatch.setattr(os, "rename", rename)
    with pytest.raises(Failed, match="No space left"):
        write_export(tmp_path / "m", NETWORK, {name: value + 1 for name, value in weights.items()}, {})
    monkeypatch.undo()
    assert torch.equal(read_export(tmp_path / "m")[1]["decoder.conv.bias"], weights["decoder.conv.bias"])
    assert [path.name for path in tmp_path.iterdir()] == ["m"]
    (tmp_path / "file").write_text("")
    with pytest.raises(Failed, match="cannot export to"):
        write_export(tmp_path / "file" / "m", NETWORK, weights, {})


def test_weights_must_be_those_of_the_network(tmp_path: Path) -> None:
    weights = weights_of(NETWORK)
    wrong = dict(weights) | {"decoder.conv.bias": torch.zeros(29), "decoder.extra": torch.zeros(1)}
    del wrong["decoder.conv.weight"]
    with pytest.raises(WeightsDiffer) as caught:
        write_export(tmp_path / "m", NETWORK, wrong, {})
    assert caught.value.mistakes == (
        "decoder.conv.weight is missing",
        "decoder.extra does not belong to it",
        "decoder.conv.bias is 29 instead of 9",
    )
    assert not (tmp_path / "m").exists()
    write_export(tmp_path / "m", NETWORK, weights, {})
    (tmp_path / "m" / "network.yaml").write_text(as_yaml(read_network("small"), {}))
    with pytest.raises(WeightsDiffer, match=r"\.\.\. and \d+ more"):
        read_export(tmp_path / "m")


def test_folders_that_are_no_export(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="no such folder"):
        read_export(tmp_path / "none")
    with pytest.raises(NotFound, match=r"there is no network\.yaml"):
        read_export(tmp_path)
    write_export(tmp_path / "m", NETWORK, weights_of(NETWORK), {})
    whole = (tmp_path / "m" / "model.safetensors").read_bytes()
    for content in (b"", whole[:100], whole[:-10], b"\xff" * 100):
        (tmp_path / "m" / "model.safetensors").write_bytes(content)
        with pytest.raises(Unreadable, match=r"model\.safetensors cannot be read"):
            read_export(tmp_path / "m")
    (tmp_path / "m" / "network.yaml").write_text("blocks: 3")
    with pytest.raises(NetworkInvalid, match=r"network\.yaml:1: blocks 3"):
        read_export(tmp_path / "m")


def test_other_labels_are_refused_with_both_sets() -> None:
    check_labels((" ", "a"), [" ", "a"], "m")
    with pytest.raises(Conflict, match="is a model for other labels") as caught:
        check_labels((" ", "a", "b"), (" ", "a", "ä"), "model.nemo")
    assert str(caught.value).splitlines() == [
        "model.nemo is a model for other labels",
        "  wanted      (3) space a b",
        "  the model's (3) space a ä",
        "  only wanted: (1) b",
        "  only the model's: (1) ä",
    ]
    with pytest.raises(Conflict, match="the same labels in another order"):
        check_labels(("a", "b"), ("b", "a"), Path("m"))
