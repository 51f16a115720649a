"""Step time on several gloo ranks: exact and fast sums beside torch's DDP and Lightning (Fabric).

    python benchmarks/reduction.py [--json] [--ranks 2 4] [--repeats 5] [--millions 1 10 50] [--kinds many few]

The same model, data and SGD for everyone, one micro-batch and one thread per rank, ranks on this machine. "many" is a
row of small layers (256 x 256, or 64 x 64 for a million parameters), "few" has four large ones. Every repeat builds
each way anew, warms it up and times some steps, one way after the other, because machines are noisy; the table has
medians of the repeats (slowest rank), the ratio to DDP with that of the repeat where it was least and most, and the CPU
time of a step, of all threads and ranks together, which other programs on the machine disturb less. All of it takes
about 8 minutes on two cores; each case is printed when it is done.
"""

from __future__ import annotations

import gc
import json
import math
import os
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from table import Row, parser, show
from torch import nn
from torch.nn.parallel import DistributedDataParallel

BATCH = 8
WAYS = ("exact", "fast", "ddp", "lightning")
KINDS = ("many", "few")
Step = Callable[[int], None]


def make_model(millions: int, kind: str) -> tuple[nn.Module, int]:
    """Return (a model of so many million parameters, its width)."""
    torch.manual_seed(0)
    if kind == "few":
        width, layers = math.isqrt(millions * 1_000_000 // 4), 4
    else:
        width = 64 if millions == 1 else 256
        layers = millions * 1_000_000 // (width * width)
    parts: list[nn.Module] = []
    for number in range(layers):
        layer: nn.Module = nn.utils.skip_init(nn.Linear, width, width)
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.uniform_(-(width**-0.5), width**-0.5)
        parts += [layer] if number % 8 else [layer, nn.Tanh()]
    return nn.Sequential(*parts), width


def ours(model: nn.Module, x: torch.Tensor, sums: str) -> tuple[Step, Callable[[], None]]:
    from paceline.config.settings import EngineConfig
    from paceline.data.grain import Batch, Grain
    from paceline.train.engine import Engine

    link = _link()
    rank, size = link.world.rank, link.world.size
    engine = Engine(EngineConfig(device="cpu", threads=1, level=0, sums=sums), link=link)  # type: ignore[arg-type]
    engine.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-4))
    grain = Grain((x, x), rank, np.arange(BATCH))
    batch = Batch(
        *(0, 0, size, size * BATCH, float(size * x.numel()), [grain]),
        starts=tuple(range(size + 1)) if sums == "exact" else None,
    )

    def loss(grain: Grain) -> tuple[torch.Tensor, int]:
        return model(grain.x).square().sum(), x.numel()

    return lambda _: (engine.step(loss, batch), None)[1], engine.release


def ddp(model: nn.Module, x: torch.Tensor) -> tuple[Step, Callable[[], None]]:
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

    def step(_: int) -> None:
        optimizer.zero_grad()
        wrapped(x).square().mean().backward()
        optimizer.step()

    return step, lambda: None


def lightning(model: nn.Module, x: torch.Tensor) -> tuple[Step, Callable[[], None]]:
    from lightning_fabric import Fabric  # what `lightning.fabric` is, without the metrics that package imports
    from lightning_fabric.strategies import DDPStrategy

    fabric = Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy=DDPStrategy())
    fabric.launch()
    wrapped, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=1e-4))

    def step(_: int) -> None:
        optimizer.zero_grad()
        fabric.backward(wrapped(x).square().mean())
        optimizer.step()

    return step, lambda: None


_links: list[Any] = []


def _link() -> Any:
    from paceline.config.settings import EngineConfig
    from paceline.world.start import from_settings

    if not _links:
        _links.append(from_settings(EngineConfig(device="cpu", threads=1)))
    return _links[0]


def seconds(way: str, millions: int, kind: str, num_steps: int) -> tuple[float, float]:
    """Return the mean time of a step on this rank, and the CPU time that it took."""
    model, width = make_model(millions, kind)
    x = torch.randn(BATCH, width, generator=torch.Generator().manual_seed(dist.get_rank()))
    others = {"ddp": ddp, "lightning": lightning}
    step, close = others[way](model, x) if way in others else ours(model, x, way)
    for number in range(2):  # DDP builds its buckets anew after the first one
        step(number)
    dist.barrier()
    began, began_cpu = time.perf_counter(), time.process_time()
    for number in range(num_steps):
        step(number)
    dist.barrier()
    taken = (time.perf_counter() - began) / num_steps
    cpu = (time.process_time() - began_cpu) / num_steps
    close()
    del step, close, model
    gc.collect()
    return taken, cpu


def work(options: Any) -> None:
    """One rank: print a line of JSON per case on the first."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    link = _link()
    with link:
        for millions in options.millions:
            for kind in options.kinds:
                num_steps = max(2, round(options.steps / millions**0.6))
                times: dict[str, list[float]] = {way: [] for way in options.ways}
                cpu: dict[str, list[float]] = {way: [] for way in options.ways}
                for _ in range(options.repeats):
                    for way in options.ways:
                        taken = torch.tensor(seconds(way, millions, kind, num_steps))
                        everyone = [torch.empty_like(taken) for _ in range(dist.get_world_size())]
                        dist.all_gather(everyone, taken)
                        each = torch.stack(everyone)
                        times[way].append(float(each[:, 0].max()))
                        cpu[way].append(float(each[:, 1].sum()))
                if link.is_first:
                    case = {"millions": millions, "kind": kind, "times": times, "cpu": cpu}
                    print("case", json.dumps(case), flush=True)


def main() -> None:
    options_of = parser(__doc__)
    options_of.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    options_of.add_argument("--millions", type=int, nargs="+", default=[1, 10, 50])
    options_of.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    options_of.add_argument("--repeats", type=int, default=5)
    options_of.add_argument("--steps", type=int, default=20, help="steps per repeat with a million parameters")
    options_of.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    options_of.add_argument("--worker", action="store_true")
    options = options_of.parse_args()
    if options.worker:
        work(options)
        return
    rows: list[Row] = []
    for size in options.ranks:
        command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={size}", "--master-port=0"]
        command += ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", str(Path(__file__).resolve())]
        command += [argument for argument in sys.argv[1:] if argument != "--json"] + ["--worker"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith("case "):
                    rows += _rows(size, json.loads(line[5:]), quiet=options.json)
        assert process.returncode == 0, f"{size} ranks failed"
    show(rows, "medians of the repeats, slowest rank", options.json)


def _rows(size: int, case: dict[str, Any], *, quiet: bool) -> list[Row]:
    times = {way: sorted(values) for way, values in case["times"].items()}
    medians = {way: statistics.median(values) for way, values in times.items()}
    name = f"{size} ranks, {case['millions']} M, {case['kind']}"
    cpu = {way: statistics.median(values) for way, values in case["cpu"].items()}
    base, cpu_base = (values.get("ddp", next(iter(values.values()))) for values in (medians, cpu))
    spread = {way: _ratios(values, case["times"].get("ddp", values)) for way, values in case["times"].items()}
    if not quiet:
        words = [
            f"{way} {1e3 * value:.1f} ms ({value / base:.2f}, {spread[way][0]:.2f} to {spread[way][-1]:.2f}; "
            f"CPU {cpu[way] / cpu_base:.2f})"
            for way, value in medians.items()
        ]
        print(f"{name}: {', '.join(words)}", flush=True)
    return [
        row
        for way, value in medians.items()
        for row in (
            Row(name, f"step, {way}", 1e3 * value, "ms", None if way == "ddp" else "ddp", value / base),
            Row(name, f"CPU, {way}", 1e3 * cpu[way], "ms", None if way == "ddp" else "ddp", cpu[way] / cpu_base),
            Row(name, f"spread, {way}", 1e3 * (times[way][-1] - times[way][0]), "ms"),
            *(Row(name, f"{which} ratio, {way}", spread[way][end], "") for which, end in (("least", 0), ("most", -1))),
        )
    ]


def _ratios(values: list[float], others: list[float]) -> list[float]:
    """Return the ratios of neighbours, sorted."""
    return sorted(value / other for value, other in zip(values, others, strict=True))


if __name__ == "__main__":
    main()
