"""What the clock costs per step, and how much of a run's time it has no name for, on every rank.

    python benchmarks/clock.py [--json] [--seconds 12] [--ranks 1 2]

The cost is that of a step's laps (four on one rank, six on several) over the same loop without them; the bound is 3 us.
The share of `other` is measured in real runs of the digits task through the whole trainer, run folder, checkpoints,
validation and loggers included, of at least `--seconds`; the bound is 1 %. `unnamed` is what lies between the clock's
sum and the wall time as measured around the run.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from table import Row, parser, show

NUM_STEPS = 200_000
ROUNDS = 7
ONE_RANK = ("data", "compute", "optimizer", "compute")
SEVERAL_RANKS = ("data", "compute", "communication", "compute", "optimizer", "compute")


def cost_us(laps: tuple[str, ...]) -> float:
    """Median over rounds of a step's laps beside an empty step."""
    from paceline.observe.clock import Clock

    clock = Clock()
    costs = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        for _ in range(NUM_STEPS):
            for _phase in laps:
                pass
        empty = time.perf_counter() - began
        began = time.perf_counter()
        for _ in range(NUM_STEPS):
            for phase in laps:
                clock.lap(phase)
        costs.append((time.perf_counter() - began - empty) / NUM_STEPS * 1e6)
    return statistics.median(costs)


def train(rank: int, size: int, port: int, folder: str, epochs: int, pipe: Any) -> None:
    """One rank of a real run; sends (seconds by phase, wall time)."""
    from paceline import TrainConfig
    from paceline.recipes.digits import Digits
    from paceline.train import loop
    from paceline.train.run import open_run
    from paceline.world.discover.environment import World
    from paceline.world.start import start

    sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    meeting = f"127.0.0.1:{port}" if size > 1 else None
    link = start(World(rank, rank, size, size, 0, 1, "benchmark", meeting), device="cpu", threads=1)
    began = time.perf_counter()
    config = TrainConfig(
        epochs=epochs,
        global_batch=64,
        grains=4,
        lr=0.003,
        level=0,
        device="cpu",
        save_every_steps=100,
        out=Path(folder),
    )
    result = loop.train(open_run(Digits(), config, link))
    wall_s = time.perf_counter() - began
    link.close()
    pipe.send((result.seconds, wall_s))


def run(size: int, epochs: int) -> list[tuple[dict[str, float], float]]:
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        port = free_port()
        for rank in range(size):
            ours, theirs = context.Pipe()
            arguments = (rank, size, port, f"{folder}/run", epochs, theirs)
            process = context.Process(target=train, args=arguments)
            process.start()
            pipes.append(ours)
            processes.append(process)
        answers = [pipe.recv() for pipe in pipes]
        for process in processes:
            process.join()
    return answers


def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        number: int = probe.getsockname()[1]
    return number


def shares(size: int, seconds: float) -> list[Row]:
    """A run of at least so many seconds: a short one first says how many epochs that takes."""
    trial, epochs = run(size, 10), 10
    per_epoch = min(wall - phases["setup"] for phases, wall in trial) / epochs
    epochs = int(1.3 * seconds / per_epoch) + 1
    answers = run(size, epochs)
    rows = []
    for rank, (phases, wall_s) in enumerate(answers):
        case = f"{size} rank{'s' * (size > 1)}, rank {rank}"
        rows.append(Row(case, "wall", wall_s, "s"))
        rows += [Row(case, phase, 100 * value / wall_s, "%") for phase, value in phases.items()]
        rows.append(Row(case, "unnamed", 100 * (1 - sum(phases.values()) / wall_s), "%"))
    return rows


def main() -> None:
    arguments = parser(__doc__ or "")
    arguments.add_argument("--seconds", type=float, default=12.0)
    arguments.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    options = arguments.parse_args()
    rows = [
        Row("one rank", "clock", cost_us(ONE_RANK), "us/step"),
        Row("several ranks", "clock", cost_us(SEVERAL_RANKS), "us/step"),
    ]
    for size in options.ranks:
        rows += shares(size, options.seconds)
    show(rows, "the clock: its cost, and what it has no name for", options.json)


if __name__ == "__main__":
    main()
