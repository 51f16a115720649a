"""Checkpoints that every rank writes its pieces of: the same content, readable in every way a whole one is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from paceline.core.errors import Failed
from paceline.core.run_folder import RunFolder
from paceline.observe.journal import read
from paceline.train.checkpoint import pieces
from paceline.train.checkpoint import reader as restore
from paceline.train.checkpoint.writer import Checkpointer
from paceline.world.link import Link
from paceline.world.store import poll
from tests.ranks import run_ranks
from tests.train.sharded import fit

COMMON: dict[str, Any] = {"precision": "fp64", "ema": 0.9, "save_every_steps": 3, "keep_last": 9}


def run(size: int, folder: Path, machines: int = 1, **settings: Any) -> None:
    run_ranks(size, fit, {**COMMON, "out": str(folder), **settings}, True, machines=machines)


def losses(folder: Path) -> list[float]:
    return [record["loss"] for record in read(folder / "metrics.jsonl") if "loss" in record and "step" in record]


def newest(folder: Path) -> restore.Checkpoint:
    found = restore.newest(folder / "checkpoints")
    assert found.checkpoint is not None
    assert not found.broken
    return found.checkpoint


CUT = {"shard": "full", "checkpoint_form": "sharded"}
WHOLE = {"shard": "full", "checkpoint_form": "full"}
PLAIN = {"shard": "none"}
NODE = {"shard": "node", "checkpoint_form": "sharded", "machines": 2}


@pytest.mark.parametrize(
    "legs",
    [
        pytest.param([(4, CUT), (2, CUT), (1, PLAIN), (4, CUT)], marks=pytest.mark.long),
        [(2, PLAIN), (4, CUT), (2, WHOLE), (2, CUT)],
        pytest.param([(4, WHOLE), (2, CUT), (4, PLAIN), (1, CUT)], marks=pytest.mark.long),
        [(4, NODE), (4, CUT), (4, {**NODE, "checkpoint_form": "full"}), (2, WHOLE)],
    ],
    ids=["4-2-1-4", "ddp-cut-whole-cut", "whole-cut-ddp-1", "node-cut-node-whole"],
)
def test_every_form_goes_on_from_every_other(tmp_path: Path, legs: list[tuple[int, dict[str, Any]]]) -> None:
    """Three steps in each form and on so many ranks, against one run on two ranks."""
    run(2, tmp_path / "one")
    for number, (size, form) in enumerate(legs, 1):
        run(size, tmp_path / "legs", **form, steps=3 * number, resume="auto" if number > 1 else "no")
    assert losses(tmp_path / "legs") == pytest.approx(losses(tmp_path / "one"), rel=1e-10)


def fit_with_slow_lock(link: Link, settings: dict[str, Any]) -> None:
    """Train; the first rank gets the folder's lock when the others have had time to write there."""
    lock = RunFolder.lock

    def slow(run: RunFolder) -> None:
        poll(run.checkpoints.exists, 0.5)
        lock(run)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunFolder, "lock", slow)
        fit(link, settings)


def test_a_new_run_whose_first_rank_is_slow_is_not_taken_for_files_of_others(tmp_path: Path) -> None:
    run_ranks(2, fit_with_slow_lock, {**COMMON, **CUT, "out": str(tmp_path / "run"), "steps": 1})
    assert newest(tmp_path / "run").step == 1


def test_both_forms_hold_the_same(tmp_path: Path) -> None:
    for name, form in (("cut", CUT), ("whole", WHOLE)):
        run(4, tmp_path / name, **form, steps=4)
    ours, theirs = newest(tmp_path / "cut"), newest(tmp_path / "whole")
    (times, other_times) = (found.state["so_far"].pop("ranks") for found in (ours, theirs))
    assert len(times) == len(other_times) == 4
    assert ours.state == theirs.state
    assert ours.parts.keys() == theirs.parts.keys() == {"model", "optimizer", "ema", "scale"}
    for part, tensors in theirs.parts.items():
        assert ours.parts[part].keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert torch.equal(ours.parts[part][name], tensor), f"{part} {name}"
    # By another reader: rank 2 wrote its rows, and nothing else; no rank wrote a whole model.
    rows = load_file(ours.path / "model.shard-2-of-4.safetensors")
    whole = load_file(theirs.path / "model.safetensors")
    assert not any("running" in name for name in rows)
    for name, tensor in rows.items():
        chunks = whole[name].chunk(4)
        assert torch.equal(tensor, chunks[2] if len(chunks) > 2 else whole[name][:0])
    sizes = [path.stat().st_size for path in ours.path.glob("optimizer.shard-*")]
    assert len(sizes) == 4
    assert not list(ours.path.glob("rank-*"))
    # Damage to one rank's file is found, and the checkpoint before it is taken.
    file = ours.path / "ema.shard-3-of-4.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    found = restore.newest(tmp_path / "cut" / "checkpoints")
    assert [broken.file for broken in found.broken] == [file.name]
    assert found.checkpoint is not None
    assert found.checkpoint.step == 3


def test_a_rank_that_does_not_write_is_named_and_nothing_is_lost(tmp_path: Path) -> None:
    first, second = (
        Checkpointer(tmp_path, rank=rank, num_writers=3, timeout_s=0.3, background=rank > 0) for rank in (0, 1)
    )
    third = Checkpointer(tmp_path, rank=2, num_writers=3)
    rows = torch.arange(6.0).view(3, 2)
    for writer, rank in ((second, 1), (third, 2), (first, 0)):
        writer.save(1, {pieces.shard_name("model", rank, 3): {"w": rows[rank : rank + 1]}}, {})
        writer.wait()
    second.save(2, {pieces.shard_name("model", 1, 3): {"w": rows[1:2]}}, {})
    with pytest.raises(Failed, match=r"step-00000002: no pieces from rank 2 in 0.3 s"):
        first.save(2, {pieces.shard_name("model", 0, 3): {"w": rows[0:1]}}, {})
    found = restore.newest(tmp_path)
    assert found.checkpoint is not None
    assert found.checkpoint.step == 1
    assert torch.equal(found.checkpoint.parts["model"]["w"], rows)
    Checkpointer(tmp_path)  # the next start sweeps up
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    (found.checkpoint.path / "model.shard-1-of-3.safetensors").unlink()
    assert restore.newest(tmp_path).checkpoint is None


def test_who_writes_what() -> None:
    parts = {"model": {"w": torch.ones(2, 2), "count": torch.tensor(3)}, "scale": {"s": torch.ones(1)}}

    def is_row(part: str, name: str, tensor: torch.Tensor) -> bool:
        return part == "model" and tensor.ndim > 0

    shares = [pieces.share_of_rank(parts, rank, 2, is_row) for rank in (0, 1)]
    assert [{part: list(tensors) for part, tensors in share.items()} for share in shares] == [
        {"model.shard-0-of-2": ["w", "count"], "scale": ["s"]},
        {"model.shard-1-of-2": ["w"]},
    ]
    joined = pieces.join({**shares[0], **shares[1]})
    assert {part: sorted(tensors) for part, tensors in joined.items()} == {"model": ["count", "w"], "scale": ["s"]}
    assert joined["model"]["w"].shape == (4, 2)
    assert joined["model"]["count"] == 3
    assert pieces.missing(["model.shard-0-of-2", "scale"]) == ["model.shard-1-of-2"]
    assert pieces.whole_name("model.shard-0-of-2") == pieces.whole_name("model") == "model"
