"""What each level costs and gains on one GPU, beside the same thing written by hand in plain PyTorch.

    python benchmarks/gpu/levels.py [--json] [--steps 60]

A convolutional net with batch norm (128 pictures of 64 x 64 per grain, two grains per step), data on the GPU for
everyone; milliseconds per step, median of 5 interleaved rounds. `raw-*` is a hand-written loop with autocast,
GradScaler or torch.compile as its user would have to write it; it checks gradients for fp16 only, and keys nothing.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))
from table import Row, parser, show

GRAIN, GRAINS, SIZE, CLASSES = 128, 2, 64, 100


def make_model() -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    channels = 3
    for width, stride in [(64, 1), (128, 2), (256, 2), (256, 1), (512, 2), (512, 1), (512, 1)]:
        layers += [nn.Conv2d(channels, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
        channels = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, CLASSES))


def make_data(num_steps: int) -> torch.utils.data.TensorDataset:
    generator = torch.Generator().manual_seed(1)
    samples = GRAIN * GRAINS * min(num_steps, 8)
    x = torch.randn(samples, 3, SIZE, SIZE, generator=generator)
    return torch.utils.data.TensorDataset(x, torch.randint(0, CLASSES, (samples,), generator=generator))


def timed(run: Callable[[int], None], num_steps: int) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter()
    run(num_steps)
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / num_steps * 1e3


def ours(settings: dict[str, Any]) -> Callable[[int], None]:
    from paceline import Engine
    from paceline.speed import precision

    engine = Engine(device="cuda", **settings)
    model = make_model().cuda()
    engine.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True))
    data = make_data(64)

    def loss(grain: Any) -> tuple[torch.Tensor, int]:
        return F.cross_entropy(model(grain.x).float(), grain.y, reduction="sum"), len(grain)

    def run(num_steps: int) -> None:
        precision.apply(engine.precision)  # TF32 is a setting of the whole process
        engine.resume_at(engine.num_steps, (0, 0, 0))
        batches = engine.batches(data, global_batch=GRAIN * GRAINS, grains=GRAINS, epochs=10_000, workers=0)
        for batch in islice(batches, num_steps):
            engine.step(loss, batch)

    return run


def by_hand(tf32: bool, autocast: torch.dtype | None, compiled: bool) -> Callable[[int], None]:
    model = make_model().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True)
    scaler = torch.amp.GradScaler("cuda", enabled=autocast is torch.float16)
    x, y = (tensor.cuda() for tensor in make_data(64).tensors)
    if compiled:
        model.compile()

    def run(num_steps: int) -> None:
        mode = "tf32" if tf32 else "ieee"
        torch.backends.cuda.matmul.fp32_precision = mode
        torch.backends.cudnn.conv.fp32_precision = mode
        order, position = torch.randperm(len(x), device="cuda"), 0
        for _ in range(num_steps):
            optimizer.zero_grad()
            for _ in range(GRAINS):
                part = order[position : position + GRAIN]
                position = (position + GRAIN) % len(x)
                inputs, labels = x[part], y[part]
                with torch.autocast("cuda", autocast or torch.bfloat16, enabled=autocast is not None):
                    loss = F.cross_entropy(model(inputs).float(), labels, reduction="sum") / (GRAIN * GRAINS)
                scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()

    return run


WAYS: dict[str, tuple[str, Callable[[], Callable[[int], None]]]] = {
    "raw-fp32": ("", lambda: by_hand(False, None, False)),
    "-O0": ("raw-fp32", lambda: ours({"level": 0})),
    "raw-tf32": ("", lambda: by_hand(True, None, False)),
    "-O1": ("raw-tf32", lambda: ours({"level": 1})),
    "raw-bf16": ("", lambda: by_hand(True, torch.bfloat16, False)),
    "-O2": ("raw-bf16", lambda: ours({"level": 2})),
    "raw-bf16-compile": ("", lambda: by_hand(True, torch.bfloat16, True)),
    "-O3": ("raw-bf16-compile", lambda: ours({"level": 3})),
    "raw-fp16": ("", lambda: by_hand(True, torch.float16, False)),
    "fp16": ("raw-fp16", lambda: ours({"precision": "fp16"})),
    "fp16-master": ("raw-fp16", lambda: ours({"precision": "fp16-master"})),
    "fp16-pure": ("raw-fp16", lambda: ours({"precision": "fp16-pure"})),
}


def main() -> None:
    arguments = parser(__doc__ or "")
    arguments.add_argument("--steps", type=int, default=60)
    options = arguments.parse_args()
    runs = {name: build() for name, (_, build) in WAYS.items()}
    for run in runs.values():
        timed(run, 8)
    rounds = [{name: timed(run, options.steps) for name, run in runs.items()} for _ in range(5)]
    found = {name: statistics.median(each[name] for each in rounds) for name in runs}
    rows = [
        Row(name, "step", found[name], "ms", peer or None, found[name] / found[peer] if peer else None)
        for name, (peer, _) in WAYS.items()
    ]
    show(rows, "levels on one GPU", options.json)


if __name__ == "__main__":
    main()
