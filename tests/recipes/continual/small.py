"""A stream so small that a whole run takes a second, and runs of it on any number of ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from paceline.observe.journal import read
from paceline.recipes.continual.settings import ContinualSettings
from paceline.recipes.continual.task import Continual
from paceline.train import loop
from paceline.train.run import open_run
from paceline.world.discover.environment import World
from paceline.world.link import Link
from paceline.world.start import start

MLP = {
    "precision": "fp64",
    "grains": 4,
    "global_batch": 12,
    "minibatch_size": 9,
    "buffer_size": 31,
    "steps": 9,
    "lr": 0.1,
    "progress": "none",
    "loggers": (),
    "alpha": 0.3,
    "limit_batches": 9,
}


class Watched(Continual):
    """Writes down the buffer's digest and what is replayed, step by step."""

    def before_step(self, model: torch.nn.Module, batch: Any) -> None:
        super().before_step(model, batch)
        if self.buffer is not None and self.replay is not None:
            drawn = [piece["y"].tolist() for draw in self.replay.drawn for piece in draw]
            numbers = [number for number, rank in enumerate(self.replay.ranks) if rank == self.world.rank]
            self.seen.append((self.buffer.digest(), dict(zip(numbers * self.method.draws, drawn, strict=False))))


def train(link: Link, settings: dict[str, Any], folder: str | None = None) -> dict[str, Any]:
    """Everything that a run gives."""
    out = None if folder is None else Path(folder) / f"ranks{link.world.size}"
    config = ContinualSettings(**{**MLP, **settings, "out": out})
    task = Watched()
    task.seen = []
    trainer = open_run(task, config, link)
    losses: list[float] = []
    step = trainer.stepper.step

    def noted(*args: Any) -> Any:
        done = step(*args)
        losses.append(done.loss)
        return done

    trainer.stepper.step = noted  # type: ignore[method-assign]
    loop.train(trainer)
    buffer = None if task.buffer is None else task.buffer.state()
    seen = [(digest, link.gather_objects(drawn)) for digest, drawn in task.seen]
    return {
        "losses": losses,
        "digests": [digest for digest, _ in seen],
        "drawn": [sorted((k, v) for part in drawn for k, v in part.items()) for _, drawn in seen],
        "weights": {name: tensor.clone() for name, tensor in trainer.stepper.model.state_dict().items()},
        "buffer": buffer,
        "class_il": task.results.class_il.tolist(),
        "task_il": task.results.task_il.tolist(),
        "untrained": task.results.untrained.tolist(),
        "records": [] if out is None else list(read(out / "metrics.jsonl")),
        "written": None if out is None or not link.is_first else json.loads((out / "continual.json").read_text()),
    }


def alone() -> Link:
    return start(World(0, 0, 1, 1, 0, 1, "test", None), device="cpu", threads=1)
