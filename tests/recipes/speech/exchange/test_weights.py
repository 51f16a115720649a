"""Weights to start from: a NeMo archive, an export, a checkpoint; other labels, and the encoder alone."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.core.errors import Conflict, NotFound
from paceline.recipes.speech.exchange.export import WeightsDiffer, as_yaml, write_export
from paceline.recipes.speech.exchange.nemo import read_nemo
from paceline.recipes.speech.exchange.weights import read_model, read_weights
from paceline.recipes.speech.network.config import read_network
from paceline.train.checkpoint import reader as restore
from paceline.train.checkpoint.format import DIGESTS, STATE
from paceline.train.checkpoint.snapshot import digest_of
from paceline.train.run import open_run
from tests.recipes.speech import tiny
from tests.recipes.speech.exchange import test_nemo as theirs
from tests.train.small import alone

OTHER: dict[str, Any] = {**tiny.NETWORK, "labels": [" ", "c", "b", "a"]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("speech")
    tiny.speech(made, "train", 4, seed=1)
    return made


def started(folder: Path, **changes: Any) -> dict[str, Tensor]:
    """The weights before the first step."""
    trainer = open_run(tiny.task(), tiny.settings(folder, **{"global_batch": 4, **changes}), alone())
    return dict(trainer.stepper.model.state_dict())


@pytest.fixture(scope="module")
def checkpoint(folder: Path) -> Path:
    tiny.train(tiny.settings(folder, out=folder / "run", global_batch=4))
    return folder / "run" / "checkpoints" / "step-00000001"


@pytest.fixture(scope="module")
def weights(checkpoint: Path) -> dict[str, Tensor]:
    return restore.load(checkpoint, ["model"]).parts["model"]


def assert_taken(ours: Mapping[str, Tensor], given: Mapping[str, Tensor], but: str = "none of them") -> None:
    assert ours.keys() == given.keys()
    for name, tensor in given.items():
        if not name.startswith(but):
            assert torch.equal(ours[name], tensor), name


def test_from_a_checkpoint(folder: Path, checkpoint: Path, weights: dict[str, Tensor]) -> None:
    assert_taken(started(folder, init_from=checkpoint, seed=9), weights)
    fresh = started(folder, seed=9)
    assert not torch.equal(fresh["encoder.blocks.0.layers.0.pointwise.weight"], next(iter(weights.values())))


def test_from_an_export(folder: Path, tmp_path: Path, weights: dict[str, Tensor]) -> None:
    write_export(tmp_path / "model", read_network(tiny.NETWORK), weights, {"from": "a test"})
    assert_taken(started(folder, init_from=tmp_path / "model"), weights)


def test_from_a_nemo_archive(folder: Path, tmp_path: Path) -> None:
    """At 16 kHz, as NeMo's models are: the audio is resampled, and a step is trained."""
    path = theirs.archive(
        tmp_path / "model.nemo", theirs.config(theirs.BLOCKS), theirs.saved(theirs.their_model().state_dict())
    )
    found = read_model(path)
    assert found is not None
    network, expected = found
    settings = {"network": network, "global_batch": 4, "init_from": path, "max_lost_words": 1}  # it cannot write c
    assert_taken(started(folder, **settings), expected)
    trained = tiny.train(tiny.settings(folder, out=tmp_path / "run", **settings))
    assert torch.tensor(tiny.losses_of(tmp_path / "run")).isfinite().all()
    assert not torch.equal(trained.stepper.model.state_dict()["decoder.conv.weight"], expected["decoder.conv.weight"])


def test_an_archives_version_is_the_front_end_of_a_run(folder: Path, tmp_path: Path) -> None:
    """Of a new run whose network does not say; a run that began before goes on as it was."""
    path = theirs.archive(
        tmp_path / "model.nemo", theirs.config(theirs.BLOCKS), theirs.saved(theirs.their_model().state_dict())
    )
    file = tmp_path / "net.yaml"
    file.write_text(as_yaml(read_network(tiny.NETWORK), {}).replace("  front_end: nemo-0.11\n", ""))
    chosen: dict[str, Any] = {"network": str(file), "init_from": path}

    def front_end(**changes: Any) -> str:
        return str(tiny.settings(folder, **{**chosen, **changes}).network.features.front_end)

    assert front_end() == "nemo-1.0"
    assert front_end(front_end="nemo-2.5") == "nemo-2.5"
    assert front_end(init_from=None) == front_end(init_from=tmp_path / "absent.nemo") == "nemo-0.11"
    said: list[str] = []
    with pytest.raises(Conflict, match="is a model for other labels"):
        read_weights(path, read_network(OTHER), new_decoder=False, say=said.append)
    network, _ = read_nemo(path)
    old = network.model_copy(update={"features": network.features.model_copy(update={"front_end": "nemo-0.11"})})
    read_weights(path, old, new_decoder=False, say=said.append)
    assert "trained with the front end nemo-1.0" in said[-1]
    assert "--front-end nemo-1.0" in said[-1]
    file.write_text(as_yaml(read_network(tiny.NETWORK), {}))  # a file that says it is heard
    assert front_end() == "nemo-0.11"
    stored = tiny.settings(folder, **{**chosen, "network": read_network(file).model_dump(mode="json")})
    assert stored.network.features.front_end == "nemo-0.11"


def test_a_run_goes_on_with_the_front_end_it_began_with(folder: Path, tmp_path: Path) -> None:
    weights = started(folder)
    write_export(tmp_path / "model", read_network(tiny.NETWORK), weights, {})
    file = tmp_path / "net.yaml"
    file.write_text(as_yaml(read_network(tiny.NETWORK), {}).replace("  front_end: nemo-0.11\n", ""))
    settings = {"network": str(file), "init_from": tmp_path / "model", "out": tmp_path / "run", "global_batch": 4}
    tiny.train(tiny.settings(folder, **settings))
    newer = read_network(tiny.NETWORK).features.model_copy(update={"front_end": "nemo-2.5"})
    write_export(tmp_path / "model", read_network(tiny.NETWORK).model_copy(update={"features": newer}), weights, {})
    assert tiny.settings(folder, **{**settings, "out": None}).network.features.front_end == "nemo-2.5"
    again = tiny.settings(folder, **settings, resume="auto")
    assert again.network.features.front_end == "nemo-0.11"
    tiny.train(again)


def test_other_labels_are_refused_with_both_sets(folder: Path, tmp_path: Path, checkpoint: Path) -> None:
    write_export(tmp_path / "model", read_network(tiny.NETWORK), started(folder), {})
    nemo = theirs.archive(
        tmp_path / "model.nemo", theirs.config(theirs.BLOCKS), theirs.saved(theirs.their_model().state_dict())
    )
    sources: dict[Path, tuple[str, ...]] = {
        checkpoint: tiny.LABELS,
        tmp_path / "model": tiny.LABELS,
        nemo: tuple(theirs.LABELS),
    }
    for path, labels in sources.items():
        with pytest.raises(Conflict, match="is a model for other labels") as caught:
            started(folder, network=OTHER, init_from=path)
        names = " ".join("space" if label == " " else label for label in labels)
        assert f"the model's ({len(labels)}) {names}\n" in str(caught.value)
        assert f"{path} is a model for other labels" in str(caught.value)
        assert "wanted      (4) space c b a" in str(caught.value)


def test_a_checkpoint_that_was_moved_knows_its_labels(folder: Path, tmp_path: Path, checkpoint: Path) -> None:
    shutil.copytree(checkpoint, tmp_path / "moved")
    with pytest.raises(Conflict, match="is a model for other labels") as caught:
        started(folder, network=OTHER, init_from=tmp_path / "moved")
    assert f"the model's ({len(tiny.LABELS)})" in str(caught.value)
    assert "--new-decoder" in caught.value.hint


def without_about(checkpoint: Path, to: Path) -> Path:
    """A checkpoint as it was saved before it said anything of its task, and of its files."""
    record = json.loads((checkpoint / STATE).read_text())
    del record["state"]["about"], record["files"], record["xxh3_128"]
    shutil.copytree(checkpoint, to)
    (to / STATE).write_text(json.dumps(record))
    digests = json.loads((to / DIGESTS).read_text())
    digest = digest_of(to / STATE)
    digests[STATE] = {"bytes": digest.num_bytes, "xxh3_128": digest.xxh3_128}
    (to / DIGESTS).write_text(json.dumps(digests))
    return to


def test_an_older_checkpoint_is_known_by_its_run_or_not_at_all(
    folder: Path, tmp_path: Path, checkpoint: Path, weights: dict[str, Tensor]
) -> None:
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    old = without_about(checkpoint, tmp_path / "run" / "checkpoints" / checkpoint.name)
    said: list[str] = []
    network = read_network(OTHER)
    assert_taken(read_weights(old, network, new_decoder=False, say=said.append), weights)
    assert said == [f"{old} does not say which labels it is for: whether they are this network's could not be checked"]
    shutil.copy(folder / "run" / "run.json", tmp_path / "run")
    with pytest.raises(Conflict, match="is a model for other labels"):
        read_weights(old, network, new_decoder=False, say=said.append)
    assert len(said) == 1


def test_another_sample_rate_is_refused(folder: Path, tmp_path: Path, checkpoint: Path) -> None:
    write_export(tmp_path / "model", read_network(tiny.NETWORK), started(folder), {})
    for path in (checkpoint, tmp_path / "model"):
        for new_decoder in (False, True):
            with pytest.raises(Conflict, match="is a model for 8000 Hz, and the network is for 4000 Hz") as caught:
                started(folder, network={**tiny.NETWORK, "sample_rate": 4000}, init_from=path, new_decoder=new_decoder)
            assert "sample_rate: 8000" in caught.value.hint


def test_the_average_of_weights_is_taken_where_there_is_one(folder: Path, tmp_path: Path) -> None:
    tiny.train(tiny.settings(folder, out=tmp_path / "run", global_batch=4, epochs=3, ema=0.5))
    saved = restore.load(tmp_path / "run" / "checkpoints" / "step-00000003", ["model", "ema"]).parts
    ours = started(folder, init_from=tmp_path / "run" / "checkpoints" / "step-00000003")
    name = "decoder.conv.weight"
    assert torch.equal(ours[name], saved["ema"][name])
    assert not torch.equal(ours[name], saved["model"][name])


def test_the_encoder_alone_goes_with_any_labels(
    folder: Path, tmp_path: Path, checkpoint: Path, weights: dict[str, Tensor]
) -> None:
    """The decoder is the one that a fresh model of this seed would have."""
    more = {**tiny.NETWORK, "labels": [" ", "a", "b", "c", "d", "e"]}
    write_export(tmp_path / "model", read_network(tiny.NETWORK), weights, {})
    fresh = started(folder, network=more)
    assert fresh["decoder.conv.weight"].shape[0] == 7
    for path in (checkpoint, tmp_path / "model"):
        ours = started(folder, network=more, init_from=path, new_decoder=True)
        assert_taken(ours, weights, but="decoder.")
        assert torch.equal(ours["decoder.conv.weight"], fresh["decoder.conv.weight"])
        assert torch.equal(ours["decoder.conv.bias"], fresh["decoder.conv.bias"])


def test_weights_of_another_network_are_refused(folder: Path, tmp_path: Path, checkpoint: Path) -> None:
    """Even where some of them would fit by name and shape."""
    deeper = {**tiny.NETWORK, "blocks": [*tiny.NETWORK["blocks"][:2], *tiny.NETWORK["blocks"][1:]]}
    write_export(tmp_path / "model", read_network(tiny.NETWORK), started(folder), {})
    for path in (checkpoint, tmp_path / "model"):
        for new_decoder in (False, True):
            with pytest.raises(WeightsDiffer, match="encoder.blocks.2.layers.0.depthwise.weight is missing"):
                started(folder, network=deeper, init_from=path, new_decoder=new_decoder)


def test_what_holds_no_weights_is_said(folder: Path, tmp_path: Path, checkpoint: Path) -> None:
    with pytest.raises(NotFound, match="is a run, not one of its checkpoints") as caught:
        started(folder, init_from=folder / "run")
    assert caught.value.hint == f"name one of them: {checkpoint}"
    with pytest.raises(NotFound, match="there is no such file"):
        started(folder, init_from=tmp_path / "absent")
    with pytest.raises(NotFound, match="is not a checkpoint"):
        started(folder, init_from=tmp_path)
