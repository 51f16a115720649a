"""What it costs that survivors could go on, while nobody dies: the time of a step of 5 ms, with and without.

    python benchmarks/survivors.py [--repeats 5] [--ranks 2] [--steps 1500] [--before FOLDER] [--json]

A run under `--procs` whose step computes for about 5 ms, in turns with `--on-failure continue` (copies in memory,
heartbeats, rounds) and `restart` (none of them); `--before` is a checkout of an earlier version, which is run beside.
The time of a step is that between two of them on rank 0, over the last two thirds of the run. A ratio is the median of
those of neighbouring runs.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import paceline

TIMES = "SURVIVORS_TIMES"
WIDTH, BATCH = 384, 64


class Steps(paceline.Task):
    """A net whose step takes about 5 ms on one core, and the moment of each step on rank 0."""

    def model(self) -> nn.Module:
        self._moments: list[float] = []
        layers = [layer for _ in range(4) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
        return nn.Sequential(*layers, nn.Linear(WIDTH, 10))

    def train_data(self) -> TensorDataset:
        random_numbers = torch.Generator().manual_seed(0)
        x = torch.randn(4096, WIDTH, generator=random_numbers)
        return TensorDataset(x, torch.randint(0, 10, (4096,), generator=random_numbers))

    def loss(self, model: nn.Module, grain: paceline.Grain) -> Any:
        return F.cross_entropy(model(grain.x), grain.y, reduction="sum"), len(grain)

    def after_step(self, model: nn.Module, step: Any, grains: list[paceline.Grain]) -> None:
        self._moments.append(time.perf_counter())
        if self.world.rank == 0 and len(self._moments) == self.settings.steps:
            begin = len(self._moments) // 3
            seconds = (self._moments[-1] - self._moments[begin]) / (len(self._moments) - 1 - begin)
            Path(os.environ[TIMES]).write_text(str(seconds))


def measure(source: Path, ranks: int, steps: int, words: list[str]) -> float:
    """Return the milliseconds of a step."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "seconds")
        command = [sys.executable, "-m", "paceline", "train", f"{__file__}:Steps", "--procs", str(ranks)]
        command += ["--out", str(Path(folder, "run")), "--steps", str(steps), "--global-batch", str(BATCH * ranks)]
        command += ["--grains", str(ranks), "--device", "cpu", "--threads", "1", "-O0", "--workers", "0", *words]
        command += ["--save-every-epochs", "1000000", "--loggers", "none", "--optimizer", "adamw"]
        env = {**os.environ, "PYTHONPATH": str(source), TIMES: str(result)}
        subprocess.run(command, env=env, check=True, capture_output=True)
        return 1e3 * float(result.read_text())


def main() -> None:
    from table import Row, parser, show  # not in the ranks: they import this file from elsewhere

    arguments = parser(__doc__ or "")
    arguments.add_argument("--repeats", type=int, default=5)
    arguments.add_argument("--ranks", type=int, default=2)
    arguments.add_argument("--steps", type=int, default=1500)
    arguments.add_argument("--before", type=Path, help="checkout of an earlier version")
    options = arguments.parse_args()
    here = Path(__file__).parents[1] / "src"
    ways = {"restart": (here, ["--on-failure", "restart"]), "continue": (here, ["--on-failure", "continue"])}
    if options.before is not None:
        ways["before"] = (options.before / "src", [])
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(options.repeats):
        for name, (source, words) in ways.items():
            times[name].append(measure(source, options.ranks, options.steps, words))
    rows = [Row("step", name, statistics.median(values), "ms") for name, values in times.items()]
    for name in times.keys() - {"continue"}:
        ratios = [mine / other for mine, other in zip(times["continue"], times[name], strict=True)]
        rows.append(Row(f"continue / {name}", "median", statistics.median(ratios), ""))
        rows += [
            Row(f"continue / {name}", end, value, "") for end, value in (("least", min(ratios)), ("most", max(ratios)))
        ]
    show(rows, f"a step on {options.ranks} ranks, {options.repeats} runs in turns", options.json)


if __name__ == "__main__":
    main()
