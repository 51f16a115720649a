"""Parallel text that a small network learns in seconds: a sentence, and the same backwards."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight"]


def pairs(number: int, seed: int = 0, longest: int = 5) -> list[tuple[str, str]]:
    draw = random.Random(seed)
    lines = [draw.choices(WORDS, k=draw.randint(1, longest)) for _ in range(number)]
    return [(" ".join(line), " ".join(reversed(line))) for line in lines]


def write(folder: Path, name: str, number: int, seed: int = 0) -> tuple[Path, Path]:
    """Write two files with a sentence per line."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = folder / f"{name}.en", folder / f"{name}.de"
    for path, side in zip(paths, zip(*pairs(number, seed), strict=True), strict=True):
        path.write_text("".join(f"{line}\n" for line in side), encoding="utf-8")
    return paths


def settings(folder: Path, **more: Any) -> dict[str, Any]:
    """Return settings of a tiny network on files that are written into `folder`."""
    train, val = write(folder, "train", 64), write(folder, "val", 12, seed=1)
    return {
        "train_source": [train[0]],
        "train_target": [train[1]],
        "val_source": [str(val[0])],
        "val_target": [val[1]],
        "tokens": "words",
        "width": 16,
        "ffn_width": 32,
        "heads": 2,
        "encoder_layers": 1,
        "decoder_layers": 1,
        "dropout": 0.1,
        "lr": 0.005,
        "warmup_steps": 4,
        "global_batch": 16,
        "grains": 4,
        "output_ratio": 1.0,
        "device": "cpu",
        "level": 0,
        "loggers": (),
        "progress": "none",
        **more,
    }
