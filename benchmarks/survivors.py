"""What it costs that survivors could go on, while nobody dies: the time of a step of 5 ms, with and without.

    python benchmarks/survivors.py [--rounds 20] [--ranks 2] [--window 250] [--before FOLDER] [--json]

A run under `--procs` whose step computes for about 5 ms, with `--on-failure continue` (copies in memory, heartbeats,
rounds) and with `restart` (none of them); `--before` is a checkout of an earlier version, which is run beside. All runs
are started once and take turns of a window of steps, the others sleep meanwhile: what the machine does beside them
changes within seconds, and hits neighbours alike. The time of a step is that between two of them on rank 0, without the
first fifth of a window, in which caches fill. What one way takes over another is that of neighbouring windows; the
table has the median of the rounds and the quarters around it. About two minutes on two cores.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import paceline

FOLDER, WAY, STEPS_A_WINDOW = "SURVIVORS_FOLDER", "SURVIVORS_WAY", "SURVIVORS_WINDOW"
WIDTH, BATCH = 384, 64
LOOK_S = 0.02
WINDOW_S = 300.0
"""Longest time that a window, or the start of all runs, may take."""


class Steps(paceline.Task):
    """A net whose step takes about 5 ms on one core, in windows: after each of them it waits for its turn."""

    def model(self) -> nn.Module:
        self._folder, self._way = Path(os.environ[FOLDER]), os.environ[WAY]
        self._window, self._moments, self._number = int(os.environ[STEPS_A_WINDOW]), [time.perf_counter()], 0
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
        if len(self._moments) <= self._window:
            return
        if self.world.rank == 0:
            begin = self._window // 5
            seconds = (self._moments[-1] - self._moments[begin]) / (self._window - begin)
            put(self._folder / f"{self._way}-{self._number}", str(seconds))
        self._number += 1
        turn = f"{self._way}-{self._number}"
        while (self._folder / "turn").read_text() not in (turn, "end"):
            time.sleep(LOOK_S)
        self._moments = [time.perf_counter()]


def put(path: Path, text: str) -> None:
    """Write a file that others see whole or not at all."""
    aside = path.with_name(f".{path.name}")
    aside.write_text(text)
    aside.rename(path)


def start(folder: Path, way: str, source: Path, ranks: int, windows: int, window: int, words: list[str]) -> Any:
    """Start the run of a way."""
    command = [sys.executable, "-m", "paceline", "train", f"{__file__}:Steps", "--procs", str(ranks)]
    command += ["--out", str(folder / f"run-{way}"), "--steps", str(windows * window)]
    command += ["--global-batch", str(BATCH * ranks), "--grains", str(ranks), "--device", "cpu", "--threads", "1"]
    command += ["-O0", "--workers", "0", "--save-every-epochs", "1000000", "--loggers", "none", "--optimizer", "adamw"]
    env = {**os.environ, "PYTHONPATH": str(source), "OMP_NUM_THREADS": "1", "PACELINE_NO_PLUGINS": "1"}
    env |= {FOLDER: str(folder), WAY: way, STEPS_A_WINDOW: str(window)}
    with (folder / f"log-{way}").open("w") as log:
        return subprocess.Popen([*command, *words], env=env, stdout=log, stderr=log)


def wait_for(path: Path, runs: dict[str, Any]) -> float:
    """Return the milliseconds of a step that a run has written."""
    deadline = time.monotonic() + WINDOW_S
    while not path.exists():
        for way, run in runs.items():
            if run.poll() is not None or time.monotonic() > deadline:
                log = (path.parent / f"log-{way}").read_text()
                raise SystemExit(f"the run of {way} ended with {run.poll()} before {path.name}:\n{log[-2000:]}")
        time.sleep(LOOK_S)
    return 1e3 * float(path.read_text())


def main() -> None:
    from table import Row, parser, show  # not in the ranks: they import this file from elsewhere

    arguments = parser(__doc__ or "")
    arguments.add_argument("--rounds", type=int, default=20)
    arguments.add_argument("--ranks", type=int, default=2)
    arguments.add_argument("--window", type=int, default=250, help="steps at a time")
    arguments.add_argument("--before", type=Path, help="checkout of an earlier version")
    options = arguments.parse_args()
    here = Path(__file__).parents[1] / "src"
    ways = {"restart": (here, ["--on-failure", "restart"]), "continue": (here, ["--on-failure", "continue"])}
    if options.before is not None:
        ways["before"] = (options.before.resolve() / "src", [])
    times: dict[str, list[float]] = {name: [] for name in ways}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        put(folder / "turn", "nobody")
        runs: dict[str, Any] = {}
        for name, (source, words) in ways.items():
            # One more window, in which processes warm up, and one that ends the run.
            facts = (options.ranks, options.rounds + 2, options.window)
            runs[name] = start(folder, name, source, *facts, words)
            stack.callback(runs[name].wait)
            stack.callback(runs[name].terminate)
        for name in ways:
            wait_for(folder / f"{name}-0", runs)
        for number in range(1, options.rounds + 1):
            first = number % len(ways)
            for name in [*list(ways)[first:], *list(ways)[:first]]:
                put(folder / "turn", f"{name}-{number}")
                times[name].append(wait_for(folder / f"{name}-{number}", runs))
            if not options.json:
                print(f"{number}: " + ", ".join(f"{name} {values[-1]:.3f} ms" for name, values in times.items()))
        put(folder / "turn", "end")
    rows = [Row("step", name, statistics.median(values), "ms") for name, values in times.items()]
    for name in [name for name in ways if name != "continue"]:
        ratios = [mine / other for mine, other in zip(times["continue"], times[name], strict=True)]
        quarters = statistics.quantiles(ratios, n=4)
        for place, value in zip(("lower quarter", "median", "upper quarter"), quarters, strict=True):
            rows.append(Row(f"continue over {name}", place, 100 * (value - 1), "%"))
    show(rows, f"a step on {options.ranks} ranks, {options.rounds} rounds in turns", options.json)


if __name__ == "__main__":
    main()
