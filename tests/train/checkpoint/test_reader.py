"""Reading checkpoints that were damaged, and loading weights by name."""

from __future__ import annotations

import json
import pickle
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import xxhash
from torch import nn

from paceline.core.errors import Conflict
from paceline.train.checkpoint.format import CheckpointBroken
from paceline.train.checkpoint.reader import PartMissing, best, load, load_by_name, newest
from paceline.train.checkpoint.writer import Checkpointer


def two_saves(folder: Path) -> tuple[Path, Path]:
    with_value = {10: 1.0, 20: 2.0}
    checkpointer = Checkpointer(folder)
    for step, value in with_value.items():
        parts = {"model": {"w": torch.full((300,), value)}, "ema": {"w": torch.full((300,), -value)}}
        checkpointer.save(step, parts, {"epoch": step // 10}, score=value)
    checkpointer.close()
    return folder / "step-00000010", folder / "step-00000020"


def truncate(path: Path) -> str:
    raw = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(raw[:-1])
    return "model.safetensors"


def flip_byte(path: Path) -> str:
    raw = bytearray((path / "model.safetensors").read_bytes())
    raw[random.Random(0).randrange(len(raw))] ^= 1
    (path / "model.safetensors").write_bytes(raw)
    return "model.safetensors"


def lose_part(path: Path) -> str:
    (path / "ema.safetensors").unlink()
    return "ema.safetensors"


def garble_state(path: Path) -> str:
    size = (path / "state.json").stat().st_size
    (path / "state.json").write_bytes(b"\xff" * size)
    return "state.json"


def lose_digests(path: Path) -> str:
    (path / "digests.json").unlink()
    return "digests.json"


def garble_digests(path: Path) -> str:
    (path / "digests.json").write_bytes(b"[1, 2]")
    return "digests.json"


def empty_digests(path: Path) -> str:
    (path / "digests.json").write_text(json.dumps({"model.safetensors": 3}))
    return "digests.json"


def be_a_file(path: Path) -> str:
    path.rename(path.with_name("elsewhere"))
    path.write_text("not a folder")
    return "digests.json"


FAULTS = [truncate, flip_byte, lose_part, garble_state, lose_digests, garble_digests, empty_digests, be_a_file]


@pytest.mark.parametrize("damage", FAULTS, ids=lambda damage: damage.__name__)
def test_a_damaged_newest_is_named_and_skipped_for_the_one_before(
    damage: Callable[[Path], str], tmp_path: Path
) -> None:
    older, newer = two_saves(tmp_path)
    file = damage(newer)
    found = newest(tmp_path)
    assert [(error.path, error.file) for error in found.broken] == [(newer, file)]
    assert str(newer / file) in str(found.broken[0])
    assert found.checkpoint is not None
    assert (found.checkpoint.path, found.checkpoint.step, found.checkpoint.state) == (older, 10, {"epoch": 1})
    assert torch.equal(found.checkpoint.parts["model"]["w"], torch.ones(300))
    with pytest.raises(CheckpointBroken):
        load(newer)


def test_a_flipped_bit_anywhere_in_a_tensor_file_is_noticed(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, {"model": {"w": torch.tensor([1.5, -2.0])}}, {})
    checkpointer.close()
    file = tmp_path / "step-00000001" / "model.safetensors"
    raw = file.read_bytes()
    header, weights = range(0, 8 * (len(raw) - 8), 101), range(8 * (len(raw) - 8), 8 * len(raw))
    for position in (*header, *weights):
        damaged = bytearray(raw)
        damaged[position // 8] ^= 1 << position % 8
        file.write_bytes(damaged)
        assert newest(tmp_path).checkpoint is None
    file.write_bytes(raw)
    assert newest(tmp_path).checkpoint is not None


def test_nothing_sound_is_no_checkpoint_with_all_reasons(tmp_path: Path) -> None:
    for path in two_saves(tmp_path):
        truncate(path)
    found = newest(tmp_path)
    assert found.checkpoint is None
    assert [error.path.name for error in found.broken] == ["step-00000020", "step-00000010"]
    assert newest(tmp_path / "absent") == best(tmp_path / "absent")
    assert newest(tmp_path / "absent").checkpoint is None


def test_sizes_are_checked_even_without_digests(tmp_path: Path) -> None:
    _, newer = two_saves(tmp_path)
    assert load(newer, verify=False).step == 20
    truncate(newer)
    with pytest.raises(CheckpointBroken, match="bytes instead of"):
        load(newer, verify=False)


def test_some_parts_are_loaded_without_reading_the_others(tmp_path: Path) -> None:
    _, newer = two_saves(tmp_path)
    lose_part(newer)
    assert list(load(newer, ["model"]).parts) == ["model"]
    with pytest.raises(PartMissing, match="'task', it has model, ema") as failure:
        newest(tmp_path, ["task"])
    assert failure.value.part == "task"


def test_changing_loaded_tensors_leaves_the_file_alone(tmp_path: Path) -> None:
    _, newer = two_saves(tmp_path)
    load(newer).parts["model"]["w"].zero_()
    assert torch.equal(load(newer).parts["model"]["w"], torch.full((300,), 2.0))


class Bomb:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return (Path.touch, (self.marker,))


@pytest.mark.parametrize("file", ["model.safetensors", "state.json", "digests.json"])
def test_a_planted_pickle_is_never_executed(file: str, tmp_path: Path) -> None:
    _, newer = two_saves(tmp_path)
    marker = tmp_path / "executed"
    payload = pickle.dumps(Bomb(marker))
    (newer / file).write_bytes(payload)
    if file != "digests.json":  # an attacker would mend the digest
        entries = json.loads((newer / "digests.json").read_text())
        entries[file] = {"bytes": len(payload), "xxh3_128": xxhash.xxh3_128_hexdigest(payload)}
        (newer / "digests.json").write_text(json.dumps(entries))
    for verify in (True, False):
        with pytest.raises(CheckpointBroken, match=file):
            load(newer, verify=verify)
    assert not marker.exists()
    pickle.loads(payload)
    assert marker.exists()


def test_a_format_from_the_future_is_refused(tmp_path: Path) -> None:
    _, newer = two_saves(tmp_path)
    text = (newer / "state.json").read_text().replace('"format": 1', '"format": 9')
    (newer / "state.json").write_text(text)
    entries = json.loads((newer / "digests.json").read_text())
    entries["state.json"] = {"bytes": len(text), "xxh3_128": xxhash.xxh3_128_hexdigest(text.encode())}
    (newer / "digests.json").write_text(json.dumps(entries))
    with pytest.raises(CheckpointBroken, match="format 9"):
        load(newer)


def head(num_classes: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, num_classes))


def test_load_by_name_takes_what_fits_and_says_what_does_not() -> None:
    source, target = head(5), head(2)
    kept_head = target[2].weight.detach().clone()
    tensors = {**source.state_dict(), "extra": torch.zeros(1)}
    del tensors["1.bias"]
    report = load_by_name(target, tensors)
    assert report.missing == ["1.bias"]
    assert report.unexpected == ["extra"]
    assert report.mismatched == {"2.weight": ((2, 3), (5, 3)), "2.bias": ((2,), (5,))}
    assert sorted(report.loaded) == sorted(set(target.state_dict()) - {"1.bias", "2.weight", "2.bias"})
    assert torch.equal(target[0].weight, source[0].weight)
    assert torch.equal(target[2].weight, kept_head)
    assert target[0].weight.requires_grad
    assert target[0].weight.is_leaf


def test_load_by_name_refuses_weights_of_another_model() -> None:
    with pytest.raises(Conflict, match=r"the model has 0\.weight.*the checkpoint has module\.0\.weight"):
        load_by_name(head(5), {f"module.{name}": value for name, value in head(5).state_dict().items()})
