"""`paceline demo`: something small and real, trained on all cores from one command."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from paceline.cli import train
from paceline.config.words import read_words

MOST_PROCS = 4
SETTINGS = {
    "epochs": 12,
    "global_batch": 64,
    "grains": MOST_PROCS,
    "lr": 0.003,
    "schedule": "cosine",
    "warmup_steps": 20,
    "weight_decay": 0.01,
    "device": "cpu",
}


def run(argv: Sequence[str]) -> int:
    """`paceline train digits` with settings that suit it, unless others are given."""
    given = read_words(train.OPTIONS, argv).given
    chosen = {**SETTINGS, "procs": min(len(os.sched_getaffinity(0)), MOST_PROCS)}
    words = ["digits"]
    for name, value in chosen.items():
        if name not in given:
            words += [f"--{name.replace('_', '-')}", str(value)]
    words += argv
    sys.stdout.write(f"paceline train {' '.join(words)}\n")
    sys.stdout.flush()
    return train.run(words)
