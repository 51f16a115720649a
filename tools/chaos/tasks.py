"""Tasks that campaigns train, and their variants: each a combination of features with the ranks it may run on."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import paceline
from paceline.recipes.continual.task import Continual

MARKS = "CHAOS_MARKS"
"""Variable with the file that tasks append to when they reach a place: `rank place` per line."""
STEP_S = "CHAOS_STEP_S"
"""Variable with the seconds of a pause in each step: without it the whole run would be over before a signal arrives."""
PACKED = "CHAOS_PACKED"
SAMPLES_FILE = "CHAOS_SAMPLES"
"""Variable with the beginning of the file's name that each rank of a soak writes what it takes to."""
TIMES = "CHAOS_TIMES"
"""Variable with the file that gets the moment of every finished step."""
HOLD = "CHAOS_HOLD"
"""Variable with a file: while it is there steps take long, until a rank that was lost is back, or it is touched."""
HOLD_S = "CHAOS_HOLD_S"
"""Variable with the seconds that such a step takes, 2 if not set."""
SAMPLE_EVERY = 50
SAMPLES, FEATURES, CLASSES = 88, 6, 3


def mark(rank: int, place: str) -> None:
    """Note that a rank has reached a place, for who waits to attack it there."""
    path = os.environ.get(MARKS)
    if path:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.write(descriptor, f"{rank} {place}\n".encode())
        os.close(descriptor)


def pause() -> None:
    """Make a step take as long as who attacks it needs."""
    if TIMES in os.environ:
        with open(os.environ[TIMES], "a", encoding="utf-8") as file:
            file.write(f"{time.time():.4f}\n")
    if MARKS in os.environ:
        time.sleep(float(os.environ.get(STEP_S, "0.004")))
    hold, deadline = _touched(os.environ.get(HOLD, "")), time.monotonic() + float(os.environ.get(HOLD_S, "2"))
    while hold and _touched(os.environ[HOLD]) == hold and time.monotonic() < deadline:
        time.sleep(0.01)


def _touched(path: str) -> int:
    """Return when a file was touched, 0 if it is not there."""
    try:
        return os.stat(path).st_mtime_ns
    except OSError:
        return 0


def points(number: int, seed: int) -> TensorDataset:
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(number, FEATURES, generator=random)
    return TensorDataset(x, (x.sum(1) > 0).long() + (x[:, 0] > 1).long())


class Plain(paceline.Task, paceline.SavesState):
    """A net with batch norm and dropout, and a state of its own in checkpoints."""

    def __init__(self) -> None:
        self.seen = torch.zeros(1, dtype=torch.int64)

    def model(self) -> nn.Module:
        mark(self.world.rank, "model")
        return nn.Sequential(
            nn.Linear(FEATURES, 16, bias=False), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, CLASSES)
        )

    def train_data(self) -> Any:
        return points(SAMPLES, 1)

    def val_data(self) -> Mapping[str, Any]:
        return {"dev": points(20, 2)}

    def before_stage(self, model: nn.Module, stage: int) -> None:
        mark(self.world.rank, "stage")

    def loss(self, model: nn.Module, grain: paceline.Grain) -> Any:
        x = grain.x.to(next(model.parameters()).dtype)
        total = F.cross_entropy(model(x), grain.y, reduction="sum")
        if total.requires_grad and TIMES in os.environ:
            total.register_hook(self._mark_backward)
        return total, len(grain)

    def _mark_backward(self, gradient: torch.Tensor) -> None:
        mark(self.world.rank, "backward")

    def metrics(self, model: nn.Module, grain: paceline.Grain) -> Mapping[str, Any]:
        mark(self.world.rank, "validation")
        total, count = self.loss(model, grain)
        return {"loss": (total, count)}

    def predict(self, model: nn.Module, grain: paceline.Grain) -> Any:
        return model(grain.x.to(next(model.parameters()).dtype)).argmax(1)

    def after_step(self, model: nn.Module, step: Any, grains: list[paceline.Grain]) -> None:
        self.seen += 1
        mark(self.world.rank, "step")
        pause()

    def state(self) -> dict[str, torch.Tensor]:
        mark(self.world.rank, "save")
        return {"seen": self.seen}

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        self.seen = state["seen"].clone()


class FromPacked(Plain):
    """The same, read from an HDF5 file."""

    def train_data(self) -> Any:
        from paceline.data.packed.dataset import PackedDataset

        return PackedDataset(Path(os.environ[PACKED]))

    def loss(self, model: nn.Module, grain: paceline.Grain) -> Any:
        if isinstance(grain.data, Mapping):
            x, y = grain.data["x"], grain.data["y"]
            return F.cross_entropy(model(x), y.view(-1), reduction="sum"), len(grain)
        return super().loss(model, grain)


class Soaked(Plain):
    """Writes down what its process takes, now and then."""

    def after_step(self, model: nn.Module, step: Any, grains: list[paceline.Grain]) -> None:
        self.seen += 1
        if int(self.seen) % SAMPLE_EVERY == 0 and self.settings.out is not None:
            status = Path("/proc/self/status").read_text().split()
            sample = {
                "step": int(self.seen),
                "seconds": time.process_time(),
                "rss_kb": int(status[status.index("VmRSS:") + 1]),
                "threads": int(status[status.index("Threads:") + 1]),
                "descriptors": len(os.listdir("/proc/self/fd")),
                "files": sum(len(files) for _, _, files in os.walk(self.settings.out)),
            }
            with open(f"{os.environ[SAMPLES_FILE]}-{self.world.rank}", "a", encoding="utf-8") as file:
                file.write(json.dumps(sample) + "\n")


class SoakedPacked(Soaked, FromPacked):
    """The same, read from an HDF5 file."""


class Replayed(Continual):
    """The continual recipe, with marks."""

    def model(self) -> nn.Module:
        mark(self.world.rank, "model")
        return super().model()

    def before_stage(self, model: nn.Module, stage: int) -> None:
        mark(self.world.rank, "stage")
        super().before_stage(model, stage)

    def loss(self, model: nn.Module, grain: paceline.Grain) -> Any:
        total, count = super().loss(model, grain)
        if total.requires_grad and TIMES in os.environ:
            total.register_hook(lambda gradient: mark(self.world.rank, "backward"))
        return total, count

    def metrics(self, model: nn.Module, grain: paceline.Grain) -> Any:
        mark(self.world.rank, "validation")
        return super().metrics(model, grain)

    def state(self) -> dict[str, torch.Tensor]:
        mark(self.world.rank, "save")
        return super().state()

    def after_step(self, model: nn.Module, step: Any, grains: list[paceline.Grain]) -> None:
        super().after_step(model, step, grains)
        mark(self.world.rank, "step")
        pause()


def pack(path: Path) -> None:
    """Write the data of `FromPacked`."""
    from paceline.data.packed.from_samples import SampleSource
    from paceline.data.packed.pack import pack as write

    x, y = points(SAMPLES, 1).tensors
    samples = [{"x": x[row], "y": int(y[row])} for row in range(len(x))]
    write(SampleSource(samples, range(len(samples)), name="chaos"), path)


@dataclass(frozen=True)
class Variant:
    """A combination of features."""

    name: str
    words: Sequence[str]
    ranks: Sequence[int] = (1, 2, 3, 4)
    task: str = "Plain"
    may_change_ranks: bool = True
    """A run may go on with another number of ranks, and gives the same result to rounding."""
    tolerance: float = 2e-4
    """Largest difference of weights after a change of ranks, relative to the largest weight."""

    def command(self, out: Path, *more: str) -> list[str]:
        """Return the words behind `paceline` that train it."""
        fixed = ["--device", "cpu", "--loggers", "none", "--threads", "1", "--progress", "lines", "--grains", "4"]
        waits = ["--timeout-s", "12", "--start-timeout-s", "20"]
        return ["train", f"{__file__}:{self.task}", *fixed, *self.words, *waits, "--out", str(out), *more]


_LOOP = ("--global-batch", "16", "--epochs", "4", "--save-every-steps", "4", "--val-every-steps", "9", "-O0")
_SGD = ("--optimizer", "sgd", "--lr", "0.05", "--workers", "0")
_NEWBOB = ("--schedule", "newbob", "--precision", "fp64")
_STREAM = ("--steps", "6", "--num-tasks", "3", "--global-batch", "12", "--precision", "fp64", "--workers", "0")
VARIANTS = {
    variant.name: variant
    for variant in (
        Variant("plain", (*_LOOP, *_SGD)),
        Variant("ema", (*_LOOP, "--optimizer", "adamw", "--ema", "0.8", "--clip-norm", "0.5", "--workers", "0")),
        Variant("fp64", (*_LOOP, *_SGD, "--precision", "fp64"), tolerance=1e-11),
        Variant("newbob", (*_LOOP, *_SGD, *_NEWBOB, "--keep-last", "1", "--keep-best", "2"), tolerance=1e-11),
        Variant(
            "average",
            (*_LOOP, *_SGD, "--reduce", "param", "--sync-step", "3", "--sync-state", "keep"),
            ranks=(2, 4),
            may_change_ranks=False,
        ),
        Variant(
            "diloco",
            (*_LOOP, *_SGD, "--reduce", "param", "--sync-step", "4", "--outer", "nesterov", "--wire", "int8"),
            ranks=(2, 3),
            may_change_ranks=False,
        ),
        Variant("shards", (*_LOOP, *_SGD, "--shard", "full", "--checkpoint-form", "sharded"), ranks=(2, 3, 4)),
        Variant("gathered", (*_LOOP, *_SGD, "--shard", "full", "--ema", "0.8"), ranks=(2, 4)),
        Variant("mirrored", (*_LOOP, *_SGD, "--shard", "full", "--mirror", "--ema", "0.8"), ranks=(2, 3, 4)),
        Variant("node", (*_LOOP, *_SGD, "--shard", "node", "--mirror"), ranks=(2, 3, 4)),
        Variant(
            "averages",
            (*_LOOP, *_SGD, "--reduce", "param", "--sync-step", "3", "--mirror"),
            ranks=(2, 3, 4),
            may_change_ranks=False,
        ),
        Variant("packed", (*_LOOP, *_SGD), task="FromPacked"),
        Variant("workers", (*_LOOP, *_SGD[:-1], "2"), ranks=(1, 2)),
        Variant(
            "replay",
            (*_STREAM, "--method", "derpp", "--buffer-size", "31", "--save-every-steps", "4"),
            ranks=(1, 2, 4),
            task="Replayed",
            tolerance=1e-9,
        ),
    )
}
