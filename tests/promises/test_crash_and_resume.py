"""SIGKILL at random moments, resume on any number of ranks: as if nothing had happened."""

from __future__ import annotations

import json
import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.config.settings import TrainConfig
from paceline.data.grain import Grain
from paceline.observe.journal import read
from paceline.train import loop
from paceline.train.checkpoint import reader as restore
from paceline.train.run import open_run
from paceline.world.link import Link
from tests.crash import KILLED, run_until_death
from tests.train.ragged import RaggedTask

STEPS, GRAINS = 22, 4


class WatchedTask(RaggedTask):
    """Writes down what it consumes, and dies where it is told to."""

    def __init__(self, link: Link, log: Path, die_at: tuple[int, int] | None) -> None:
        self._file = (log / f"consumed-{os.getpid()}").open("a")
        self._die_at = die_at
        self.stepper: Any = None

    def loss(self, model: torch.nn.Module, grain: Grain) -> Any:
        step = self.stepper.num_steps
        if self._die_at is not None and (step, grain.number) >= self._die_at:
            os.kill(os.getpid(), signal.SIGKILL)
        self._file.write(json.dumps([step, grain.number, grain.samples.tolist()]) + "\n")
        self._file.flush()
        return super().loss(model, grain)


def train(link: Link, folder: str, settings: dict[str, Any], die_at: Any, die_in_save: int | None) -> None:
    config = TrainConfig(
        steps=STEPS,
        grains=GRAINS,
        global_batch=24,
        optimizer="sgd",
        lr=0.05,
        save_every_steps=4,
        val_every_steps=6,
        log_every=3,
        resume="auto",
        workers=0,
        out=Path(folder),
        **settings,
    )
    task = WatchedTask(link, Path(folder).parent, die_at)
    run = open_run(task, config, link)
    task.stepper = run.stepper
    if die_in_save is not None and link.is_first:
        _die_at_sync(die_in_save)
    loop.train(run)


def _die_at_sync(number: int) -> None:
    """SIGKILL in the middle of writing a checkpoint: at the given fsync of the process."""
    count, sync = 0, os.fsync

    def deadly(descriptor: int) -> None:
        nonlocal count
        count += 1
        if count == number:
            os.kill(os.getpid(), signal.SIGKILL)
        sync(descriptor)

    os.fsync = deadly


def consumed(folder: Path) -> dict[tuple[int, int], list[int]]:
    """(step, grain) -> samples, over all processes; what was done twice must have been the same."""
    seen: dict[tuple[int, int], list[int]] = {}
    for file in folder.glob("consumed-*"):
        for line in file.read_text().splitlines():
            step, grain, samples = json.loads(line)
            assert seen.setdefault((step, grain), samples) == samples, f"step {step}, grain {grain}"
    return seen


def final(folder: Path) -> tuple[dict[str, dict[str, torch.Tensor]], list[dict[str, Any]]]:
    found = restore.newest(folder / "run" / "checkpoints")
    assert found.checkpoint is not None
    assert found.checkpoint.step == STEPS
    return found.checkpoint.parts, read(folder / "run" / "metrics.jsonl")


def uninterrupted(folder: Path, size: int, settings: dict[str, Any]) -> None:
    folder.mkdir()
    assert run_until_death(size, train, str(folder / "run"), settings, None, None) == [0] * size


def interrupted(folder: Path, sizes: list[int], settings: dict[str, Any], seed: int) -> int:
    """Run on `sizes` one after the other, killed at random moments, until the last one finishes; number of deaths."""
    folder.mkdir()
    chance = random.Random(seed)
    deaths = 0
    for turn, size in enumerate(sizes):
        is_last = turn == len(sizes) - 1
        die_at = die_in_save = None
        if not is_last and turn % 2 == 1:
            die_in_save = chance.randint(2, 14)
        elif not is_last:
            die_at = (chance.randint(1 + 4 * turn, 6 + 4 * turn), chance.randrange(GRAINS))
        codes = run_until_death(size, train, str(folder / "run"), settings, die_at, die_in_save)
        deaths += KILLED in codes
        if is_last:
            assert codes == [0] * size
    return deaths


def check_same(whole: Path, broken: Path, *, bitwise: bool) -> None:
    assert consumed(whole) == consumed(broken)
    (parts, records), (other_parts, other_records) = final(whole), final(broken)
    assert [record["step"] for record in other_records] == list(range(STEPS))
    for record, other in zip(records, other_records, strict=True):
        assert record["loss"] == (other["loss"] if bitwise else pytest.approx(other["loss"], rel=1e-12))
    epochs, other_epochs = (read(folder / "run" / "metrics.jsonl", "epoch") for folder in (whole, broken))
    for record, other in zip(epochs, other_epochs, strict=True):
        for name in ("step", "epoch", "steps", "samples", "skipped", "padding"):
            assert record[name] == other[name], name
        assert record["loss"] == (other["loss"] if bitwise else pytest.approx(other["loss"], rel=1e-12))
    for part, tensors in parts.items():
        for name, tensor in tensors.items():
            other_tensor = other_parts[part][name]
            if bitwise:
                assert torch.equal(tensor, other_tensor), f"{part}: {name}"
            else:
                assert torch.allclose(tensor, other_tensor, rtol=1e-12, atol=1e-12), f"{part}: {name}"


@pytest.mark.parametrize("size", [2, pytest.param(1, marks=pytest.mark.long)])
def test_same_ranks_resume_bitwise(tmp_path: Path, size: int) -> None:
    settings = {"precision": "fp64", "ema": 0.9}
    uninterrupted(tmp_path / "whole", size, settings)
    assert interrupted(tmp_path / "broken", [size] * 3, settings, seed=size) >= 2
    check_same(tmp_path / "whole", tmp_path / "broken", bitwise=True)


@pytest.mark.parametrize("sizes", [[4, 1, 2], pytest.param([4, 1, 2, 4, 2], marks=pytest.mark.long)], ids=len)
def test_other_ranks_resume_exactly(tmp_path: Path, sizes: list[int]) -> None:
    settings = {"precision": "fp64", "ema": 0.9, "schedule": "cosine", "warmup_steps": 3}
    uninterrupted(tmp_path / "whole", 1, settings)
    assert interrupted(tmp_path / "broken", sizes, settings, seed=11) >= 2
    check_same(tmp_path / "whole", tmp_path / "broken", bitwise=False)


def test_fp16_scaler_and_average_survive(tmp_path: Path) -> None:
    settings = {"precision": "fp16", "ema": 0.9, "clip_norm": 1.0}
    uninterrupted(tmp_path / "whole", 2, settings)
    assert interrupted(tmp_path / "broken", [2, 2, 2], settings, seed=5) >= 1
    check_same(tmp_path / "whole", tmp_path / "broken", bitwise=True)
    parts, _ = final(tmp_path / "broken")
    assert parts["scale"].keys() == {"scale", "clean_steps"}
