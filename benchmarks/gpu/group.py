"""A step at `-O2 + kernels + graphs` with a process group of one rank (NCCL), beside the same without a group.

    python benchmarks/gpu/group.py [--json] [--batches 64 256] [--network quartznet15x5] [--profile]
    python benchmarks/gpu/group.py --device cpu --network small --batches 2 --frames 160 --labels 8 --steps 1    dry run

QuartzNet 15x5 on a batch of 16.7 s utterances that lies on the GPU, as in quartznet.py; fused AdamW. With a group there
are buckets, their all-reduces beside the replay, the tally and shared-out batch statistics: what several ranks do, but
for the network. Ways are timed in turns, 16 steps each without a pause; medians of 5 rounds.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))
from device import add_device, announce, clear, is_cuda, wait
from quartznet import FRAMES, LABELS, Bench, make_batch, show_profile
from table import Row, parser, show

from paceline.config.settings import TrainConfig
from paceline.data.grain import Grain
from paceline.recipes.speech.network.config import read_network
from paceline.speed.autotune.candidates import Candidate
from paceline.train.autotune.timing import TimedSteps, Workload, compile_kernels
from paceline.world.discover.environment import World
from paceline.world.link import Link
from paceline.world.start import start

STEPS, ROUNDS = 16, 5
RECORDED, PLAIN = Candidate(2, True, True), Candidate(2, True, False)
MORE: dict[str, Any] = {"clip_norm": 1.0, "ema": 0.999}
PARAM: dict[str, Any] = {"reduce": "param", "sync_step": 8}
WAYS: dict[str, tuple[bool, Candidate, dict[str, Any]]] = {
    "alone": (False, RECORDED, {}),
    "group": (True, RECORDED, {}),
    "alone, clipping and EMA": (False, RECORDED, MORE),
    "group, clipping and EMA": (True, RECORDED, MORE),
    "group, param every 8": (True, RECORDED, PARAM),
    "group without graphs": (True, PLAIN, {}),
}


def seconds(steps: TimedSteps, number: int, device: str) -> tuple[float, float]:
    """Seconds of a step, and of launching it."""
    wait(device)
    began = time.perf_counter()
    for _ in range(number):
        steps()
    launched = time.perf_counter()
    wait(device)
    return (time.perf_counter() - began) / number, (launched - began) / number


def main() -> None:
    arguments = parser(__doc__ or "")
    arguments.add_argument("--network", default="quartznet15x5")
    arguments.add_argument("--batches", type=int, nargs="+", default=[64, 256])
    arguments.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS))
    arguments.add_argument("--profile", action="store_true")
    add_device(arguments)
    arguments.add_argument("--frames", type=int, default=FRAMES)
    arguments.add_argument("--labels", type=int, default=LABELS)
    arguments.add_argument("--steps", type=int, default=STEPS)
    options = arguments.parse_args()
    announce(options.device)
    torch.backends.cudnn.benchmark = True
    group = start(World(0, 0, 1, 1, 0, 1, "benchmark", None), device=options.device, group_of_one=True)
    assert not is_cuda(options.device) or "cuda:nccl" in dist.get_backend_config()
    alone = Link(group.world, group.device, group.threads, group.hosts)
    task, rows = Bench(read_network(options.network), options.device), []
    for size in options.batches:
        grain = Grain(make_batch(size, options.device, 1, options.frames, options.labels), 0, np.arange(size))
        entrants: dict[str, TimedSteps] = {}
        for name in options.ways:
            has_group, candidate, settings = WAYS[name]
            candidate = candidate if is_cuda(options.device) else Candidate(0)
            config = TrainConfig(global_batch=size, optimizer="adamw", lr=1e-3, steps=1000, **settings)
            workload = Workload(task, config, group if has_group else alone, task.model(), [grain])
            if not entrants:
                compile_kernels(candidate, lambda done, total: None, workload=workload)
            entrants[name] = TimedSteps(candidate, workload)
            for _ in range(3):
                entrants[name]()
        rounds = [
            {name: seconds(steps, options.steps, options.device) for name, steps in entrants.items()}
            for _ in range(ROUNDS)
        ]
        found = {name: 1e3 * statistics.median(each[name][0] for each in rounds) for name in entrants}
        launching = {name: 1e3 * statistics.median(each[name][1] for each in rounds) for name in entrants}
        for name, ms in found.items():
            peer = "alone, clipping and EMA" if "clipping" in name else "alone"
            has_peer = peer in found and peer != name
            rows.append(
                Row(f"{name}, batch {size}", "step", ms, "ms", peer if has_peer else None, ms / found[peer])
                if has_peer
                else Row(f"{name}, batch {size}", "step", ms, "ms")
            )
            print(f"batch {size}: {name}: {ms:.3f} ms, launched in {launching[name]:.3f}", file=sys.stderr, flush=True)
        if options.profile and is_cuda(options.device):
            for name, steps in entrants.items():
                print(name)
                show_profile(steps)
        entrants.clear()
        clear(options.device)
    show(rows, f"{options.network}: a group of one rank", options.json)
    group.close()


if __name__ == "__main__":
    main()
