"""FastConformer in training on one GPU: the plain ways to run it beside our levels, from random data on the device.

    python benchmarks/gpu/conformer.py [--json] [--batches 64 256] [--networks fastconformer-m fastconformer-l]
        [--only bf16 O2+kernels+graphs O4] [--classes 1024] [--profile] [--ways aside] [--compile-only]
    python benchmarks/gpu/conformer.py --device cpu --networks fastconformer-s --layers 1 --batches 2 --frames 96
        --subwords 2 --steps 1

A step is forward, CTC, backward and fused AdamW on a batch of 16.7 s utterances (1,672 frames of 80 mels, lengths 70
to 100 %, 60 subwords), median of 3 rounds of 8 without a pause. `bf16` is a loop as its user would write it,
`bf16-compile` compiled, `bf16-graphs` compiled with CUDA graphs (`reduce-overhead`), which takes minutes; `bf16-layers`
has each layer compiled, which takes seconds since they are alike, and `bf16-layers-graphs` is that recorded as one CUDA
graph by hand. All have our CTC, which is faster than torch's. `O2` is our engine on the plain modules,
`O2+kernels+graphs` a way that `O4` may choose, and `O4` the fastest of its ways, found as a run finds it. `--profile`
shows where a step goes. `--ways` runs our levels a second time, with other kernels than those in use
(`paceline.speed.layers.kernels.ways`). `--compile-only` fills the caches of torch and Triton, and times nothing.

The floor of a step is the sum of what each part needs at least on an H200: FLOPs of the products, padding included, at
788 TFLOP/s, the rate of a large product there, or bytes at 4.3 TB/s, whichever is more. Bytes are those of activations
in bfloat16 that each of the passes between products reads and writes once.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))
from device import Device, add_device, announce, candidate, clear, compile_kernels, is_cuda, peak_gib, wait
from quartznet import STEPS, show_profile, step_ms
from table import Row, parser, show

from paceline.config.settings import TrainConfig
from paceline.data.grain import Grain
from paceline.recipes.speech.fast import accelerate
from paceline.recipes.speech.network.config import NetworkSettings, read_network
from paceline.recipes.speech.network.conformer.encoder import ConformerEncoder
from paceline.recipes.speech.network.encoder import Decoder
from paceline.recipes.speech.text.ctc import ctc_loss_sum
from paceline.speed.autotune.candidates import Candidate, candidates
from paceline.speed.autotune.choice import choose
from paceline.speed.layers.kernels.ways import MEASURED, Ways, using
from paceline.train.autotune import timing
from paceline.train.task import Accelerates, Recordable, Task
from paceline.world.discover.environment import discover
from paceline.world.start import start

FRAMES, SUBWORDS = 1672, 60
FLOPS, BYTES = 788e12, 4.3e12
"""Of an H200, per second: a product of 8192 x 8192 x 8192 in bfloat16, and a copy in its memory."""
PLAIN = ("bf16", "bf16-layers", "bf16-layers-graphs", "bf16-compile", "bf16-graphs")


class Network(nn.Module):
    """Mels to log-probabilities."""

    def __init__(self, network: NetworkSettings, num_classes: int) -> None:
        super().__init__()
        self.encoder = ConformerEncoder(network)
        self.decoder = Decoder(network.channels[-1], num_classes)

    def forward(self, mels: Tensor, frames: Tensor) -> tuple[Tensor, Tensor]:
        encoded, lengths = self.encoder(mels, frames)
        return self.decoder(encoded), lengths


@dataclass(frozen=True)
class Workload:
    """A network and a batch size."""

    network: NetworkSettings
    num_classes: int
    size: int
    frames: int = FRAMES
    subwords: int = SUBWORDS
    device: Device = "cuda"

    def model(self) -> Network:
        torch.manual_seed(0)
        return Network(self.network, self.num_classes).to(self.device).train()

    def batch(self) -> dict[str, Tensor]:
        device, labels = self.device, (self.size, self.subwords)
        dice = torch.Generator(device).manual_seed(1)
        frames = (self.frames * (0.7 + 0.3 * torch.rand(self.size, device=device, generator=dice))).long()
        frames[0] = self.frames
        mels = self.network.features.num_mels
        return {
            "mels": torch.randn(self.size, mels, self.frames, device=device, generator=dice),
            "frames": frames,
            "text": torch.randint(0, self.num_classes - 1, labels, device=device, generator=dice),
            "labels": torch.full((self.size,), self.subwords, device=device),
        }

    def floor_ms(self) -> dict[str, float]:
        """Return what each part of a step needs at least, in milliseconds; backward is twice the products."""
        settings = self.network.conformer
        assert settings is not None
        mels = self.network.features.num_mels
        num_frames, width, channels = settings.output_length(self.frames), settings.d_model, settings.conv_channels
        rows = self.size * num_frames
        of_layer = 2 * 2 * width * settings.d_ff + (3 + 1 + 2 + 1) * width * width
        # Content and positions, of which there are twice as many, then values; backward of each of them is two.
        of_attention = 4 * num_frames * width
        middle = self.size * (self.frames // 4) * (mels // 4)
        of_begin = (middle + middle / 4) * channels**2 + rows * channels * (mels // 8) * width
        # Read and written between products, in activations of a layer's width: 40 forward, 57 backward.
        passes = 97 * rows * width * 2
        # The activation behind the first product and the one before it, read or written 4 times each, and the smaller.
        of_strides = (8 * middle + 6 * middle / 4) * channels * 2 + 4 * self.size * self.frames * mels
        products = 3 * 2 / FLOPS
        seconds = {
            "products of the layers": settings.n_layers * rows * of_layer * products,
            "attention": settings.n_layers * rows * of_attention * products,
            "between the products": settings.n_layers * passes / BYTES,
            "convolutions before the layers": max(of_begin * products, of_strides / BYTES),
            "last product": rows * width * self.num_classes * products,
        }
        return {name: 1e3 * value for name, value in seconds.items()}


class Bench(Task, Accelerates, Recordable):
    """The same for our engine."""

    def __init__(self, work: Workload) -> None:
        super().__init__()
        self._work = work

    def model(self) -> nn.Module:
        return self._work.model()

    def loss(self, model: nn.Module, grain: Grain) -> tuple[Tensor, int]:
        log_probs, lengths = model(grain["mels"], grain["frames"])
        return ctc_loss_sum(log_probs, grain["text"], lengths, grain["labels"]), len(grain)

    def accelerate(self, model: nn.Module) -> Sequence[str]:
        assert isinstance(model, Network)
        return accelerate(model.encoder)

    def recordable(self, grain: Grain) -> Any:
        return grain.data

    def optimizer(self, groups: list[dict[str, Any]], settings: Any, device: torch.device) -> torch.optim.Optimizer:
        return torch.optim.AdamW(groups, lr=1e-4, fused=True)


def by_hand(name: str, work: Workload) -> Callable[[], None]:
    model, batch = work.model(), work.batch()
    is_recorded = name == "bf16-layers-graphs" and is_cuda(work.device)
    kind = torch.device(work.device).type
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=True, capturable=is_recorded)
    run: Callable[..., Any] = model
    if name.startswith("bf16-layers"):
        for part in (model.encoder.pre_encode, *model.encoder.layers):
            part.compile()
    elif name != "bf16":
        run = torch.compile(model, mode="reduce-overhead" if name == "bf16-graphs" else None)

    def step() -> None:
        with torch.autocast(kind, torch.bfloat16):
            log_probs, lengths = run(batch["mels"], batch["frames"])
        loss = ctc_loss_sum(log_probs, batch["text"], lengths, batch["labels"])
        optimizer.zero_grad()
        (loss / work.size).backward()
        optimizer.step()

    return recorded(step) if is_recorded else step


def recorded(step: Callable[[], None]) -> Callable[[], None]:
    """Return a CUDA graph of a step, after some that warm it up."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def ours(name: str, work: Workload) -> tuple[Callable[[], Any], str]:
    """Return a step of our engine, and which way it is."""
    task, link = Bench(work), start(discover({}), device=work.device)  # type: ignore[arg-type]
    grain = Grain(work.batch(), 0, np.arange(work.size))
    config = TrainConfig(global_batch=work.size, optimizer="adamw", lr=1e-4, steps=1000)

    def workload() -> timing.Workload:
        return timing.Workload(task, config, link, task.model(), [grain])

    if name != "O4":
        way = candidate(name, work.device)
        compile_kernels(way, workload())
        return timing.TimedSteps(way, workload()), ""
    has_gpu = is_cuda(work.device)
    leaves_some = has_gpu and bool(task.accelerate(task.model()))
    ways = candidates([0, 1, 2, 3], has_kernels=has_gpu, can_graph=has_gpu, leaves_some=leaves_some)
    shared, began = workload(), time.perf_counter()
    compile_kernels(ways[0], shared)

    def seconds(way: Candidate, limit_s: float) -> float:
        found = timing.step_seconds(way, limit_s, workload=shared)
        print(f"  {way.name}: {1e3 * found:.4g} ms", file=sys.stderr, flush=True)
        return found

    choice = choose(ways, seconds, partial(timing.in_turns, workload=shared), lambda: time.perf_counter() - began)
    print(f"  contest: {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
    print("\n".join([choice.line("measured"), *choice.notes]), file=sys.stderr, flush=True)
    clear(work.device)
    return timing.TimedSteps(choice.candidate, workload()), choice.candidate.name


def main() -> None:
    arguments = parser(__doc__ or "")
    add_device(arguments)
    arguments.add_argument("--networks", nargs="+", default=["fastconformer-m", "fastconformer-l"])
    arguments.add_argument("--batches", type=int, nargs="+", default=[64, 256])
    arguments.add_argument("--classes", type=int, default=1024)
    arguments.add_argument("--layers", type=int, help="fewer than the network has, for a dry run")
    arguments.add_argument("--only", nargs="+", default=[*PLAIN, "O2", "O4"])
    arguments.add_argument("--frames", type=int, default=FRAMES)
    arguments.add_argument("--subwords", type=int, default=SUBWORDS)
    arguments.add_argument("--steps", type=int, default=STEPS, help="of a round")
    arguments.add_argument("--profile", action="store_true")
    arguments.add_argument("--compile-only", action="store_true", help="one step of each way, nothing is timed")
    names = [field.name for field in fields(Ways)]
    arguments.add_argument("--ways", nargs="+", default=[], choices=[*names, *(f"no-{name}" for name in names)])
    options = arguments.parse_args()
    announce(options.device)
    device = options.device
    trial = replace(MEASURED, **{name.removeprefix("no-"): not name.startswith("no-") for name in options.ways})
    torch.backends.cudnn.benchmark = True
    torch.backends.cuda.matmul.fp32_precision = torch.backends.cudnn.conv.fp32_precision = "tf32"
    rows: list[Row] = []
    for network, size in product(options.networks, options.batches):
        settings = cut_layers(read_network(network), options.layers)
        work = Workload(settings, options.classes + 1, size, options.frames, options.subwords, device)
        floor = work.floor_ms()
        case = f"{Path(network).stem}, batch {size}"
        rows += [Row(f"{case}, floor", name, ms, "ms") for name, ms in floor.items()]
        rows.append(Row(f"{case}, floor", "step", sum(floor.values()), "ms"))
        found: dict[str, tuple[float, float]] = {}
        for name, ways in product(options.only, [MEASURED, trial] if trial != MEASURED else [MEASURED]):
            if ways != MEASURED and not name.startswith("O"):
                continue
            clear(device)
            began = time.perf_counter()
            try:
                with using(ways):
                    step, way = ours(name, work) if name.startswith("O") else (by_hand(name, work), "")
                    step()
                    wait(device)
                    print(f"{case}, {name}: ready in {time.perf_counter() - began:.1f} s", file=sys.stderr, flush=True)
                    if options.compile_only:
                        continue
                    ms, peak = step_ms(step, device, options.steps), peak_gib(device)
            except Exception as error:  # the others still count
                print(f"{case}, {name}: {type(error).__name__}: {str(error)[:300]}", file=sys.stderr, flush=True)
                continue
            if ways != MEASURED:
                way += f" with {', '.join(options.ways)}"
            share = 100 * sum(floor.values()) / ms
            rate = f"{ms:.2f} ms, {1e3 * size / ms:.0f}/s, {peak:.1f} GiB, {share:.0f} % of the floor"
            print(f"{case}, {name}: {rate} {way}", file=sys.stderr, flush=True)
            found[f"{name}{', new' if ways != MEASURED else ''}"] = ms, peak
            if options.profile and is_cuda(device):
                show_profile(step)
            del step
        rows += rows_of(case, size, sum(floor.values()), found)
    show(rows, f"FastConformer in training on one {device.upper()}", options.json)


def cut_layers(network: NetworkSettings, number: int | None) -> NetworkSettings:
    if number is None or network.conformer is None:
        return network
    fewer = network.conformer.model_copy(update={"n_layers": number})
    return network.model_copy(update={"conformer": fewer})


def rows_of(case: str, size: int, floor_ms: float, found: dict[str, tuple[float, float]]) -> list[Row]:
    """Return the rows of a network and a batch size, all beside the best plain way, whichever came first."""
    best = min((ms for name, (ms, _) in found.items() if name in PLAIN), default=None)
    rows = []
    for name, (ms, peak) in found.items():
        title = f"{case}, {'-' if name.startswith('O') else ''}{name}"
        rows += [
            Row(title, "step", ms, "ms"),
            Row(title, "of the floor", 100 * floor_ms / ms, "%"),
            Row(title, "peak memory", peak, "GiB"),
            Row(
                title,
                "rate",
                1e3 * size / ms,
                "utterances/s",
                "best plain way" if best else None,
                best / ms if best else None,
            ),
        ]
    return rows


if __name__ == "__main__":
    main()
