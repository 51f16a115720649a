"""Folders of runs that never were: a record and a journal with times that are known."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline.config.settings import TrainConfig
from paceline.core.run_folder import METRICS, RECORD
from paceline.observe.clock import PHASES
from paceline.observe.records import EpochRecord, Profile, StepRecord

MIB = 1 << 20
PROFILE = Profile(
    buckets=[MIB, 3 * MIB],
    blocks=[2 * MIB, 2 * MIB, 0],
    tensors=8,
    weights=MIB,
    state=2 * MIB,
    in_blocks=True,
    epoch_steps=100,
)


def make_run(
    folder: Path,
    *,
    ranks: int = 1,
    grains: int = 8,
    compute_s: float = 0.24,
    communication_s: float = 0.0,
    steps: int = 20,
    batch: int = 64,
    profile: Profile = PROFILE,
    costs: list[list[float]] | None = None,
    hosts: list[str] | None = None,
    slow: dict[int, float] | None = None,
    **settings: Any,
) -> Path:
    """Write a run of two epochs whose ranks compute for so long in each step, times the factors in `slow`."""
    folder.mkdir(parents=True)
    values = TrainConfig(epochs=2, global_batch=batch, grains=grains, **{"sums": "exact", **settings}).model_dump(
        mode="json"
    )
    record = {"status": "finished", "grains": grains, "task": "digits", "settings": values}
    (folder / RECORD).write_text(json.dumps(record), encoding="utf-8")
    factors = [(slow or {}).get(rank, 1.0) for rank in range(ranks)]
    rows = [
        [[step, 0.001, 0.0, compute_s * factors[rank], communication_s, 0.002, 0.001] for step in range(steps)]
        for rank in range(ranks)
    ]
    all_costs = costs or [[batch / grains] * grains for _ in range(steps)]
    phases = {**dict.fromkeys(PHASES, 0.0), "compute": steps * compute_s, "communication": steps * communication_s}
    epochs = [
        EpochRecord(
            step=steps * epoch + steps - 1,
            epoch=epoch + 1,
            steps=steps,
            samples=steps * batch,
            seconds=[phases] * ranks,
            between=[{"checkpoint": 0.5}] * ranks,
            hosts=hosts or ["here"] * ranks,
            core_wait=[0.0] * ranks,
            profile=replace(profile, steps=rows, costs=all_costs),
        ).to_json()
        for epoch in range(2)
    ]
    done = [StepRecord(step, 1 + step // steps, 1.0, 0.1).to_json() for step in range(2 * steps)]
    lines = [*done[:steps], epochs[0], *done[steps:], epochs[1]]
    (folder / METRICS).write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")
    return folder


def changed(folder: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """Change the record of each epoch in a journal, in place."""
    lines = [json.loads(line) for line in (folder / METRICS).read_text(encoding="utf-8").splitlines()]
    for line in lines:
        if line["kind"] == "epoch":
            change(line)
    (folder / METRICS).write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")
    return folder
