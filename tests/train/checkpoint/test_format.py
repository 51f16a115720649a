"""Flipped bits, and parts that are missing, extra or renamed: noticed wherever they are, or without effect."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import paceline
from paceline.train.checkpoint.format import CheckpointBroken, score_of
from paceline.train.checkpoint.reader import Checkpoint, load, newest
from paceline.train.checkpoint.writer import Checkpointer
from tests.train.small import SmallTask

OLD = Path(__file__).parents[1] / "old_runs" / "alone" / "checkpoints"


def written(folder: Path, num_ranks: int) -> Path:
    """A checkpoint with an average, in one file per part or in pieces."""
    writers = [Checkpointer(folder, rank=rank, num_writers=num_ranks) for rank in range(num_ranks)]
    for rank, writer in enumerate(writers):
        name = "model" if num_ranks == 1 else f"model.shard-{rank}-of-{num_ranks}"
        parts = {name: {"w": torch.arange(3.0) + rank}}
        if rank == 0:
            parts |= {"ema": {"w": torch.tensor([7.0])}, "scale": {"scale": torch.tensor(2.0)}}
        writer.save(20, parts, {"epoch": 3, "rate": 0.1, "name": "a"}, score=0.5)
    for writer in reversed(writers):
        writer.close()
    return folder / "step-00000020"


def old(folder: Path) -> Path:
    """A checkpoint of commit ce01e4b."""
    path = max(OLD.glob("step-*"))
    return Path(shutil.copytree(path, folder / path.name))


MAKERS: dict[str, Callable[[Path], Path]] = {
    "whole": lambda folder: written(folder, 1),
    "pieces": lambda folder: written(folder, 3),
    "of ce01e4b": old,
}


def content(checkpoint: Checkpoint) -> Any:
    parts = {part: {name: tensor.tolist() for name, tensor in each.items()} for part, each in checkpoint.parts.items()}
    return checkpoint.step, checkpoint.score, checkpoint.state, parts


def places(file: Path, chance: random.Random) -> Iterator[tuple[int, int]]:
    """Bytes to damage: many of a JSON file; of tensors some of the length, the header, its padding and the values."""
    raw = file.read_bytes()
    if file.suffix == ".json":
        chosen = chance.sample(range(len(raw)), min(300, len(raw)))
    else:
        end = 8 + int.from_bytes(raw[:8], "little")
        ranges = (range(8), range(8, raw.rindex(b"}", 0, end) + 1), range(end - 9, end), range(end, len(raw)))
        chosen = [at for each in ranges for at in chance.sample(each, min(4, len(each)))]
    return ((at, chance.randrange(8)) for at in chosen)


@pytest.mark.parametrize("kind", MAKERS)
def test_a_flipped_bit_in_any_file_is_noticed_or_harmless(tmp_path: Path, kind: str) -> None:
    path, chance = MAKERS[kind](tmp_path), random.Random(4)
    whole, score, noticed = content(load(path)), score_of(path), 0
    for file in sorted(path.iterdir()):
        raw = file.read_bytes()
        for at, bit in places(file, chance):
            damaged = bytearray(raw)
            damaged[at] ^= 1 << bit
            file.write_bytes(damaged)
            try:
                assert content(load(path)) == whole, f"bit {bit} of byte {at} of {file.name}"
            except CheckpointBroken as error:
                noticed += 1
                assert error.path == path
            assert score_of(path) in (score, (None, "min"))
        file.write_bytes(raw)
    assert content(load(path)) == whole
    assert noticed > 100


def rename_part(path: Path) -> str:
    (path / "ema.safetensors").rename(path / "emb.safetensors")
    return "emb.safetensors"


def add_part(path: Path) -> str:
    shutil.copy(path / "ema.safetensors", path / "rank-0.safetensors")
    return "rank-0.safetensors"


def lose_part(path: Path) -> str:
    (path / "ema.safetensors").unlink()
    return "ema.safetensors"


def lose_entry(path: Path) -> str:
    """The one bit by which an average was lost without a word."""
    text = (path / "digests.json").read_bytes()
    (path / "digests.json").write_bytes(text.replace(b'"ema.safetensors"', b'"ema.safetensorr"'))
    return "digests.json"


def exchange_parts(path: Path) -> str:
    """Files and digests of two parts change places: each file has the digest that is asked for."""
    (path / "ema.safetensors").rename(path / "x")
    (path / "scale.safetensors").rename(path / "ema.safetensors")
    (path / "x").rename(path / "scale.safetensors")
    text = (path / "digests.json").read_text()
    text = text.replace("ema.safe", "x.safe").replace("scale.safe", "ema.safe").replace("x.safe", "scale.safe")
    (path / "digests.json").write_text(text)
    return "digests.json"


def rename_folder(path: Path) -> str:
    path.rename(path.with_name("step-00000030"))
    return "state.json"


def be_endless(path: Path) -> str:
    (path / "digests.json").unlink()
    (path / "digests.json").symlink_to("/dev/zero")
    return "digests.json"


DAMAGES = [rename_part, add_part, lose_part, lose_entry, exchange_parts, rename_folder, be_endless]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_other_parts_than_were_written_are_a_broken_checkpoint(damage: Callable[[Path], str], tmp_path: Path) -> None:
    path = written(tmp_path, 1)
    file = damage(path)
    found = newest(tmp_path)
    assert found.checkpoint is None
    assert [error.file for error in found.broken] == [file]


def fit(out: Path, steps: int, resume: str = "auto") -> paceline.Result:
    settings = {"global_batch": 8, "order": "none", "optimizer": "sgd", "lr": 0.05, "level": 0, "workers": 0}
    return paceline.fit(
        SmallTask(),
        out=out,
        steps=steps,
        ema=0.9,
        save_every_steps=2,
        resume=resume,
        device="cpu",
        threads=1,
        **settings,
    )


def test_a_bit_in_the_digests_costs_a_step_and_not_the_average(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fit(tmp_path / "whole", 8)
    fit(tmp_path / "run", 4)
    lose_entry(tmp_path / "run" / "checkpoints" / "step-00000004")
    capsys.readouterr()
    fit(tmp_path / "run", 8)
    said = "".join(capsys.readouterr())
    assert "skipped a broken checkpoint: " in said
    assert "resumed after step 3 " in said
    ours, theirs = (newest(tmp_path / name / "checkpoints").checkpoint for name in ("run", "whole"))
    assert ours is not None
    assert theirs is not None
    assert content(ours)[3] == content(theirs)[3]


def test_a_run_without_a_sound_checkpoint_is_not_begun_anew(tmp_path: Path) -> None:
    fit(tmp_path, 4)
    for path in (tmp_path / "checkpoints").iterdir():
        lose_part(path)
    journal = (tmp_path / "metrics.jsonl").read_text()
    with pytest.raises(paceline.PacelineError, match="no checkpoint of it is sound") as caught:
        fit(tmp_path, 8)
    assert "step-00000004/ema.safetensors: No such file" in str(caught.value)
    assert (tmp_path / "metrics.jsonl").read_text() == journal


def test_a_checkpoint_of_an_own_loop_is_not_resumed_by_the_trainer(tmp_path: Path) -> None:
    path = written(tmp_path / "own", 1)
    with pytest.raises(CheckpointBroken, match="is not of a training run: it has no optimizer, engine, position"):
        fit(tmp_path / "run", 4, resume=path)  # type: ignore[arg-type]
