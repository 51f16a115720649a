"""The task that every launcher runs: batch norm and dropout, 5 steps of 4 grains, and nothing to download."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import paceline

RANKS = 4
"""On two machines; also the number of grains."""
STEPS = 5
WARNED_AT = 15


class Small(paceline.Task):
    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 2))

    def train_data(self) -> TensorDataset:
        random = torch.Generator().manual_seed(0)
        return TensorDataset(torch.randn(160, 3, generator=random), torch.randint(0, 2, (160,), generator=random))

    def before_stage(self, model: nn.Module, stage: int) -> None:
        """Each rank leaves a note beside the run: who it is, and where."""
        world = self.world
        place = [world.launcher, world.global_rank, world.local_rank, world.size, world.nodes, socket.gethostname()]
        assert self.settings.out is not None
        folder = places_of(self.settings.out)
        folder.mkdir(exist_ok=True)
        (folder / str(world.rank)).write_text(json.dumps(place))

    def loss(self, model: nn.Module, grain: paceline.Grain) -> Any:
        return F.cross_entropy(model(grain.x), grain.y, reduction="sum"), len(grain)


class Warned(Small):
    """In its first start, a scheduler's warning comes at step 15; from then on steps take as long as real ones."""

    def after_step(self, model: nn.Module, step: Any, grains: list[paceline.Grain]) -> None:
        assert self.settings.out is not None
        mark = places_of(self.settings.out) / "warned"
        if self.world.rank == 0 and step.number == WARNED_AT and not mark.exists():
            mark.touch()
            # Unchecked: the warning reaches all processes of the job, this one too.
            subprocess.run(os.environ["WARN"], shell=True)
        if step.number >= WARNED_AT and not self.resumed:
            time.sleep(0.05)

    @property
    def resumed(self) -> bool:
        assert self.settings.out is not None
        return any((self.settings.out / "checkpoints").glob("step-*"))


class Slow(Small):
    """Half a second per step."""

    def after_step(self, model: nn.Module, step: Any, grains: list[paceline.Grain]) -> None:
        if self.world.rank == 0 and step.number == 0:
            os.write(1, b"now\n")
        time.sleep(0.5)


class Ends(Small, paceline.SavesState):
    """A rank that dies, hangs or is stopped, at the start, in a step or in a save, as END says: `1 step killed`.

    Several such ends are separated by commas.
    """

    def model(self) -> nn.Module:
        self._end("start")
        return super().model()

    def val_data(self) -> dict[str, TensorDataset]:
        return {"val": self.train_data()} if "validation" in os.environ["END"] else {}

    def metrics(self, model: nn.Module, grain: paceline.Grain) -> Any:
        self._end("validation")
        return {"loss": self.loss(model, grain)}

    def loss(self, model: nn.Module, grain: paceline.Grain) -> Any:
        total, count = super().loss(model, grain)
        if total.requires_grad and "backward" in os.environ["END"]:
            total.register_hook(lambda gradient: self._end("backward"))
        return total, count

    def after_step(self, model: nn.Module, step: Any, grains: list[paceline.Grain]) -> None:
        if step.number == 2:
            self._end("step")

    def state(self) -> dict[str, torch.Tensor]:
        self._end("save")
        return {}

    def _end(self, where: str) -> None:
        for end in os.environ["END"].split(","):
            rank, place, how = end.split()
            if [str(self.world.rank), where] != [rank, place]:
                continue
            os.write(1, b"now\n")
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if how == "stopped":
                os.kill(os.getpid(), signal.SIGSTOP)
                if self.world.launcher == "environment":
                    return  # who lets it go on wants to see how it fares
            while True:
                time.sleep(1.0)


def words(out: Path, *more: str, steps: int = STEPS, task: str = "Small") -> list[str]:
    """`paceline train` of a task here, as typed behind a launcher."""
    fixed = ["--grains", str(RANKS), "--device", "cpu", "-O0", "--loggers", "none", "--threads", "1"]
    limits = ["--steps", str(steps), "--start-timeout-s", "60"]
    return ["train", f"{__file__}:{task}", *fixed, *limits, "--out", str(out), *more]


def command(out: Path, *more: str, steps: int = STEPS, task: str = "Small") -> list[str]:
    return [sys.executable, "-m", "paceline", *words(out, *more, steps=steps, task=task)]


def losses(out: Path) -> list[float]:
    lines = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if line["kind"] == "step"]


def assert_same_losses(out: Path, expected: Sequence[float]) -> None:
    assert len(expected) == STEPS
    assert losses(out)[:STEPS] == pytest.approx(list(expected), abs=1e-6)


def places_of(out: Path) -> Path:
    return out.with_name(f"{out.name}-places")


def hosts(out: Path) -> list[str]:
    """The machines of the ranks, in their order."""
    notes = [json.loads((places_of(out) / str(rank)).read_text()) for rank in range(RANKS)]
    return list(dict.fromkeys(note[-1] for note in notes))


def assert_placed(out: Path, launcher: str, on: Sequence[str] | None = None, ranks: int = RANKS) -> None:
    """Each rank was once, under this launcher, on these machines (this one if not said)."""
    names = on or [socket.gethostname()]
    local_size = ranks // len(names)
    for rank in range(ranks):
        place = json.loads((places_of(out) / str(rank)).read_text())
        assert place == [launcher, rank, rank % local_size, ranks, len(names), names[rank // local_size]]
