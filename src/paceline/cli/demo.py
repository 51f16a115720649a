"""`paceline demo`: something small and real, trained on all cores from one command."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from paceline.cli import train

MOST_PROCS = 4


def run(argv: Sequence[str]) -> int:
    procs = min(len(os.sched_getaffinity(0)), MOST_PROCS)
    words = [
        *("digits", "--epochs", "12", "--global-batch", "64", "--grains", str(MOST_PROCS)),
        *("--lr", "0.003", "--schedule", "cosine", "--warmup-steps", "20", "--weight-decay", "0.01"),
        *("--device", "cpu", "--procs", str(procs), *argv),
    ]
    sys.stdout.write(f"paceline train {' '.join(words)}\n")
    sys.stdout.flush()
    return train.run(words)
