"""What each level costs and gains on one GPU, beside the same thing written by hand in plain PyTorch.

    python benchmarks/gpu/levels.py [--json] [--steps 60] [--only raw-bf16 O2]
    python benchmarks/gpu/levels.py --device cpu --steps 1 --grain 2 --size 8 --only raw-fp32 O0 raw-bf16    dry run

A convolutional net with batch norm (128 pictures of 64 x 64 per grain, two grains per step), data on the GPU for
everyone; milliseconds per step, median of 5 interleaved rounds. `raw-*` is a hand-written loop with autocast,
GradScaler or torch.compile as its user would have to write it; it checks gradients for fp16 only, and keys nothing.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))
from device import add_device, announce, wait
from table import Row, parser, show

GRAINS, CLASSES, ROUNDS = 2, 100, 5


@dataclass(frozen=True)
class Load:
    """What every way trains."""

    device: str
    grain: int
    size: int


def make_model() -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    channels = 3
    for width, stride in [(64, 1), (128, 2), (256, 2), (256, 1), (512, 2), (512, 1), (512, 1)]:
        layers += [nn.Conv2d(channels, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
        channels = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, CLASSES))


def make_data(load: Load) -> torch.utils.data.TensorDataset:
    generator = torch.Generator().manual_seed(1)
    samples = load.grain * GRAINS * 8
    x = torch.randn(samples, 3, load.size, load.size, generator=generator)
    return torch.utils.data.TensorDataset(x, torch.randint(0, CLASSES, (samples,), generator=generator))


def timed(run: Callable[[int], None], num_steps: int, device: str) -> float:
    wait(device)
    began = time.perf_counter()
    run(num_steps)
    wait(device)
    return (time.perf_counter() - began) / num_steps * 1e3


def ours(load: Load, **settings: Any) -> Callable[[int], None]:
    from paceline import Engine
    from paceline.speed import precision

    engine = Engine(device=load.device, **settings)
    model = make_model().to(load.device)
    engine.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True))
    data = make_data(load)

    def loss(grain: Any) -> tuple[torch.Tensor, int]:
        return F.cross_entropy(model(grain.x).float(), grain.y, reduction="sum"), len(grain)

    def run(num_steps: int) -> None:
        precision.apply(engine.precision)  # TF32 is a setting of the whole process
        engine.resume_at(engine.num_steps, (0, 0, 0))
        batches = engine.batches(data, global_batch=load.grain * GRAINS, grains=GRAINS, epochs=10_000, workers=0)
        for batch in islice(batches, num_steps):
            engine.step(loss, batch)

    return run


def by_hand(load: Load, tf32: bool, autocast: torch.dtype | None, compiled: bool) -> Callable[[int], None]:
    device, grain = load.device, load.grain
    model = make_model().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True)
    scaler = torch.amp.GradScaler(device, enabled=autocast is torch.float16)
    x, y = (tensor.to(device) for tensor in make_data(load).tensors)
    if compiled:
        model.compile()

    def run(num_steps: int) -> None:
        mode = "tf32" if tf32 else "ieee"
        torch.backends.cuda.matmul.fp32_precision = mode
        torch.backends.cudnn.conv.fp32_precision = mode
        order, position = torch.randperm(len(x), device=device), 0
        for _ in range(num_steps):
            optimizer.zero_grad()
            for _ in range(GRAINS):
                part = order[position : position + grain]
                position = (position + grain) % len(x)
                inputs, labels = x[part], y[part]
                with torch.autocast(device, autocast or torch.bfloat16, enabled=autocast is not None):
                    loss = F.cross_entropy(model(inputs).float(), labels, reduction="sum") / (grain * GRAINS)
                scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()

    return run


WAYS: dict[str, tuple[str, Callable[[Load], Callable[[int], None]]]] = {
    "raw-fp32": ("", lambda load: by_hand(load, False, None, False)),
    "O0": ("raw-fp32", lambda load: ours(load, level=0)),
    "raw-tf32": ("", lambda load: by_hand(load, True, None, False)),
    "O1": ("raw-tf32", lambda load: ours(load, level=1)),
    "raw-bf16": ("", lambda load: by_hand(load, True, torch.bfloat16, False)),
    "O2": ("raw-bf16", lambda load: ours(load, level=2)),
    "raw-bf16-compile": ("", lambda load: by_hand(load, True, torch.bfloat16, True)),
    "O3": ("raw-bf16-compile", lambda load: ours(load, level=3)),
    "raw-fp16": ("", lambda load: by_hand(load, True, torch.float16, False)),
    "fp16": ("raw-fp16", lambda load: ours(load, precision="fp16")),
    "fp16-master": ("raw-fp16", lambda load: ours(load, precision="fp16-master")),
    "fp16-pure": ("raw-fp16", lambda load: ours(load, precision="fp16-pure")),
}


def main() -> None:
    arguments = parser(__doc__ or "")
    add_device(arguments)
    arguments.add_argument("--steps", type=int, default=60)
    arguments.add_argument("--grain", type=int, default=128)
    arguments.add_argument("--size", type=int, default=64)
    arguments.add_argument("--only", nargs="+", default=list(WAYS), choices=list(WAYS))
    options = arguments.parse_args()
    announce(options.device)
    load = Load(options.device, options.grain, options.size)
    runs = {}
    for name in options.only:
        runs[name] = WAYS[name][1](load)
        timed(runs[name], min(8, options.steps), load.device)
        print(f"{name}: ready", file=sys.stderr, flush=True)
    rounds = []
    for number in range(ROUNDS):
        rounds.append({name: timed(run, options.steps, load.device) for name, run in runs.items()})
        line = ", ".join(f"{name} {ms:.3f} ms" for name, ms in rounds[-1].items())
        print(f"round {number + 1}: {line}", file=sys.stderr, flush=True)
    found = {name: statistics.median(each[name] for each in rounds) for name in runs}
    rows = []
    for name, ms in found.items():
        peer = WAYS[name][0]
        title = f"-{name}" if name.startswith("O") else name
        rows.append(
            Row(title, "step", ms, "ms", peer, ms / found[peer]) if peer in found else Row(title, "step", ms, "ms")
        )
    show(rows, "levels on one GPU", options.json)


if __name__ == "__main__":
    main()
