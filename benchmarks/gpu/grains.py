"""What it costs to add the gradients of a step's grains in one order (`--sums exact`), inside one rank on a GPU.

    python benchmarks/gpu/grains.py [--json] [--batch 256] [--grains 2 4 8] [--network quartznet15x5]
    python benchmarks/gpu/grains.py --device cpu --network small --batch 4 --grains 2 --frames 160 --labels 8 --steps 1

QuartzNet 15x5 at `-O2 + kernels + graphs` on a batch of 16.7 s utterances that lies on the GPU, cut into grains, as in
group.py; fused AdamW. Exact and fast sums are timed in turns, 8 steps each without a pause; medians of 5 rounds.
Kernels are compiled in threads before: 8 grains alone take less than a minute, most of it start and compilation.
"""

from __future__ import annotations

import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))
from device import add_device, announce, clear, is_cuda, wait
from quartznet import FRAMES, LABELS, Bench, make_batch
from table import Row, parser, show

from paceline.config.settings import TrainConfig
from paceline.data.grain import Batch, Grain, map_tensors
from paceline.recipes.speech.network.config import read_network
from paceline.speed.autotune.candidates import Candidate
from paceline.train.autotune.timing import TimedSteps, Workload, compile_kernels
from paceline.world.discover.environment import World
from paceline.world.start import start

STEPS, ROUNDS = 8, 5
CANDIDATE = Candidate(2, True, True)


class Steps(TimedSteps):
    """Steps on one batch of several grains, which all have one shape."""

    def __init__(self, candidate: Candidate, workload: Workload) -> None:
        super().__init__(candidate, replace(workload, grains=workload.grains[:1]))
        grains = [Grain(grain.data, number, grain.samples) for number, grain in enumerate(workload.grains)]
        size = sum(map(len, grains))
        starts = (0, len(grains))
        self._batches = [Batch(0, 0, len(grains), size, size, grains, own_count=size, starts=starts)]


def seconds(steps: Steps, number: int, device: str) -> float:
    wait(device)
    began = time.perf_counter()
    for _ in range(number):
        steps()
    wait(device)
    return (time.perf_counter() - began) / number


def _say(text: str, began: float) -> None:
    print(f"{time.perf_counter() - began:5.1f} s  {text}", file=sys.stderr, flush=True)


def main() -> None:
    began = time.perf_counter()
    arguments = parser(__doc__ or "")
    arguments.add_argument("--network", default="quartznet15x5")
    arguments.add_argument("--batch", type=int, default=256)
    arguments.add_argument("--grains", type=int, nargs="+", default=[2, 4, 8])
    add_device(arguments)
    arguments.add_argument("--frames", type=int, default=FRAMES)
    arguments.add_argument("--labels", type=int, default=LABELS)
    arguments.add_argument("--steps", type=int, default=STEPS)
    options = arguments.parse_args()
    announce(options.device)
    torch.backends.cudnn.benchmark = True
    way = CANDIDATE if is_cuda(options.device) else Candidate(0)
    task, rows = Bench(read_network(options.network), options.device), []
    with start(World(0, 0, 1, 1, 0, 1, "benchmark", None), device=options.device) as link:
        for number in options.grains:
            size = options.batch // number
            data = make_batch(size, options.device, 1, options.frames, options.labels)
            grains = [Grain(map_tensors(torch.clone, data), each, np.arange(size)) for each in range(number)]
            entrants: dict[str, Steps] = {}
            for sums in ("fast", "exact"):
                config = TrainConfig(
                    global_batch=options.batch, grains=number, optimizer="adamw", lr=1e-3, steps=1000, sums=sums
                )
                workload = Workload(task, config, link, task.model(), grains)
                if not entrants:
                    compile_kernels(way, lambda done, total: None, workload=replace(workload, grains=grains[:1]))
                    _say(f"{number} grains: compiled", began)
                entrants[sums] = Steps(way, workload)
                for _ in range(3):
                    entrants[sums]()
                _say(f"{number} grains: {sums} ready", began)
            rounds = [
                {sums: seconds(steps, options.steps, options.device) for sums, steps in entrants.items()}
                for _ in range(ROUNDS)
            ]
            found = {sums: 1e3 * statistics.median(each[sums] for each in rounds) for sums in entrants}
            name = f"{number} grains of {size}"
            _say(f"{name}: {', '.join(f'{sums} {ms:.3f} ms' for sums, ms in found.items())}", began)
            rows.append(Row(f"{name}, fast", "step", found["fast"], "ms"))
            rows.append(Row(f"{name}, exact", "step", found["exact"], "ms", "fast", found["exact"] / found["fast"]))
            entrants.clear()
            clear(options.device)
    show(rows, f"{options.network}: sums over the grains of a rank", options.json)


if __name__ == "__main__":
    main()
