"""What it costs to add the gradients of a step's grains in one order (`--sums exact`), inside one rank on a GPU.

    python benchmarks/gpu/grains.py [--json] [--batch 256] [--grains 2 4 8] [--network quartznet15x5]

QuartzNet 15x5 at `-O2 + kernels + graphs` on a batch of 16.7 s utterances that lies on the GPU, cut into grains, as in
group.py; fused AdamW. Exact and fast sums are timed in turns, 8 steps each without a pause; medians of 5 rounds.
Kernels are compiled in threads before: 8 grains alone take less than a minute, most of it start and compilation.
"""

from __future__ import annotations

import gc
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))
from quartznet import Bench, make_batch
from table import Row, parser, show

from paceline.config.settings import TrainConfig
from paceline.data.grain import Batch, Grain, map_tensors
from paceline.recipes.asr.network.config import read_network
from paceline.speed.autotune.candidates import Candidate
from paceline.train.autotune.timing import TimedSteps, Workload, compile_kernels
from paceline.world.discover.environment import World
from paceline.world.start import start

STEPS, ROUNDS = 8, 5
CANDIDATE = Candidate(2, True, True)


class Steps(TimedSteps):
    """Steps on one batch of several grains, which all have one shape."""

    def __init__(self, workload: Workload) -> None:
        super().__init__(CANDIDATE, replace(workload, grains=workload.grains[:1]))
        grains = [Grain(grain.data, number, grain.samples) for number, grain in enumerate(workload.grains)]
        size = sum(map(len, grains))
        starts = (0, len(grains))
        self._batches = [Batch(0, 0, len(grains), size, size, grains, own_count=size, starts=starts)]


def seconds(steps: Steps) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(STEPS):
        steps()
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / STEPS


def _say(text: str, began: float) -> None:
    print(f"{time.perf_counter() - began:5.1f} s  {text}", file=sys.stderr, flush=True)


def main() -> None:
    began = time.perf_counter()
    arguments = parser(__doc__ or "")
    arguments.add_argument("--network", default="quartznet15x5")
    arguments.add_argument("--batch", type=int, default=256)
    arguments.add_argument("--grains", type=int, nargs="+", default=[2, 4, 8])
    options = arguments.parse_args()
    torch.backends.cudnn.benchmark = True
    task, rows = Bench(read_network(options.network)), []
    with start(World(0, 0, 1, 1, 0, 1, "benchmark", None), device="cuda") as link:
        for number in options.grains:
            size = options.batch // number
            data = make_batch(size)
            grains = [Grain(map_tensors(torch.clone, data), each, np.arange(size)) for each in range(number)]
            entrants: dict[str, Steps] = {}
            for sums in ("fast", "exact"):
                config = TrainConfig(
                    global_batch=options.batch, grains=number, optimizer="adamw", lr=1e-3, steps=1000, sums=sums
                )
                workload = Workload(task, config, link, task.model(), grains)
                if not entrants:
                    compile_kernels(CANDIDATE, lambda done, total: None, workload=replace(workload, grains=grains[:1]))
                    _say(f"{number} grains: compiled", began)
                entrants[sums] = Steps(workload)
                for _ in range(3):
                    entrants[sums]()
                _say(f"{number} grains: {sums} ready", began)
            rounds = [{sums: seconds(steps) for sums, steps in entrants.items()} for _ in range(ROUNDS)]
            found = {sums: 1e3 * statistics.median(each[sums] for each in rounds) for sums in entrants}
            name = f"{number} grains of {size}"
            _say(f"{name}: {', '.join(f'{sums} {ms:.3f} ms' for sums, ms in found.items())}", began)
            rows.append(Row(f"{name}, fast", "step", found["fast"], "ms"))
            rows.append(Row(f"{name}, exact", "step", found["exact"], "ms", "fast", found["exact"] / found["fast"]))
            entrants.clear()
            gc.collect()
            torch.cuda.empty_cache()
    show(rows, f"{options.network}: sums over the grains of a rank", options.json)


if __name__ == "__main__":
    main()
