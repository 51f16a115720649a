"""What it costs that survivors could go on, while nobody dies: the time of a step of 5 ms, with and without.

    python benchmarks/survivors.py [--rounds 30] [--ranks 2] [--window 250] [--before FOLDER] [--json]

A run under `--procs` whose step computes for about 5 ms, with `--on-failure continue` (copies in memory, heartbeats,
rounds) and with `restart` (none of them); `--before` is a checkout of an earlier version, which is run beside. All runs
are started once and take turns of a window of steps, the others sleep meanwhile: what the machine does beside them
changes within seconds, and hits neighbours alike. The time of a step is that between two of them on rank 0, without the
first fifth of a window, in which caches fill; what one way takes over another is that of neighbouring windows, with the
interval that holds the true median 95 times out of 100. On a machine that does other things that is wide, so the parts
are counted, too, each by itself: a step without a copy (the fastest quarter of all steps, which no other program has
disturbed), the time of copies (by the run's own account), and the processor time of the launcher and of the ranks'
threads that watch, as a share of all cores that the ranks have. About two minutes on two cores.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import paceline

FOLDER, WAY, STEPS_A_WINDOW = "SURVIVORS_FOLDER", "SURVIVORS_WAY", "SURVIVORS_WINDOW"
WIDTH, BATCH = 384, 32
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
            moments = self._moments[begin:]
            steps = sorted(after - before for before, after in pairwise(moments))
            mean, quick = (moments[-1] - moments[0]) / len(steps), steps[len(steps) // 4]
            put(self._folder / f"{self._way}-{self._number}", f"{mean} {quick}")
        self._number += 1
        turn, began = f"{self._way}-{self._number}", time.monotonic()
        while (self._folder / "turn").read_text() not in (turn, "end"):
            time.sleep(LOOK_S)
        leave_out(time.monotonic() - began)
        self._moments = [time.perf_counter()]


_left_out = [0.0]


def leave_out(seconds: float) -> None:
    """Take the turns of others out of the time by which copies are spaced: else there would be three times as many."""
    try:
        from paceline.train import survival
    except ImportError:  # the code before
        return
    _left_out[0] += seconds
    survival.time = SimpleNamespace(time=time.time, monotonic=lambda: time.monotonic() - _left_out[0])  # type: ignore[assignment]


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


def processor_s(pid: int, *, main: bool = True) -> float:
    """Return the processor time of a process so far; without `main` that of threads that wake up now and then."""
    tasks = {int(each.parent.name): each for each in Path(f"/proc/{pid}/task").glob("*/schedstat")}
    if not main:
        # The first thread computes, and gloo's carry sums, with any setting.
        names = {task: each.with_name("comm").read_text() for task, each in tasks.items()}
        tasks = {task: tasks[task] for task, name in names.items() if task != pid and "gloo" not in name}
    return sum(int(each.read_text().split()[0]) for each in tasks.values()) / 1e9


def beside_s(launcher: int) -> float:
    """Return the processor time so far of a launcher, and of what watches in its ranks."""
    ranks = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    return processor_s(launcher) + sum(processor_s(int(rank), main=False) for rank in ranks)


def copies_s(run: Path, window: int) -> float:
    """Return the seconds of copies per step, by the run's own account, without windows in which all runs are busy."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    epochs = [record for record in records if record["kind"] == "epoch"]
    busy = -(-window // epochs[0]["steps"])
    epochs = epochs[busy:-busy]
    each = [record["seconds"][0]["checkpoint"] + record["between"][0]["checkpoint"] for record in epochs]
    return sum(each) / sum(record["steps"] for record in epochs)


def interval(values: list[float]) -> tuple[float, float, float]:
    """Return the median, and the ends of the interval that holds the true one with 95 %, by their order alone."""
    ordered, size = sorted(values), len(values)
    tail, place = 0.5**size, 0
    while tail + math.comb(size, place + 1) * 0.5**size <= 0.025:
        place += 1
        tail += math.comb(size, place) * 0.5**size
    return statistics.median(ordered), ordered[place], ordered[-1 - place]


def wait_for(path: Path, runs: dict[str, Any]) -> tuple[float, float]:
    """Return the milliseconds of a step that a run has written, mean and quick."""
    deadline = time.monotonic() + WINDOW_S
    while not path.exists():
        for way, run in runs.items():
            if run.poll() is not None or time.monotonic() > deadline:
                log = (path.parent / f"log-{way}").read_text()
                raise SystemExit(f"the run of {way} ended with {run.poll()} before {path.name}:\n{log[-2000:]}")
        time.sleep(LOOK_S)
    mean, quick = map(float, path.read_text().split())
    return 1e3 * mean, 1e3 * quick


def main() -> None:
    from table import Row, parser, show  # not in the ranks: they import this file from elsewhere

    arguments = parser(__doc__ or "")
    arguments.add_argument("--rounds", type=int, default=30)
    arguments.add_argument("--ranks", type=int, default=2)
    arguments.add_argument("--window", type=int, default=250, help="steps at a time")
    arguments.add_argument("--before", type=Path, help="checkout of an earlier version")
    options = arguments.parse_args()
    here = Path(__file__).parents[1] / "src"
    ways = {"restart": (here, ["--on-failure", "restart"]), "continue": (here, ["--on-failure", "continue"])}
    if options.before is not None:
        ways["before"] = (options.before.resolve() / "src", [])
    times: dict[str, list[float]] = {name: [] for name in ways}
    quick: dict[str, list[float]] = {name: [] for name in ways}
    beside: dict[str, list[float]] = {name: [] for name in ways}
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
                before_s, began = beside_s(runs[name].pid), time.monotonic()
                put(folder / "turn", f"{name}-{number}")
                mean, fast = wait_for(folder / f"{name}-{number}", runs)
                share = (beside_s(runs[name].pid) - before_s) / (time.monotonic() - began) / options.ranks
                for found, value in ((times, mean), (quick, fast), (beside, share)):
                    found[name].append(value)
            if not options.json and number % 10 == 0:
                print(f"{number}: " + ", ".join(f"{name} {values[-1]:.3f} ms" for name, values in times.items()))
        put(folder / "turn", "end")
        for run in runs.values():
            run.wait(60)
        copies = {name: copies_s(folder / f"run-{name}", options.window) for name in ways}
    rows = []
    for name in ways:
        step_ms = statistics.median(times[name])
        rows.append(Row(name, "step", step_ms, "ms"))
        rows.append(Row(name, "quick step", statistics.quantiles(quick[name], n=4)[0], "ms"))
        rows.append(Row(name, "copies", 100 * 1e3 * copies[name] / step_ms, "%"))
        rows.append(Row(name, "launcher and watches", 100 * statistics.median(beside[name]), "%"))
    for name in [name for name in ways if name != "continue"]:
        ratios = [mine / other for mine, other in zip(times["continue"], times[name], strict=True)]
        for place, value in zip(("median", "from", "to"), interval(ratios), strict=True):
            rows.append(Row(f"continue over {name}", f"step, {place}", 100 * (value - 1), "%"))
        fastest = [statistics.quantiles(quick[each], n=4)[0] for each in ("continue", name)]
        parts = (copies["continue"] - copies[name]) * 1e3 / statistics.median(times["continue"])
        parts += statistics.median(beside["continue"]) - statistics.median(beside[name])
        rows.append(Row(f"continue over {name}", "quick step", 100 * (fastest[0] / fastest[1] - 1), "%"))
        rows.append(Row(f"continue over {name}", "copies, launcher, watches", 100 * parts, "%"))
    show(rows, f"a step on {options.ranks} ranks, {options.rounds} rounds in turns", options.json)


if __name__ == "__main__":
    main()
