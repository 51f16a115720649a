"""Runs made by hand, so that every number of their pages is known. Needs nothing of paceline, of whatever version."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

SETTINGS: dict[str, Any] = {"lr": 0.1, "epochs": 2, "monitor": None, "monitor_mode": "min", "out": "somewhere"}


def write_run(folder: Path, records: Iterable[dict[str, Any]], status: str = "finished", **settings: Any) -> Path:
    """A run's folder with these lines in its journal."""
    folder.mkdir(parents=True)
    start = {"time": "2026-01-02 03:04:05.678", "command": "paceline train it", "host": "here", "versions": {}}
    about = {"task": "it", "grains": 2, "status": status, "settings": {**SETTINGS, **settings}, "starts": [start]}
    (folder / "run.json").write_text(json.dumps(about))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


def step(number: int, loss: float | None, **notes: Any) -> dict[str, Any]:
    return {"kind": "step", "step": number, "epoch": 0, "loss": loss, "lr": 0.1, **notes}


def epoch(number: int, seconds: list[dict[str, float]], **more: Any) -> dict[str, Any]:
    return {"kind": "epoch", "step": 2 * number + 1, "epoch": number, "steps": 2, "seconds": seconds, **more}


def usual() -> list[dict[str, Any]]:
    """Four steps in two epochs on two ranks, with validation and samples."""
    records = []
    for number, (wer, heard) in enumerate([(0.5, "see a bat"), (0.25, "see a cat now")]):
        records += [step(2 * number, 4.0 - 2 * number), step(2 * number + 1, 3.0 - 2 * number)]
        ranks = [
            {"data": 1.0, "compute": 7.0, "communication": 2.0},
            {"data": 1.0, "compute": 9.0, "communication": 0.0},
        ]
        records.append(epoch(number, ranks, objects_per_s=10.0 + number, padding=0.125, computing=0.9))
        said = [{"reference": "see a cat", "hypothesis": heard}]
        records.append(
            {"kind": "validation", "step": 2 * number + 1, "dev/wer": wer, "dev/loss": 1.0, "samples": {"dev": said}}
        )
    return records
