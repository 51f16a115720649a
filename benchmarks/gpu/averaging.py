"""Gradient and parameter reduction with CUDA tensors: NCCL with one rank, ranks that share the GPU through gloo.

    python benchmarks/gpu/averaging.py [--json] [--steps 40]

All against one rank without a process group. A small convolutional net without batch norm, fp32, SGD with momentum,
4 grains. `grad`, and `param` with one step between averages, must give the losses of one rank to rounding; `param` with
8 steps, blocking, overlapped and in int8, comes near. Several ranks and runs on one GPU say nothing of speed;
milliseconds are shown to see that nothing hangs.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

sys.path.insert(0, str(Path(__file__).parents[1]))
from table import Row, parser, show

from paceline.train.engine import Engine
from paceline.world.discover.environment import World
from paceline.world.start import start

WAYS: dict[str, dict[str, Any]] = {
    "grad": {},
    "grad bf16": {"wire": "bf16"},
    "param 1": {"reduce": "param", "sync_step": 1},
    "param 8": {"reduce": "param", "sync_step": 8},
    "param 8 overlapped": {"reduce": "param", "sync_step": 8, "sync_overlap": 8},
    "param 8 overlapped int8": {"reduce": "param", "sync_step": 8, "sync_overlap": 8, "wire": "int8"},
}
PORT = 29_631


def train(rank: int, size: int, port: int, settings: dict[str, Any], steps: int, out: str, has_group: bool) -> None:
    torch.backends.cudnn.deterministic = True
    world = World(rank, rank, size, size, 0, 1, "benchmark", f"127.0.0.1:{port}" if size > 1 else None)
    link = start(world, device="cuda", share_devices=size > 1, group_of_one=has_group)
    if size == 1 and has_group:
        assert "cuda:nccl" in torch.distributed.get_backend_config()
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv1d(8, 64, 9, padding=4), nn.ReLU(), nn.Conv1d(64, 64, 9, padding=4), nn.ReLU(), nn.Conv1d(64, 4, 1)
    )
    x = torch.randn(32 * steps, 8, 100)
    y = x.cumsum(2)[:, :4] * 0.1
    engine = Engine(link=link, level=0, device="cuda", **settings)
    engine.prepare(model, torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, fused=True))

    def loss(grain: Any) -> Any:
        return (model(grain.x) - grain.y).square().mean((1, 2)).sum(), len(grain)

    done = []
    began = time.perf_counter()
    for batch in engine.batches(TensorDataset(x, y), global_batch=32, grains=4, order="none", workers=0):
        done.append(engine.step(loss, batch))
    engine.sync()
    torch.cuda.synchronize()
    took = time.perf_counter() - began
    if link.is_first:
        Path(out).write_text(json.dumps({"losses": [step.loss for step in done], "ms": 1e3 * took / len(done)}))
    link.close()


def run(size: int, number: int, settings: dict[str, Any], steps: int, has_group: bool = True) -> dict[str, Any]:
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        out = f"{folder}/found.json"
        ranks = [
            context.Process(target=train, args=(rank, size, PORT + number, settings, steps, out, has_group))
            for rank in range(size)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        if any(process.exitcode for process in ranks):
            raise SystemExit(f"{settings} failed on {size} ranks")
        found: dict[str, Any] = json.loads(Path(out).read_text())
        return found


def main() -> None:
    arguments = parser(str(__doc__))
    arguments.add_argument("--steps", type=int, default=40)
    options = arguments.parse_args()
    cases = [(number, way, size) for number, way in enumerate(WAYS) for size in (1, 2, 4)]
    # Most of the time processes start: side by side, several at once.
    with ThreadPoolExecutor(4) as pool:
        alone = pool.submit(run, 1, 0, {}, options.steps, has_group=False)
        runs = [pool.submit(run, size, 10 * number + size, WAYS[way], options.steps) for number, way, size in cases]
        one = alone.result()
    rows = [Row("one rank", "final loss", one["losses"][-1], ""), Row("one rank", "step", one["ms"], "ms")]
    for (_, way, size), running in zip(cases, runs, strict=True):
        found = running.result()
        case = f"{way}, {size} ranks, gloo" if size > 1 else f"{way}, 1 rank, NCCL"
        far = max(abs(a - b) / abs(b) for a, b in zip(found["losses"], one["losses"], strict=True))
        ratio = found["losses"][-1] / one["losses"][-1]
        rows.append(Row(case, "final loss", found["losses"][-1], "", "one rank", ratio))
        rows.append(Row(case, "largest relative difference of a loss", far, ""))
        rows.append(Row(case, "step", found["ms"], "ms"))
    show(rows, torch.cuda.get_device_name(), options.json)


if __name__ == "__main__":
    main()
