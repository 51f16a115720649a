"""A network in training on the GPUs of one machine: DDP, Lightning and ours, and what to expect before measuring.

    torchrun --nproc-per-node 8 benchmarks/gpu/node.py measure --way ours --batch 256 --out ours-256-8.json
    python benchmarks/gpu/node.py table FOLDER
    python benchmarks/gpu/node.py [--json] expect [--ranks 2 4 8] [--network NAME] [--step-ms 90.73 --batch 256]

`node.sh` runs all of it. A step is forward, CTC, backward, reduction and fused AdamW on a batch of 16.7 s utterances
per rank that lies on its device, as in quartznet.py; steps run without a pause, at the speed of the slowest rank.
`ddp-bf16` and `ddp-fp16` are loops with `DistributedDataParallel` as their user would write them, `lightning` is its
Trainer with the strategy `ddp`, `ours` the engine in the way that `-O4` takes.

`expect` computes what several GPUs will reach from a step of one: see `expected_ms`.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))
from quartznet import FRAMES, Bench, Network, frames_after, make_batch
from rich.console import Console
from rich.table import Table
from table import Row, machine, parser, show

from paceline.config.settings import TrainConfig
from paceline.data.grain import Batch, Grain
from paceline.parallel.summed import FastAdd, Summed
from paceline.recipes.speech.network.config import NetworkSettings, read_network
from paceline.speed import precision
from paceline.speed.autotune.candidates import Candidate
from paceline.speed.graphs import CudaRecorder
from paceline.train import setup
from paceline.train.engine import Engine
from paceline.train.task import accelerate, recordable_of
from paceline.world.discover.environment import World, discover
from paceline.world.link import Link
from paceline.world.start import start

WAYS = ("ddp-bf16", "ddp-fp16", "lightning", "ours")
WARM = 4
BACKWARD_SHARE = 2 / 3
"""Of a step: every product of forward has two in backward."""


@dataclass(frozen=True)
class Fabric:
    """What joins the GPUs of a machine, as its makers publish it."""

    bus_gb_s: float
    """Bus bandwidth of an all-reduce, as nccl-tests counts: 2 (n - 1) / n times the bytes of a rank, by the time."""
    call_us: float
    """What each all-reduce takes beside its bytes."""


NVLINK = Fabric(370.0, 50.0)
"""NVLink 4 has 450 GB/s in each direction; 370 is what NCCL gets through it without the switch's own sums (nccl-tests,
issue 212, a maintainer's answer; with them 475 to 480 on 8 H200, issue 272). The time of a call is a high guess."""
PESSIMISTIC = Fabric(370.0 / 3, 150.0)
"""A third of that and three times the time of a call: buckets of 25 MB are too small for full bandwidth."""


@dataclass(frozen=True)
class Case:
    """What one launch measured."""

    way: str
    ranks: int
    batch: int
    """Of each rank."""
    network: str
    step_ms: float
    peak_gib: float
    note: str = ""
    machine: str = ""
    bucket_bytes: tuple[int, ...] = ()
    """Of one rank's gradients, in the order in which they are sent; ours only."""

    @property
    def rate(self) -> float:
        """Utterances per second of all ranks."""
        return 1e3 * self.ranks * self.batch / self.step_ms


# -- what to expect ----------------------------------------------------------------------------------------------


def all_reduce_ms(num_bytes: int, ranks: int, fabric: Fabric) -> float:
    return 1e-6 * 2 * (ranks - 1) / ranks * num_bytes / fabric.bus_gb_s + 1e-3 * fabric.call_us if ranks > 1 else 0.0


def exposed_ms(bucket_bytes: Sequence[int], backward_ms: float, ranks: int, fabric: Fabric) -> float:
    """Return the milliseconds of all-reduces that are left when backward ends.

    Buckets go one after the other, each as soon as its gradients are there. A weight is used once for every frame, so
    that backward has come through a bucket's weights after their share of its time; the last bucket waits for its end.
    """
    there = [backward_ms * passed / sum(bucket_bytes) for passed in accumulate(bucket_bytes)]
    done = 0.0
    for begins, num_bytes in zip(there, bucket_bytes, strict=True):
        done = max(done, begins) + all_reduce_ms(num_bytes, ranks, fabric)
    return max(0.0, done - backward_ms)


def expected_ms(
    step_ms: float, bucket_bytes: Sequence[int], ranks: int, fabric: Fabric, *, overlaps: bool = True
) -> float:
    """Return the milliseconds of a step on several ranks, from those of one (with its group of one).

    It is that step and what of the all-reduces backward does not hide; all of them, if nothing overlaps. Ranks are
    taken to be equally fast and their batches equally long: a slower one holds up all others by its own lateness.
    """
    if overlaps:
        return step_ms + exposed_ms(bucket_bytes, BACKWARD_SHARE * step_ms, ranks, fabric)
    return step_ms + sum(all_reduce_ms(num_bytes, ranks, fabric) for num_bytes in bucket_bytes)


def bucket_sizes(network: NetworkSettings) -> list[int]:
    """Return the bytes of the buckets in which the engine sends this network's gradients."""
    alone = Link(World(0, 0, 1, 1, 0, 1, "benchmark", None), torch.device("cpu"), 1, ("here",))
    return _bucket_bytes(Summed(list(Network(network).parameters()), alone, FastAdd(alone)))


def _bucket_bytes(strategy: Summed) -> list[int]:
    return [sum(view.nbytes for view in group.values()) for group in strategy.gradient_groups()]


# -- measuring ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Load:
    """What every way trains."""

    network: NetworkSettings
    batch: dict[str, Tensor]
    device: torch.device

    @property
    def size(self) -> int:
        return len(self.batch["mels"])

    def model(self) -> Network:
        torch.manual_seed(0)
        return Network(self.network).to(self.device).train()


def make_load(network: str, size: int, device: torch.device, rank: int, frames: int = FRAMES) -> Load:
    labels = max(1, min(200, frames // 16))
    return Load(read_network(network), make_batch(size, device, 1 + rank, frames, labels), device)


def ddp(load: Load, dtype: torch.dtype) -> Callable[[], object]:
    """A loop as its user would write it."""
    index = [load.device.index] if load.device.type == "cuda" else None
    model = nn.parallel.DistributedDataParallel(load.model(), device_ids=index)
    optimizer = _adamw(model.parameters())
    scaler = torch.amp.GradScaler(load.device.type, enabled=dtype is torch.float16)
    loss_of = _loss(load)

    def step() -> None:
        with torch.autocast(load.device.type, dtype):
            log_probs, _ = model(load.batch["mels"], load.batch["frames"])
        optimizer.zero_grad()
        scaler.scale(loss_of(log_probs)).backward()
        scaler.step(optimizer)
        scaler.update()

    return step


def _loss(load: Load) -> Callable[[Tensor], Tensor]:
    frames, text = frames_after(load.network, load.batch), load.batch["text"]
    labels = load.batch["labels"].cpu()
    return lambda log_probs: F.ctc_loss(
        log_probs.float().transpose(0, 1), text, frames, labels, blank=28, zero_infinity=True
    )


def _adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, 1e-3, fused=True)


class Task(Bench):
    """The same for our engine."""

    def __init__(self, load: Load) -> None:
        super().__init__(load.network)
        self._load = load

    def model(self) -> nn.Module:
        return self._load.model()


@dataclass(frozen=True)
class Ours:
    """A step of the engine on all ranks, each with one grain."""

    step: Callable[[], object]
    way: str
    bucket_bytes: tuple[int, ...]


def ours(load: Load, link: Link, name: str | None) -> Ours:
    task, world = Task(load), link.world
    way = _way(name) if name else _usual_way(task, load.device)
    config = TrainConfig(
        global_batch=load.size * world.size, grains=world.size, optimizer="adamw", lr=1e-3, steps=10_000
    )
    model, engine = task.model(), Engine(config, link=link)
    engine.settle(precision.resolve_candidate(way, config.precision, precision.capabilities(load.device)))
    if way.kernels:
        accelerate(task, model)
    setup.prepare(engine.stepper, task, config, model)
    loss, grain = partial(task.loss, model), Grain(load.batch, world.rank, np.arange(load.size))
    if way.graphs:
        recorded = engine.record(CudaRecorder(load.device), recordable_of(task))
        if not recorded.warm(loss, grain):
            raise SystemExit(f"no CUDA graph: {next(iter(recorded.graphs.failures.values()))}")
    everyone = load.size * world.size
    batch = Batch(0, 0, world.size, everyone, everyone, [grain], own_count=load.size)
    strategy = engine.prepared.strategy
    buckets = _bucket_bytes(strategy) if isinstance(strategy, Summed) else []
    return Ours(lambda: engine.step(loss, batch), way.name, tuple(buckets))


def _way(name: str) -> Candidate:
    """`O2+kernels+graphs`"""
    level, *more = name.removeprefix("-").removeprefix("O").split("+")
    if not level.isdigit() or set(more) - {"kernels", "graphs"}:
        raise SystemExit(f"--ours {name}: a way is named like O2+kernels+graphs")
    return Candidate(int(level), "kernels" in more, "graphs" in more)


def _usual_way(task: Bench, device: torch.device) -> Candidate:
    """Return what `-O4` takes on an H200; what its kernels leave of a network, a compiler is to fuse.

    On a CPU, which may have no bf16, only the logic is tried.
    """
    if device.type == "cpu":
        return Candidate(0)
    return Candidate(3 if task.accelerate(task.model()) else 2, kernels=True, graphs=True)


def lightning_ms(load: Load, steps: int, rounds: int) -> float:
    """Milliseconds of a step of its Trainer."""
    try:
        import lightning.pytorch as pl
    except ImportError:
        import pytorch_lightning as pl
    warnings.simplefilter("ignore")
    for name in ("lightning.pytorch", "pytorch_lightning"):
        logging.getLogger(name).setLevel(logging.ERROR)
    loss_of, marks, ranks = _loss(load), [], int(os.environ.get("WORLD_SIZE", "1"))

    class Module(pl.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.network = load.model()

        def training_step(self, batch: dict[str, Tensor], number: int) -> Tensor:
            log_probs, _ = self.network(batch["mels"], batch["frames"])
            return loss_of(log_probs)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return _adamw(self.parameters())

        def on_train_batch_end(self, outputs: Any, batch: Any, number: int) -> None:
            if (number + 1 - WARM) % steps == 0:
                _meet(load.device)
                marks.append(time.perf_counter())

    num_steps = WARM + steps * rounds
    trainer = pl.Trainer(
        accelerator="gpu" if load.device.type == "cuda" else "cpu", devices=ranks, strategy="ddp",
        precision="bf16-mixed", max_steps=num_steps, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False,
    )  # fmt: skip
    trainer.fit(Module(), torch.utils.data.DataLoader([load.batch] * num_steps, batch_size=None))
    return statistics.median(1e3 * (after - before) / steps for before, after in pairwise(marks))


def _meet(device: torch.device) -> None:
    """All ranks have done what they had to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    if dist.is_initialized():
        dist.barrier()


def step_ms(step: Callable[[], object], device: torch.device, steps: int, rounds: int) -> float:
    """Milliseconds of a step, the slowest rank's: median of the rounds."""
    for _ in range(WARM):
        step()
    times = []
    for _ in range(rounds):
        _meet(device)
        began = time.perf_counter()
        for _ in range(steps):
            step()
        _meet(device)
        times.append(1e3 * (time.perf_counter() - began) / steps)
    return statistics.median(times)


def measure(options: argparse.Namespace) -> None:
    """One launch: every rank runs this."""
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    device = torch.device(options.device)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
        torch.backends.cudnn.benchmark = True
    load = make_load(options.network, options.batch, device, rank, options.frames)
    found, note, buckets = _measured(options, load)
    peak = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else 0.0
    case = Case(options.way, ranks, options.batch, options.network, found, peak, note, machine(), buckets)
    if rank == 0:
        options.out.write_text(json.dumps(asdict(case)) + "\n", encoding="utf-8")
        print(f"{case.way} on {ranks}: {found:.2f} ms, {case.rate:,.0f} utterances/s {note}")
    if dist.is_initialized():
        dist.destroy_process_group()


def _measured(options: argparse.Namespace, load: Load) -> tuple[float, str, tuple[int, ...]]:
    """Milliseconds, the way, and the buckets of gradients."""
    if options.way == "lightning":
        return lightning_ms(load, options.steps, options.rounds), "", ()
    if options.way == "ours":
        world = discover(os.environ)
        link = start(world, device=load.device.type, group_of_one=world.size == 1)
        prepared = ours(load, link, options.ours)
        found = step_ms(prepared.step, load.device, options.steps, options.rounds)
        link.close()
        return found, prepared.way, prepared.bucket_bytes
    dist.init_process_group("nccl" if load.device.type == "cuda" else "gloo")
    step = ddp(load, torch.float16 if options.way == "ddp-fp16" else torch.bfloat16)
    return step_ms(step, load.device, options.steps, options.rounds), "", ()


# -- one table ---------------------------------------------------------------------------------------------------


def read_cases(folder: Path) -> list[Case]:
    values = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))]
    return [Case(**{**value, "bucket_bytes": tuple(value["bucket_bytes"])}) for value in values]


@dataclass(frozen=True)
class Line:
    """One row of the table."""

    case: Case
    scaling: float | None
    """Its rate, over that of one rank times their number."""
    over_ddp: float | None
    """Its rate, over that of the faster loop with DDP on as many ranks."""
    expected: float | None
    """The rate that `expected_ms` gives for it from one rank's step; ours only."""


def compared(cases: Sequence[Case]) -> list[Line]:
    lines = []
    for case in sorted(cases, key=lambda case: (case.network, case.batch, case.ranks, WAYS.index(case.way))):
        alike = [other for other in cases if (other.network, other.batch) == (case.network, case.batch)]
        alone = next((other for other in alike if other.way == case.way and other.ranks == 1), None)
        loops = [other.rate for other in alike if other.way.startswith("ddp") and other.ranks == case.ranks]
        expected = None
        if alone is not None and case.bucket_bytes and case.ranks > 1:
            expected = 1e3 * case.ranks * case.batch / expected_ms(alone.step_ms, case.bucket_bytes, case.ranks, NVLINK)
        lines.append(
            Line(
                case,
                None if alone is None else case.rate / (case.ranks * alone.rate),
                case.rate / max(loops) if loops else None,
                expected,
            )
        )
    return lines


def show_table(folder: Path) -> None:
    cases = read_cases(folder)
    if not cases:
        raise SystemExit(f"{folder}: nothing was measured; the logs in there say why")
    table = Table(title=f"{cases[0].network} on one machine", title_justify="left")
    for name in (
        "utterances/rank",
        "ranks",
        "way",
        "ms/step",
        "utterances/s",
        "scaling",
        "over DDP",
        "expected/s",
        "GiB",
    ):
        table.add_column(name, justify="left" if name == "way" else "right", no_wrap=True)
    place: tuple[int, int] | None = None
    for line in compared(cases):
        case = line.case
        if place is not None and place != (case.batch, case.ranks):
            table.add_section()
        place = case.batch, case.ranks
        table.add_row(
            *(str(case.batch), str(case.ranks), f"{case.way} ({case.note})" if case.note else case.way),
            *(f"{case.step_ms:.2f}", f"{case.rate:,.0f}"),
            "" if line.scaling is None else f"{line.scaling:.3f}",
            "" if line.over_ddp is None else f"{line.over_ddp:.2f}",
            "" if line.expected is None else f"{line.expected:,.0f}",
            f"{case.peak_gib:.1f}" if case.peak_gib else "",
        )
    print(cases[0].machine)
    Console(width=120).print(table)


def show_expected(options: argparse.Namespace) -> None:
    network = read_network(options.network)
    buckets = bucket_sizes(network)
    rows = [Row("gradients", f"bucket {number}", size / 1e6, "MB") for number, size in enumerate(buckets)]
    cases = {
        "370 GB/s": {"fabric": NVLINK},
        "123 GB/s": {"fabric": PESSIMISTIC},
        "123, no overlap": {"fabric": PESSIMISTIC, "overlaps": False},
    }
    for ranks in options.ranks:
        for name, settings in cases.items():
            ms = expected_ms(options.step_ms, buckets, ranks, **settings)
            rate = 1e3 * ranks * options.batch / ms
            case = f"{ranks} GPUs, {name}"
            rows.append(Row(case, "step", ms, "ms", "one GPU", ms / options.step_ms))
            rows.append(Row(case, "rate", rate, "utterances/s"))
    title = f"{options.network}: what to expect from {options.step_ms} ms for {options.batch} utterances on one GPU"
    show(rows, title, options.json)


def main() -> None:
    arguments = parser(__doc__ or "")
    verbs = arguments.add_subparsers(dest="verb", required=True)
    one = verbs.add_parser("measure")
    one.add_argument("--way", choices=WAYS, required=True)
    one.add_argument("--batch", type=int, required=True)
    one.add_argument("--out", type=Path, required=True)
    one.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    one.add_argument("--network", default="quartznet15x5")
    one.add_argument("--frames", type=int, default=FRAMES)
    one.add_argument("--steps", type=int, default=16)
    one.add_argument("--rounds", type=int, default=3)
    one.add_argument("--ours", default=None)
    verbs.add_parser("table").add_argument("folder", type=Path)
    paper = verbs.add_parser("expect")
    paper.add_argument("--network", default="quartznet15x5")
    paper.add_argument("--step-ms", type=float, default=90.73)
    paper.add_argument("--batch", type=int, default=256)
    paper.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    options = arguments.parse_args()
    if options.verb == "table":
        show_table(options.folder)
    elif options.verb == "expect":
        show_expected(options)
    else:
        measure(options)


if __name__ == "__main__":
    main()
